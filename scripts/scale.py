"""What a run would need on 8 to 4096 ranks, computed and not measured: the tables of scripts/scale.md.

    scripts/run python scripts/scale.py                          # the tables of the page
    scripts/run python scripts/scale.py --model NAME 7e8 350     # a model: parameters, ms of its passes
    scripts/run python scripts/scale.py --write                  # writes them into the page

Bytes per parameter follow from the engine's policies; the time of a step from scripts/bench/step_model.py.
"""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from launcher.distributed.links import ring_bytes
from launcher.engine import Policy
from launcher.engine.grads.collectives import default_predivide_factor
from scripts.bench.shapes import Shapes, bert_base_shapes, gpt_shapes, resnet50_shapes
from scripts.bench.step_model import StepSeconds, wire_seconds

PAGE = Path(__file__).with_name("scale.md")
RANKS = (8, 64, 512, 4096)
SGD, ADAMW = 1, 2  # states of 4 bytes per parameter
FP32_BYTES = 4

# Mbit/s that one rank sends in one direction.
LINKS = {
    "NVLink": 1_200_000,  # V100 data sheet: 6 links of 25 GB/s
    "PCIe": 96_000,  # 3.0 x16: 12 GB/s of the 15.75 on paper
    "100 Gbit": 100_000,
    "25 Gbit": 25_000,
    "10 Gbit": 10_000,
    "1 Gbit": 1_000,
}
SHARED = ("100 Gbit", "25 Gbit", "10 Gbit")  # of which eight GPUs of a machine may share one
MANY = 64  # ranks in the comparison of wires

IMAGES_PER_S = 1200  # ResNet-50 v1.5, mixed precision, one V100 16 GB: NVIDIA DeepLearningExamples
FLOPS = 39e12  # per s, a GPT of 1.2 B parameters on one V100: Shoeybi et al., 2019 (Megatron-LM)
MEMORY_RATE = 0.8 * 900e9  # bytes/s: V100 data sheet, of which an update reaches 80 %
BACKWARD_SHARE = 2 / 3  # each product has two in the backward pass

HOST_RATE = 12e9  # bytes/s from a GPU to pinned memory over PCIe 3.0
DISK_RATE = 1e9  # bytes/s of a shared file system, to one rank
RESTART_S = 120  # from a failure to the load of the checkpoint: its detection, and new processes
FAILURE_HOURS = 54 * 24 * 16384 / 419  # of one GPU: 419 failures on 16,384 in 54 days (Llama 3, 2024)
DEFAULT_EVERY_S = 600
HOUR = 3600.0


@dataclass(frozen=True)
class Held:
    """Bytes that a rank holds all the time, by kind, without activations."""

    weights: float
    masters: float
    gradients: float
    states: float

    @property
    def total(self) -> float:
        return self.weights + self.masters + self.gradients + self.states


def held(policy: Policy, states: int, matrices: int, vectors: int = 0, shards: int = 1) -> Held:
    """What a Stepper allocates for so many elements of matrices and vectors, padding left out.

    Vectors are fp32 and whole on each rank under any policy. `shards`: ranks with `ddp.shard_optimizer=true`.
    """
    half = policy.weights.itemsize < FP32_BYTES
    state_bytes = states * FP32_BYTES
    return Held(
        weights=policy.weights.itemsize * matrices + FP32_BYTES * vectors,
        masters=FP32_BYTES * matrices / shards if half and policy.masters else 0,
        gradients=policy.gradient_dtype.itemsize * matrices + FP32_BYTES * vectors,
        states=state_bytes * (matrices / shards + vectors),
    )


@dataclass(frozen=True)
class Model:
    """`compute_s`: forward and backward pass of one rank."""

    name: str
    matrices: int
    vectors: int
    states: int
    compute_s: float

    @classmethod
    def of(cls, name: str, shapes: Shapes, states: int, compute_s: float) -> Model:
        vectors = sum(shape.numel() for shape in shapes.values() if len(shape) < 2)
        return cls(name, num_parameters(shapes) - vectors, vectors, states, compute_s)

    def held(self, shards: int = 1) -> Held:
        return held(Policy.fp16(), self.states, self.matrices, self.vectors, shards)

    @property
    def checkpoint_bytes(self) -> float:
        """fp32 weights and optimizer states."""
        return FP32_BYTES * (1 + self.states) * (self.matrices + self.vectors)

    def step(self, shards: int = 1) -> StepSeconds:
        """The update reads and writes master and states, reads the gradient twice, and writes the weight."""
        update_bytes = (8 * (1 + self.states) + 2 * 2 + 2) * (self.matrices + self.vectors)
        forward = (1 - BACKWARD_SHARE) * self.compute_s
        return StepSeconds(forward, BACKWARD_SHARE * self.compute_s, update_bytes / shards / MEMORY_RATE)


def num_parameters(shapes: Shapes) -> int:
    return sum(shape.numel() for shape in shapes.values())


def transformer_seconds(shapes: Shapes, tokens: int) -> float:
    """6 operations per parameter and token: forward 2, backward 4 (Kaplan et al., 2020)."""
    return 6 * num_parameters(shapes) * tokens / FLOPS


GPT_1_3B = gpt_shapes(24, 2048)
MODELS = [
    Model.of("ResNet-50", resnet50_shapes(), SGD, 128 / IMAGES_PER_S),
    Model.of("BERT-base", bert_base_shapes(), ADAMW, transformer_seconds(bert_base_shapes(), 32 * 128)),
    Model.of("GPT 1.3 B", GPT_1_3B, ADAMW, transformer_seconds(GPT_1_3B, 2 * 2048)),
]


def pieces_bytes(message: float, ranks: int, sharing: int) -> float:
    """What `sharing` ranks of one machine send to other machines in an all-to-all of `message` each."""
    return sharing * message * (ranks - sharing) / ranks


def seconds_of_wires(model: Model, mbit: float, ranks: int, sharing: int) -> tuple[float, float]:
    """Seconds of a step with native sums, and with shards; `sharing` ranks have one network card.

    A ring enters and leaves each machine once. In an all-to-all each rank sends to all others itself.
    """
    message = model.held().gradients
    ring_s = wire_seconds(ring_bytes(message, ranks), mbit)
    exchange_s = wire_seconds(pieces_bytes(message, ranks, sharing), mbit)
    gather_s = ring_s / 2
    native = model.step().with_communication(ring_s)
    sharded = (
        model.step(ranks).with_communication(exchange_s) + gather_s
    )  # weights are gathered after the update
    return native, sharded


def young_s(cost_s: float, mtbf_s: float) -> float:
    """Computing between two checkpoints, first order: J. W. Young, Comm. ACM 17(9), 1974."""
    return math.sqrt(2 * cost_s * mtbf_s)


def daly_s(cost_s: float, mtbf_s: float) -> float:
    """The same of higher order: J. T. Daly, Future Generation Computer Systems 22(3), 2006, equation 37."""
    if cost_s >= 2 * mtbf_s:
        return mtbf_s
    ratio = cost_s / (2 * mtbf_s)
    return young_s(cost_s, mtbf_s) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - cost_s


def lost_share(every_s: float, cost_s: float, restart_s: float, mtbf_s: float) -> float:
    """The share of all time that is no progress, for failures at random: Daly's total time, 2006."""
    segment_s = math.exp(restart_s / mtbf_s) * mtbf_s * math.expm1((every_s + cost_s) / mtbf_s)
    return 1 - every_s / segment_s


Rows = Iterator[Sequence[str]]


def _per_parameter() -> Rows:
    yield "bytes per parameter of a matrix", "weights", "masters", "gradients", "states", "together"
    fp16, amp = Policy.fp16(), Policy.amp_fp16()
    for name, found in {
        "`fp16`, AdamW": held(fp16, ADAMW, 1),
        "`fp16`, AdamW, `ddp.shard_optimizer=true`, 8 ranks": held(fp16, ADAMW, 1, shards=8),
        "`fp16`, AdamW, `ddp.shard_optimizer=true`, 64 ranks": held(fp16, ADAMW, 1, shards=64),
        "`fp16`, SGD with momentum": held(fp16, SGD, 1),
        "`amp_fp16`, AdamW": held(amp, ADAMW, 1),
        "`fp32`, AdamW": held(Policy.fp32(), ADAMW, 1),
    }.items():
        yield name, *(f"{each:.4g}" for each in (*vars(found).values(), found.total))


def _memory(models: Sequence[Model]) -> Rows:
    yield "GB per rank", "million parameters", "whole", *(f"sharded, {ranks} ranks" for ranks in RANKS)
    for model in models:
        sizes = [model.held(shards).total for shards in (1, *RANKS)]
        yield model.name, f"{(model.matrices + model.vectors) / 1e6:.1f}", *(_giga(size) for size in sizes)


def _sent(models: Sequence[Model]) -> Rows:
    yield (
        "MB per rank and step",
        *(f"{ranks} ranks" for ranks in RANKS),
        "4096 ranks, `ddp.gradient_dtype=fp32`",
    )
    for model in models:
        fp32 = FP32_BYTES * (model.matrices + model.vectors)
        messages = [(model.held().gradients, ranks) for ranks in RANKS] + [(fp32, RANKS[-1])]
        yield model.name, *(f"{ring_bytes(message, ranks) / 1e6:,.0f}" for message, ranks in messages)


def _steps(model: Model) -> Rows:
    yield (
        f"{model.name}: {1e3 * model.step().total:.0f} ms alone",
        *("step ms, 8 ranks", "4096"),
        *("efficiency, 8 ranks", "64", "512", "4096", "4096, `ddp.gradient_dtype=fp32`"),
    )
    step, message = model.step(), model.held().gradients
    wide = FP32_BYTES * (model.matrices + model.vectors)
    for name, mbit in LINKS.items():
        by_ranks = [wire_seconds(ring_bytes(message, ranks), mbit) for ranks in RANKS]
        times = [step.with_communication(by_ranks[0]), step.with_communication(by_ranks[-1])]
        fp32_s = wire_seconds(ring_bytes(wide, RANKS[-1]), mbit)
        shares = [step.efficiency(wire_s) for wire_s in (*by_ranks, fp32_s)]
        yield name, *(f"{1e3 * each:,.0f}" for each in times), *map(_percent, shares)


def _wires(models: Sequence[Model]) -> Rows:
    yield (
        f"time of a sharded step over that of an all-reduced one, {MANY} ranks",
        "ranks per card",
        *(f"{model.name}, `ddp.shard_optimizer=true`" for model in models),
    )
    for name in SHARED:
        for sharing in (1, 8):
            found = [seconds_of_wires(model, LINKS[name], MANY, sharing) for model in models]
            ratios = [other / native for native, *others in found for other in others]
            yield name, str(sharing), *(f"{ratio:.2f}" for ratio in ratios)


def _predivide() -> Rows:
    yield "ranks", *map(str, RANKS)
    yield "`ddp.gradient_predivide_factor=auto`", *(str(default_predivide_factor(ranks)) for ranks in RANKS)


def _checkpoints(models: Sequence[Model]) -> Rows:
    yield (
        *("checkpoint", "GB", "hours between failures", "pause s", "Young s", "Daly s"),
        *("lost, Daly", f"lost, every {DEFAULT_EVERY_S} s"),
    )
    by_failures = {f"{ranks} ranks": FAILURE_HOURS / ranks for ranks in RANKS} | {"spot, no notice": 1.0}
    for model in models:
        size = model.checkpoint_bytes
        pause_s, restart_s = size / HOST_RATE, RESTART_S + size / DISK_RATE
        for name, hours in by_failures.items():
            mtbf_s = hours * HOUR
            best_s = daly_s(pause_s, mtbf_s)
            lost = [lost_share(each, pause_s, restart_s, mtbf_s) for each in (best_s, DEFAULT_EVERY_S)]
            yield (
                *(f"{model.name}, {name}", _giga(size), f"{hours:,.0f}", f"{pause_s:.2f}"),
                *(f"{young_s(pause_s, mtbf_s):,.0f}", f"{best_s:,.0f}"),
                *(f"{100 * each:.2f} %" for each in lost),
            )


def _giga(size: float) -> str:
    return f"{size / 1e9:.2f}"


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def tables(models: Sequence[Model]) -> list[str]:
    """All tables in the order of the page, in Markdown."""
    found = [_per_parameter(), _memory(models), _sent(models), *map(_steps, models)]
    return [_markdown(rows) for rows in (*found, _wires(models), _predivide(), _checkpoints(models))]


def _markdown(rows: Rows) -> str:
    head, *body = rows
    lines = [head, ["---"] * len(head), *body]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def write(page: str, found: Sequence[str]) -> str:
    """The page with its tables replaced, in order."""
    following = iter(found)
    return re.sub(r"(?:^\|.*\n)+", lambda _: next(following), page, flags=re.M)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", nargs=3, metavar=("NAME", "PARAMETERS", "PASSES_MS"))
    parser.add_argument("--write", action="store_true", help=f"write the tables into {PAGE.name}")
    options = parser.parse_args()
    models = MODELS
    if options.model:
        name, number, passes_ms = options.model
        models = [Model(name, round(float(number)), 0, ADAMW, float(passes_ms) / 1e3)]
    if options.write:
        PAGE.write_text(write(PAGE.read_text(), tables(MODELS)))
    else:
        print("\n".join(tables(models)), end="")


if __name__ == "__main__":
    main()
