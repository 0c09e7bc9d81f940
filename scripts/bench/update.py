"""Time of the whole update (check, norm, clip, optimizer, fp16 weights) compared with stock torch.

    python scripts/bench/update.py [--quick] [--groups] [--json FILE] [--threads 2 1] [--models resnet50]

On the parameter shapes of ResNet-50 and BERT-base, for AdamW and for SGD with Nesterov momentum. All
contenders run in one process and alternate, A B C A B C, under the same load. Compares minima and medians.
The memory layout of a process changes these ratios by a tenth or more, so each case is measured in several
processes: reported are the median process, the best and the worst. Bytes per parameter are those that a copy
would move in the same time. A recompilation after the warm-up ends the benchmark with an error.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from launcher.engine import SGD, AdamW, ParameterGroup, Policy
from launcher.engine.flat.groups import Grouping
from launcher.engine.flat.layout import Layout, Piece
from launcher.engine.optim.fused import Optimizer, Scalars
from launcher.engine.optim.updater import Stretches, Updater
from launcher.engine.wire.grad_norm import SumOfSquares
from scripts.bench.baselines import CLIP_NORM, LOSS_SCALE, FusedAlone, PerTensor, StockComposition
from scripts.bench.machine import machine

Shapes = dict[str, torch.Size]


@dataclass(frozen=True)
class Rule:
    """An optimizer as torch's options and as the engine's value."""

    torch_options: Mapping[str, Any]
    ours: Optimizer


RULES = {
    "adamw": Rule({"lr": 1e-4, "weight_decay": 0.01}, AdamW(1e-4, weight_decay=0.01)),
    "sgd": Rule(
        {"lr": 1e-3, "momentum": 0.9, "nesterov": True, "weight_decay": 5e-4},
        SGD(1e-3, momentum=0.9, nesterov=True, weight_decay=5e-4),
    ),
}


def resnet50_shapes() -> Shapes:
    """ImageNet's ResNet-50: a 7x7 stem, 3 + 4 + 6 + 3 bottleneck blocks, 1000 classes."""
    shapes = convolution("conv1", "bn1", 64, 3, 7)
    channels = 64
    for stage, (depth, width) in enumerate(zip((3, 4, 6, 3), (64, 128, 256, 512), strict=True), 1):
        for block in range(depth):
            name = f"layer{stage}.{block}"
            shapes |= convolution(f"{name}.conv1", f"{name}.bn1", width, channels, 1)
            shapes |= convolution(f"{name}.conv2", f"{name}.bn2", width, width, 3)
            shapes |= convolution(f"{name}.conv3", f"{name}.bn3", 4 * width, width, 1)
            if block == 0:
                shapes |= convolution(f"{name}.downsample.0", f"{name}.downsample.1", 4 * width, channels, 1)
            channels = 4 * width
    return shapes | linear("fc", 1000, channels)


def bert_base_shapes() -> Shapes:
    return bert_shapes(12, 768)


def bert_shapes(layers: int, width: int) -> Shapes:
    """BERT, uncased: three embeddings, so many layers of this width, and the pooler. Base: 12 and 768."""
    inner = 4 * width
    shapes = {
        f"embeddings.{name}.weight": torch.Size((rows, width))
        for name, rows in (("word", 30522), ("position", 512), ("token_type", 2))
    }
    shapes |= norm("embeddings.norm", width)
    for layer in range(layers):
        name = f"encoder.{layer}"
        for part in ("query", "key", "value", "attention_output"):
            shapes |= linear(f"{name}.{part}", width, width)
        shapes |= norm(f"{name}.attention_norm", width)
        shapes |= linear(f"{name}.intermediate", inner, width) | linear(f"{name}.output", width, inner)
        shapes |= norm(f"{name}.output_norm", width)
    return shapes | linear("pooler", width, width)


def mlp_shapes() -> Shapes:
    """784 to 10 through three layers of 1024."""
    return linear("0", 1024, 784) | linear("2", 1024, 1024) | linear("4", 1024, 1024) | linear("6", 10, 1024)


def tiny_shapes() -> Shapes:
    """A tiny model, to test the benchmark."""
    return convolution("conv", "bn", 40, 30, 3) | linear("fc", 200, 90)


def convolution(name: str, norm_name: str, out: int, channels: int, kernel: int) -> Shapes:
    return {f"{name}.weight": torch.Size((out, channels, kernel, kernel))} | norm(norm_name, out)


def norm(name: str, width: int) -> Shapes:
    return {f"{name}.weight": torch.Size((width,)), f"{name}.bias": torch.Size((width,))}


def linear(name: str, out: int, width: int) -> Shapes:
    return {f"{name}.weight": torch.Size((out, width)), f"{name}.bias": torch.Size((out,))}


MODELS: dict[str, tuple[Callable[[], Shapes], int]] = {
    "resnet50": (resnet50_shapes, 25_557_032),
    "bert_base": (bert_base_shapes, 109_482_240),
    "mlp": (mlp_shapes, 2_913_290),
    "tiny": (tiny_shapes, 29_080),
}


class Contender(Protocol):
    def step(self) -> None: ...


class Copy:
    """Memory bandwidth: a copy of as many fp32 elements as there are parameters."""

    def __init__(self, num_parameters: int) -> None:
        self._source, self._target = torch.randn(num_parameters), torch.zeros(num_parameters)

    def step(self) -> None:
        self._target.copy_(self._source)


class Ours:
    """The engine's update as in a step: one read of the gradient for check and norm, then one pass."""

    def __init__(
        self,
        shapes: Shapes,
        optimizer: Optimizer,
        compiled: bool,
        groups: Sequence[ParameterGroup] = (),
    ) -> None:
        holder = holder_of(shapes)
        grouping = Grouping.of(holder, groups)
        self._layout = Layout(holder, Policy.fp16(), grouping=grouping)
        for segment in self._layout.segments:
            for slot in segment.slots:  # gaps between the slots stay zero
                slot.flat(segment.grad).normal_()
        sums = SumOfSquares(self._layout.device, compiled)
        self._looks = [
            sums.over([slot.flat(segment.grad) for run in segment.runs for slot in run.slots])
            for segment in self._layout.segments
        ]
        pieces = [Piece(segment.weight, segment.master, segment.grad) for segment in self._layout.segments]
        by_piece = [self._layout.stretches(segment) for segment in self._layout.segments]
        stretches = Stretches(grouping.rates, by_piece) if grouping.rates else None
        self._updater = Updater(pieces, optimizer, compiled, stretches)
        self._lr = torch.tensor(optimizer.lr, dtype=torch.float64)
        self._number = torch.ones((), dtype=torch.int64)

    def step(self) -> None:
        squares = torch.cat([look() for look in self._looks]).sum()
        unscale = 1 / LOSS_SCALE
        clip = (CLIP_NORM / (unscale * squares.sqrt() + 1e-6)).clamp(max=1.0)
        self._updater.step(Scalars((unscale * clip).float(), self._lr, self._number, ~squares.isfinite()))
        self._number = self._number + 1


def holder_of(shapes: Shapes) -> nn.Module:
    """A module with parameters of these shapes and nothing else."""
    holder = nn.Module()
    for name, shape in shapes.items():
        holder.register_parameter(name.replace(".", "_"), nn.Parameter(torch.randn(shape)))
    return holder


def groups_for(shapes: Shapes) -> list[ParameterGroup]:
    """Vectors without decay, and four rates by the place of a parameter: up to eight groups."""
    names = [name.replace(".", "_") for name in shapes]
    groups = []
    for quarter in range(4):
        own = names[quarter * len(names) // 4 : (quarter + 1) * len(names) // 4]
        vectors = [name for name in own if len(list(shapes.values())[names.index(name)]) <= 1]
        matrices = [name for name in own if name not in vectors]
        scale = 0.75 ** (3 - quarter)
        groups += [ParameterGroup(vectors, scale, 0.0)] if vectors else []
        groups += [ParameterGroup(matrices, scale)] if matrices else []
    return groups


def contenders_for(shapes: Shapes, optimizer: str, slow: bool, groups: bool) -> dict[str, Contender]:
    rule, sizes = RULES[optimizer], list(shapes.values())
    contenders: dict[str, Contender] = {
        "copy": Copy(sum(size.numel() for size in sizes)),
        "fused alone": FusedAlone(sizes, optimizer, rule.torch_options),
        "stock composition": StockComposition(sizes, optimizer, rule.torch_options),
        "per tensor": PerTensor(sizes, optimizer, rule.torch_options),
        "ours, plain": Ours(shapes, rule.ours, compiled=False),
        "ours, compiled": Ours(shapes, rule.ours, compiled=True),
    }
    if groups:
        for form in ("plain", "compiled"):
            ours = Ours(shapes, rule.ours, form == "compiled", groups_for(shapes))
            contenders[f"{form}, groups"] = ours
    return contenders if slow else {k: v for k, v in contenders.items() if k != "per tensor"}


def measure(contenders: Mapping[str, Contender], repeats: int) -> dict[str, list[float]]:
    """Seconds by contender, which alternate; without the first two rounds, which touch memory and compile."""
    times: dict[str, list[float]] = {name: [] for name in contenders}
    compiled = 0
    for repeat in range(-2, repeats):
        if repeat == 0:
            compiled = num_compilations()
        for name, contender in contenders.items():
            began = time.perf_counter()
            contender.step()
            if repeat >= 0:
                times[name].append(time.perf_counter() - began)
    if num_compilations() != compiled:
        raise RuntimeError(f"{num_compilations() - compiled} graphs were recompiled between steps")
    return times


def num_compilations() -> int:
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


def summary(times: Mapping[str, list[float]], num_parameters: int) -> dict[str, dict[str, float]]:
    """By contender; ratios of medians and of minima to the fused optimizer and to the stock composition."""
    rows = {}
    for name, seconds in times.items():
        row = {"min_ms": 1e3 * min(seconds), "median_ms": 1e3 * statistics.median(seconds)}
        row["bytes_per_parameter_at_copy_speed"] = 8 * min(seconds) / min(times["copy"])
        if name.endswith(", groups"):
            without = times[f"ours, {name.removesuffix(', groups')}"]
            row["min_over_no_groups"] = min(seconds) / min(without)
            row["median_over_no_groups"] = statistics.median(
                one / other for one, other in zip(seconds, without, strict=True)
            )
        for other in ("fused alone", "stock composition"):
            key = other.replace(" ", "_")
            row[f"min_over_{key}"] = min(seconds) / min(times[other])
            row[f"median_over_{key}"] = statistics.median(seconds) / statistics.median(times[other])
        rows[name] = row
    rows["copy"]["gb_per_s"] = 8e-9 * num_parameters / min(times["copy"])
    return rows


@dataclass(frozen=True)
class Case:
    model: str
    optimizer: str
    threads: int
    repeats: int
    slow: bool  # with the slowest contender
    groups: bool  # ours with parameter groups too

    def run(self) -> dict[str, dict[str, float]]:
        """Measure in this process."""
        torch.set_num_threads(self.threads)
        make, num_parameters = MODELS[self.model]
        shapes = make()
        assert sum(shape.numel() for shape in shapes.values()) == num_parameters
        times = measure(contenders_for(shapes, self.optimizer, self.slow, self.groups), self.repeats)
        return summary(times, num_parameters)

    def run_in_processes(self, count: int) -> list[dict[str, dict[str, float]]]:
        """Measure in new processes, one after another."""
        spawn = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(1, mp_context=spawn, max_tasks_per_child=1) as executor:
            return list(executor.map(Case.run, [self] * count))


def medians(processes: Sequence[Mapping[str, Mapping[str, float]]]) -> dict[str, dict[str, float]]:
    """Median of each figure over the processes."""
    return {
        name: {key: statistics.median(rows[name][key] for rows in processes) for key in row}
        for name, row in processes[0].items()
    }


def tell(title: str, processes: Sequence[Mapping[str, Mapping[str, float]]]) -> None:
    middle = medians(processes)
    print(
        f"\n{title}; copy: {middle['copy']['gb_per_s']:.1f} GB/s read and written; {len(processes)} processes"
    )
    ratios = {
        "min_over_fused_alone": "min / fused",
        "median_over_fused_alone": "median / fused",
        "min_over_stock_composition": "min / stock",
        "median_over_stock_composition": "median / stock",
    }
    print(f"{'':18} {'min ms':>7} {'B/p':>5}", *(f"{title:>19}" for title in ratios.values()))
    for name, row in middle.items():
        print(
            f"{name:18} {row['min_ms']:7.1f} {row['bytes_per_parameter_at_copy_speed']:5.1f}",
            *(f"{with_range([rows[name][key] for rows in processes]):>19}" for key in ratios),
        )
    for name in [name for name in middle if name.endswith(", groups")]:
        for key in ("min_over_no_groups", "median_over_no_groups"):
            values = [rows[name][key] for rows in processes]
            print(f"{name}: {key.replace('_', ' ')} {with_range(values, 3)}")


def with_range(values: Sequence[float], digits: int = 2) -> str:
    middle, low, high = (
        f"{each:.{digits}f}" for each in (statistics.median(values), min(values), max(values))
    )
    return f"{middle} ({low} to {high})"


def cases(arguments: argparse.Namespace) -> Iterator[Case]:
    repeats = 2 if arguments.quick else arguments.repeats
    for threads in arguments.threads:
        for model in ["tiny"] if arguments.quick else arguments.models:
            for optimizer in RULES:
                yield Case(
                    model, optimizer, threads, repeats, not arguments.skip_per_tensor, arguments.groups
                )


def main(argv: Sequence[str] | None = None) -> None:
    arguments = parse(argv)
    done = []
    for case in cases(arguments):
        processes = case.run_in_processes(1 if arguments.quick else arguments.processes)
        tell(f"{case.model}, {case.optimizer}, {case.threads} threads", processes)
        done.append(
            {
                "model": case.model,
                "optimizer": case.optimizer,
                "threads": case.threads,
                "rows": medians(processes),
                "processes": processes,
            }
        )
        if arguments.json:  # after each case, so that an interrupted run has results
            arguments.json.write_text(json.dumps(report(done, case.repeats), indent=2) + "\n")


def report(done: list[dict[str, Any]], repeats: int) -> dict[str, Any]:
    return {
        "what": "whole update: check, norm, clip, optimizer, fp16 weights; rows are medians over processes",
        "machine": machine(),
        "n": repeats,
        "cases": done,
    }


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", choices=sorted(MODELS), default=["resnet50", "bert_base"])
    parser.add_argument("--threads", nargs="+", type=int, default=[2, 1])
    parser.add_argument("--repeats", type=int, default=12, help="in each process")
    parser.add_argument("--processes", type=int, default=5)
    parser.add_argument("--skip-per-tensor", action="store_true", help="leave the slowest contender out")
    parser.add_argument("--groups", action="store_true", help="ours with parameter groups beside it")
    parser.add_argument("--quick", action="store_true", help="two repeats, a tiny model, to test this file")
    parser.add_argument("--json", type=Path, help="where to write the numbers")
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
