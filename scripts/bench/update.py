"""Time of all that a step does after the backward pass, compared with stock torch.

    python scripts/bench/update.py [--quick] [--groups] [--json FILE] [--threads 2 1] [--models resnet50]

On the parameter shapes of ResNet-50 and BERT-base, for AdamW and for SGD with Nesterov momentum. Ours is a
whole `backward` and `step` of a Stepper whose gradients come ready from autograd: their copy to the wire, the
checks, norm, clip, update, fp16 weights, loss scale and report. A rank of a group, as each of the 2 workers
that `scripts/run` starts, also checks its own gradient and runs its collectives, here in a group of one.

All contenders run in one process and alternate, in an order that rotates. Those that do the same work must
end with the same weights. The memory layout of a process changes these ratios by a tenth or more, so each
case is measured in several processes: reported are the median process, the best and the worst. Bytes per
parameter are those that a copy would move in the same time.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import statistics
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from launcher.engine import SGD, AdamW, ParameterGroup, Policy, Stepper, StepResult
from launcher.engine.optim.optimizers import Optimizer
from launcher.os.allocator import tune_malloc
from scripts.bench.baselines import Disagreement
from scripts.bench.delivery import loss_delivering
from scripts.bench.group_of_one import collectives_of_one
from scripts.bench.interleaved import Figure, interleave, median_interval, row_of, text_table, write
from scripts.bench.shapes import MODELS, Shapes
from scripts.bench.update_baselines import (
    CLIP_NORM,
    LOSS_SCALE,
    Copy,
    Delivery,
    FlatStock,
    FusedAlone,
    PerTensor,
    StockComposition,
    gradients_for,
    initial_values,
)


@dataclass(frozen=True)
class Rule:
    """An optimizer as torch's options and as the engine's value."""

    torch_options: Mapping[str, Any]
    ours: Optimizer


RULES = {
    "adamw": Rule({"lr": 1e-3, "weight_decay": 0.01}, AdamW(1e-3, weight_decay=0.01)),
    "sgd": Rule(
        {"lr": 1e-2, "momentum": 0.9, "nesterov": True, "weight_decay": 5e-4},
        SGD(1e-2, momentum=0.9, nesterov=True, weight_decay=5e-4),
    ),
}
BASELINES = {
    "fused, per tensor": "torch's fused optimizer alone, per tensor",
    "fused, flat": "torch's fused optimizer alone, flat",
    "stock composition": "torch's functions per tensor",
    "flat stock": "torch's functions on flat tensors",
}
PROMISED = {("adamw", "flat stock"): 1.1}  # the largest ratio, by optimizer and baseline


class Contender(Protocol):
    def step(self) -> object: ...


class Ours:
    """A Stepper's backward and step on a module without a forward pass. Reads each report one step late."""

    def __init__(
        self,
        shapes: Shapes,
        optimizer: Optimizer,
        groups: Sequence[ParameterGroup] = (),
        group: dist.ProcessGroup | None = None,
    ) -> None:
        sizes = list(shapes.values())
        holder = nn.Module()
        for name, value in zip(shapes, initial_values(sizes), strict=True):
            holder.register_parameter(name.replace(".", "_"), nn.Parameter(value))
        self._stepper = Stepper(
            holder,
            optimizer,
            Policy.fp16(),
            group,
            clip_norm=CLIP_NORM,
            reference_count=1,
            emulate=False,
            groups=groups,
        )
        assert self._stepper.loss_scale == LOSS_SCALE
        self._parameters = list(holder.parameters())
        self._gradients = gradients_for(sizes)
        self._waiting: list[StepResult] = []

    def step(self) -> None:
        self._stepper.backward(loss_delivering(self._gradients, self._parameters), 1)
        self._waiting.append(self._stepper.step())
        if len(self._waiting) > 1:
            self._waiting.pop(0).read()

    def masters(self) -> list[Tensor]:
        found = self._stepper.named_masters()
        return [found[name] for name, _ in self._stepper.model.named_parameters()]


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


def contenders_for(case: Case, shapes: Shapes, group: dist.ProcessGroup | None) -> dict[str, Contender]:
    rule, sizes, name = RULES[case.optimizer], list(shapes.values()), case.optimizer
    contenders: dict[str, Contender] = {
        "copy": Copy(sum(size.numel() for size in sizes)),
        "delivery alone": Delivery(sizes),
        "fused, per tensor": FusedAlone(sizes, name, rule.torch_options),
        "fused, flat": FusedAlone(sizes, name, rule.torch_options, flat=True),
        "stock composition": StockComposition(sizes, name, rule.torch_options),
        "flat stock": FlatStock(sizes, name, rule.torch_options, group),
        "ours": Ours(shapes, rule.ours, group=group),
    }
    if case.slow:
        contenders["per tensor"] = PerTensor(sizes, name, rule.torch_options)
    if case.groups:
        contenders["ours, groups"] = Ours(shapes, rule.ours, groups_for(shapes), group)
    return contenders


def measure(contenders: Mapping[str, Contender], repeats: int) -> dict[str, list[float]]:
    """Seconds by contender, which alternate; without the first two rounds, which touch new memory."""
    sides = {name: contender.step for name, contender in contenders.items()}
    interleave(sides, 0)
    return interleave(sides, repeats, warm_up=0)


def refuse_other_weights(contenders: Mapping[str, Any], shapes: Shapes) -> None:
    """Raise Disagreement where contenders that do the same work have updated otherwise, or not at all."""
    start = initial_values(list(shapes.values()))
    own = [new - old for new, old in zip(contenders["ours"].masters(), start, strict=True)]
    scale = _norm(own)
    for name, contender in contenders.items():
        if not hasattr(contender, "masters") or name.endswith(", groups"):
            continue
        other = (new - old for new, old in zip(contender.masters(), start, strict=True))
        apart = _norm([one - two for one, two in zip(own, other, strict=True)]) / scale if scale else 1.0
        if not apart < 0.01:
            raise Disagreement(
                f"{name} changes the weights otherwise than ours, by {apart:.1%} of the change."
            )


def _norm(tensors: Sequence[Tensor]) -> float:
    return float(torch.stack(torch._foreach_norm(list(tensors))).norm())


def summary(times: Mapping[str, list[float]], num_parameters: int) -> dict[str, dict[str, float]]:
    """By contender; ratios of medians and of minima to each baseline."""
    rows = {}
    for name, seconds in times.items():
        row = row_of(seconds)
        row["bytes_per_parameter_at_copy_speed"] = 8 * min(seconds) / min(times["copy"])
        if name.endswith(", groups"):
            without = times[name.removesuffix(", groups")]
            row["min_over_no_groups"] = min(seconds) / min(without)
            row["median_over_no_groups"] = statistics.median(
                one / other for one, other in zip(seconds, without, strict=True)
            )
        for other in BASELINES:
            row[f"min_over_{key_of(other)}"] = min(seconds) / min(times[other])
            row[f"median_over_{key_of(other)}"] = statistics.median(seconds) / statistics.median(times[other])
        rows[name] = row
    rows["copy"]["gb_per_s"] = 8e-9 * num_parameters / min(times["copy"])
    return rows


def key_of(name: str) -> str:
    return name.replace(", ", "_").replace(" ", "_")


@dataclass(frozen=True)
class Case:
    model: str
    optimizer: str
    threads: int
    repeats: int
    grouped: bool  # as a rank of a group
    slow: bool  # with the slowest contender
    groups: bool  # ours with parameter groups too

    @property
    def title(self) -> str:
        where = "in a group" if self.grouped else "alone"
        return f"{self.model}, {self.optimizer}, {self.threads} threads, {where}"

    def run(self) -> dict[str, dict[str, float]]:
        """Measure in this process."""
        torch.set_num_threads(self.threads)
        tune_malloc()
        make, num_parameters = MODELS[self.model]
        # Matrices first: flat memory then has them in one stretch, for every contender.
        shapes = dict(sorted(make().items(), key=lambda item: len(item[1]), reverse=True))
        assert sum(shape.numel() for shape in shapes.values()) == num_parameters
        here = collectives_of_one(torch.device("cpu")) if self.grouped else contextlib.nullcontext()
        with here as group:
            contenders = contenders_for(self, shapes, group)
            times = measure(contenders, self.repeats)
            refuse_other_weights(contenders, shapes)
        return summary(times, num_parameters)

    def run_in_processes(self, count: int) -> list[dict[str, dict[str, float]]]:
        """Measure in new processes, one after another."""
        spawn = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(1, mp_context=spawn, max_tasks_per_child=1) as executor:
            return list(executor.map(Case.run, [self] * count))


def figures_of(case: Case, processes: Sequence[Mapping[str, Mapping[str, float]]]) -> list[Figure]:
    """Ours over each baseline. The interval is that of the processes."""
    rows = [process["ours"] for process in processes]
    ours = statistics.median(own["median_ms"] for own in rows)
    figures = []
    for baseline, title in BASELINES.items():
        ratios = [own[f"median_over_{key_of(baseline)}"] for own in rows]
        theirs = statistics.median(process[baseline]["median_ms"] for process in processes)
        figures.append(
            Figure(
                *(f"step after backward, {case.title}", ours, "ms", title, theirs),
                *(statistics.median(ratios), *median_interval(ratios)),
                promised=PROMISED.get((case.optimizer, baseline)),
            )
        )
    return figures


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
    print(f"{'median over':26} {'':>13}", *(f"{name:>19}" for name in BASELINES))
    print(f"{'':18} {'min ms':>7} {'median':>7} {'B/p':>5}")
    for name, row in middle.items():
        print(
            f"{name:18} {row['min_ms']:7.1f} {row['median_ms']:7.1f} "
            f"{row['bytes_per_parameter_at_copy_speed']:5.1f}",
            *(
                f"{with_range([rows[name][f'median_over_{key_of(each)}'] for rows in processes]):>19}"
                for each in BASELINES
            ),
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
    options = {"slow": arguments.per_tensor, "groups": arguments.groups}
    if arguments.quick:
        yield Case("tiny", "adamw", 1, 2, grouped=True, **options)
        yield Case("tiny", "sgd", 1, 2, grouped=False, **options)
        return
    for threads in arguments.threads:
        for model in arguments.models:
            for optimizer in RULES:
                for grouped in (False, True):
                    yield Case(model, optimizer, threads, arguments.repeats, grouped, **options)


def main(argv: Sequence[str] | None = None) -> None:
    arguments = parse(argv)
    done: list[dict[str, Any]] = []
    figures: list[Figure] = []
    for case in cases(arguments):
        processes = case.run_in_processes(1 if arguments.quick else arguments.processes)
        tell(case.title, processes)
        figures += figures_of(case, processes)
        done.append(
            {
                "model": case.model,
                "optimizer": case.optimizer,
                "threads": case.threads,
                "grouped": case.grouped,
                "rows": medians(processes),
                "processes": processes,
            }
        )
        if arguments.json:  # after each case, so that an interrupted run has results
            what = "all of a step after the backward pass; rows are medians over processes"
            write(arguments.json, what, case.repeats, done, figures)
    print(f"\n{text_table(figures)}")


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", choices=sorted(MODELS), default=["resnet50", "bert_base"])
    parser.add_argument("--threads", nargs="+", type=int, default=[2, 1])
    parser.add_argument("--repeats", type=int, default=12, help="in each process")
    parser.add_argument("--processes", type=int, default=5)
    parser.add_argument("--per-tensor", action="store_true", help="the slowest contender too")
    parser.add_argument("--groups", action="store_true", help="ours with parameter groups beside it")
    parser.add_argument("--quick", action="store_true", help="two repeats, a tiny model, to test this file")
    parser.add_argument("--json", type=Path, help="where to write the numbers")
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
