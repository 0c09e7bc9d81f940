"""Measurements whose sides alternate, and goals that are read off them.

Owns how times are taken, how a ratio and its spread are computed, and the form of a goal in a result file.
"""

from __future__ import annotations

import json
import math
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from scripts.bench.machine import machine

Times = dict[str, list[float]]
CANNOT_BE_SAID = "cannot be said"


@runtime_checkable
class Timed(Protocol):
    """A side whose loop belongs to a library, which starts and ends it around the steps."""

    def seconds(self, steps: int, clock: Callable[[], float]) -> float:
        """Of all these steps, without what comes before the first and after the last."""
        ...


def interleave(
    sides: Mapping[str, Callable[[], object] | Timed],
    repeats: int,
    *,
    steps: int = 1,
    warm_up: int = 2,
    clock: Callable[[], float] = time.perf_counter,
    before: Callable[[], object] = lambda: None,
) -> Times:
    """Seconds of one step by side, `repeats` values each, each the mean of `steps` calls.

    All sides run once in each round, in an order that rotates and turns around, so that none always follows
    the same one. The first `warm_up` rounds are not counted. `before` is called before each side. A side that
    is `Timed` runs its steps itself.
    """
    times: Times = {name: [] for name in sides}
    names = list(sides)
    for repeat in range(-warm_up, repeats):
        turn = repeat % len(names)
        order = names[turn:] + names[:turn]
        for name in order if repeat % 2 == 0 else reversed(order):
            step = sides[name]
            before()
            seconds = step.seconds(steps, clock) if isinstance(step, Timed) else _seconds(step, steps, clock)
            if repeat >= 0:
                times[name].append(seconds / steps)
    return times


def _seconds(step: Callable[[], object], steps: int, clock: Callable[[], float]) -> float:
    began = clock()
    for _ in range(steps):
        step()
    return clock() - began


def row_of(seconds: Sequence[float]) -> dict[str, float]:
    return {"min_ms": 1e3 * min(seconds), "median_ms": 1e3 * statistics.median(seconds)}


def median_interval(values: Sequence[float]) -> tuple[float, float]:
    """The interval in which the median of all such values is, with a probability of at least 90 %.

    Between two of the sorted values: the number of values below the median is binomial (sign test). With less
    than five values no two of them suffice, and the interval has all of them.
    """
    ordered = sorted(values)
    n = len(ordered)
    outside, edge = 0.5**n, 0  # the probability that at most `edge` values are below
    while outside + math.comb(n, edge + 1) * 0.5**n <= 0.05:
        edge += 1
        outside += math.comb(n, edge) * 0.5**n
    return ordered[edge], ordered[-1 - edge]


@dataclass(frozen=True)
class Goal:
    """One figure of the table in the design: `value` is ours over `baseline`, or ours alone."""

    row: str  # of that table, such as P8
    what: str
    ours: float
    unit: str
    baseline: str
    theirs: float | None
    value: float
    low: float  # of the interval in which the true value is, as `median_interval`
    high: float
    goal: float
    limit: float | None = None
    at_most: bool = True

    @property
    def reached(self) -> bool:
        return self.value <= self.goal if self.at_most else self.value >= self.goal

    @property
    def verdict(self) -> str:
        """Nothing can be said where the goal is within the interval."""
        if self.low <= self.goal < self.high if self.at_most else self.low < self.goal <= self.high:
            return CANNOT_BE_SAID
        return "reached" if self.reached else "not reached"

    def as_json(self) -> dict[str, Any]:
        return asdict(self) | {"verdict": self.verdict}

    @classmethod
    def of(
        cls,
        row: str,
        what: str,
        times: Mapping[str, Sequence[float]],
        ours: str,
        baseline: str,
        goal: float,
        limit: float | None = None,
    ) -> Goal:
        """The median of ours over that of a baseline of the same rounds, which must be at most `goal`.

        Low and high are of the ratios within a round.
        """
        own, other = times[ours], times[baseline]
        low, high = median_interval([one / two for one, two in zip(own, other, strict=True)])
        mine, theirs = statistics.median(own), statistics.median(other)
        return cls(
            row=row,
            what=what,
            ours=1e3 * mine,
            unit="ms",
            baseline=baseline,
            theirs=1e3 * theirs,
            value=mine / theirs,
            low=low,
            high=high,
            goal=goal,
            limit=limit,
        )

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Goal:
        return cls(**{key: value for key, value in values.items() if key != "verdict"})


def goal_table(goals: Iterable[Goal]) -> str:
    """One line per goal."""
    head = ("", "what", "ours", "baseline", "value", "90 % interval", "limit", "goal", "verdict")
    lines = [head]
    for goal in goals:
        theirs = "" if goal.theirs is None else f" {goal.theirs:.3g} {goal.unit}"
        sign = "<=" if goal.at_most else ">="
        lines.append(
            (
                goal.row,
                goal.what,
                f"{goal.ours:.3g} {goal.unit}",
                goal.baseline + theirs,
                f"{goal.value:.3f}",
                f"{goal.low:.2f} to {goal.high:.2f}",
                "" if goal.limit is None else f"{goal.limit:.2f}",
                f"{sign} {goal.goal:.2f}",
                goal.verdict,
            )
        )
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )


def write(
    file: Path | None, what: str, repeats: int, rows: Any, goals: Sequence[Goal] = (), **more: Any
) -> None:
    """The result file of a benchmark: machine, versions, date, repeats, rows and goals."""
    if file is None:
        return
    content = {
        "what": what,
        "machine": machine(),
        "n": repeats,
        **more,
        "rows": rows,
        "goals": [goal.as_json() for goal in goals],
    }
    file.write_text(json.dumps(content, indent=2) + "\n")
