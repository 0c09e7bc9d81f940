"""What it costs to time the parts of a step.

    python scripts/bench/time_split.py [--quick] [--json FILE]

CPU time of small steps with and without each part, in blocks that alternate: the difference of the minima, as
a share of a step of 5 ms. The steps are shorter than 5 ms, whose noise would exceed the difference. One rank,
one thread.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from launcher.engine import SGD, Policy, Stepper, StepResult
from launcher.engine.step_timer import DATA, Mark
from launcher.trainer.step_times import StepTimes, parts_of
from scripts.bench.interleaved import Goal, Times, goal_table, interleave, median_interval, row_of, write

STEP_MS = 5.0
LIMIT = 0.005  # of a step
CPU = torch.device("cpu")


class NoClock:
    """In place of a StepClock."""

    def restart(self) -> None: ...

    def mark(self, part: str) -> None: ...

    def take(self) -> list[Mark]:
        return []


class Steps:
    """Steps of a small network, each read one step late, as the launcher does."""

    def __init__(self, split: bool) -> None:
        torch.manual_seed(0)
        self._stepper = Stepper(nn.Linear(8, 2), SGD(1e-3), Policy.fp32())
        if not split:
            object.__setattr__(self._stepper, "clock", NoClock())
        self._times = StepTimes(1) if split else None
        self._batch = torch.ones(4, 8)
        self._waiting: StepResult | None = None
        self._before = time.perf_counter()

    def step(self) -> None:
        clock = self._stepper.clock
        clock.restart()
        batch = self._batch
        clock.mark(DATA)
        self._learn(batch)
        result, before = self._stepper.step(), self._waiting
        self._waiting = result
        if before is not None:
            spans_ms = before.read().spans_ms
            if self._times is not None:
                now = time.perf_counter()
                self._times.add(now - self._before, parts_of(spans_ms, 1))
                self._before = now

    def _learn(self, batch: Tensor) -> None:
        with self._stepper.forward():
            loss = self._stepper.model(batch).square().sum()
        self._stepper.backward(loss, len(batch))


def added(times: Times, ours: str, baseline: str) -> float:
    """Milliseconds that a step with is longer than one without, by the minima."""
    return 1e3 * (min(times[ours]) - min(times[baseline]))


def goal_of(what: str, times: Times, ours: str, baseline: str) -> Goal:
    more = [1e3 * (one - two) / STEP_MS for one, two in zip(times[ours], times[baseline], strict=True)]
    low, high = median_interval(more)
    cost = added(times, ours, baseline)
    return Goal(
        row="split",
        what=what,
        ours=cost,
        unit="ms",
        baseline=f"a step of {STEP_MS:g} ms",
        theirs=None,
        value=cost / STEP_MS,
        low=low,
        high=high,
        goal=LIMIT,
    )


def main() -> None:
    arguments = parse()
    torch.set_num_threads(1)
    repeats, steps = (2, 5) if arguments.quick else (arguments.repeats, arguments.steps)
    sides: dict[str, Callable[[], object]] = {
        "neither": Steps(split=False).step,
        "split": Steps(split=True).step,
    }
    times = interleave(sides, repeats, steps=steps, clock=time.process_time)
    rows = {name: row_of(seconds) for name, seconds in times.items()}
    for name, row in rows.items():
        print(f"{name:10} {1e3 * row['min_ms']:8.1f} us {1e3 * row['median_ms']:8.1f} us")
    goals = [goal_of("CPU time of the split", times, "split", "neither")]
    print(f"\n{goal_table(goals)}")
    write(arguments.json, "what the split of a step's time costs", repeats, rows, goals, steps=steps)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=60)
    parser.add_argument("--steps", type=int, default=200, help="in each repeat")
    parser.add_argument("--quick", action="store_true", help="two repeats, to test this file")
    parser.add_argument("--json", type=Path, help="where to write the numbers")
    return parser.parse_args()


if __name__ == "__main__":
    main()
