"""CPU time of a step's bookkeeping on one rank, from 8 to 16384 ranks.

    python scripts/bench/bookkeeping.py [--quick] [--json FILE]

On torch's fake process group, whose collectives send nothing and hand each rank its own values. A backward
pass delivers the gradients of 1 M parameters, and step() reduces, judges and updates, on the wire `native`,
and sharded. Every rank reads as many elements whatever the number of ranks, and with shards
updates fewer on more. One thread; the numbers of ranks alternate.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from launcher.engine import SGD, Policy, Scaling, Stepper, StepResult, Wire
from scripts.bench.delivery import loss_delivering
from scripts.bench.interleaved import Goal, Times, goal_table, interleave, row_of, write

WORLD_SIZES = (8, 64, 512, 4096, 16384)
WIRES = {"native": Wire(), "shard": Wire(shard=True)}
MATRIX, NUM_LAYERS = (512, 512), 4
GATHERS = ("all_gather_single", "all_gather_into_tensor")
GOAL = 1.1  # flat within 10 %


class Finished:
    """A collective that has nothing left to do."""

    def wait(self) -> None: ...


@contextmanager
def idle_all_gather() -> Iterator[None]:
    """All-gathers return at once: torch's fake one copies rank by rank, in a time that is not ours."""
    originals = {name: getattr(dist, name) for name in GATHERS if hasattr(dist, name)}
    for name in originals:
        setattr(dist, name, lambda *args, **kwargs: Finished())
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(dist, name, original)


class Rank:
    """Rank 0 of so many, the others of which exist by name only. Reads each report one step late."""

    def __init__(self, wire: Wire, world_size: int) -> None:
        group = dist.new_group(list(range(world_size)), backend="fake", use_local_synchronization=True)
        assert isinstance(group, dist.ProcessGroup)
        model = nn.ModuleList(nn.Linear(*MATRIX) for _ in range(NUM_LAYERS))
        optimizer = SGD(1e-3, momentum=0.9)
        scaling = Scaling("static", init=1)
        self._stepper = Stepper(
            model,
            optimizer,
            Policy.fp16(),
            group,
            wire=wire,
            scaling=scaling,
            reference_count=1,
            emulate=True,
        )
        self._parameters = list(model.parameters())
        self._gradients = [torch.full_like(p, 2.0**-10) for p in self._parameters]
        self._waiting: list[StepResult] = []

    def step(self) -> None:
        self._stepper.backward(loss_delivering(self._gradients, self._parameters), 1)
        self._waiting.append(self._stepper.step())
        if len(self._waiting) > 1 and self._waiting.pop(0).read().skipped:
            raise RuntimeError("a step was skipped, which costs less than one that is applied")


def measure(wire: Wire, world_sizes: tuple[int, ...], repeats: int, steps: int) -> Times:
    """CPU seconds of a step by number of ranks."""
    sides = {str(world_size): Rank(wire, world_size).step for world_size in world_sizes}
    with idle_all_gather():
        return interleave(sides, repeats, steps=steps, clock=time.process_time)


def goal_of(name: str, times: Times) -> Goal:
    """The slowest number of ranks over the smallest, by the minimum: nothing makes a step too fast."""
    first, *others = times
    slowest = max(others, key=lambda number: min(times[number]))
    minima = {number: [min(seconds)] for number, seconds in times.items()}
    return Goal.of("P15", f"bookkeeping, {slowest} ranks, {name}", minima, slowest, first, GOAL, 1.0)


def main() -> None:
    arguments = parse()
    torch.set_num_threads(1)
    repeats, steps = (2, 2) if arguments.quick else (arguments.repeats, arguments.steps)
    sizes = WORLD_SIZES[:2] if arguments.quick else WORLD_SIZES
    rows, goals = {}, []
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=max(sizes))
    try:
        for name, wire in WIRES.items():
            times = measure(wire, sizes, repeats, steps)
            rows[name] = {f"{size} ranks": row_of(seconds) for size, seconds in times.items()}
            goals.append(goal_of(name, times))
    finally:
        dist.destroy_process_group()
    print(f"{'':10} {'':12} {'min ms':>8} {'median':>8}")
    for name, by_size in rows.items():
        for size, row in by_size.items():
            print(f"{name:10} {size:>12} {row['min_ms']:8.2f} {row['median_ms']:8.2f}")
    print(f"\n{goal_table(goals)}")
    write(arguments.json, "CPU time of a step on one rank of many", repeats, rows, goals, steps=steps)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--steps", type=int, default=5, help="in each repeat")
    parser.add_argument("--quick", action="store_true", help="two repeats, to test this file")
    parser.add_argument("--json", type=Path, help="where to write the numbers")
    return parser.parse_args()


if __name__ == "__main__":
    main()
