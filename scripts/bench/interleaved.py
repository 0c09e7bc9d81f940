"""Measurements whose sides alternate, and goals that are read off them.

Owns how times are taken, how a ratio and its spread are computed, and the form of a goal in a result file.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from scripts.bench.machine import machine

Times = dict[str, list[float]]


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
    low: float  # a tenth of the rounds is below, a tenth above `high`
    high: float
    goal: float
    limit: float | None = None
    at_most: bool = True

    @property
    def reached(self) -> bool:
        return self.value <= self.goal if self.at_most else self.value >= self.goal

    def as_json(self) -> dict[str, Any]:
        return asdict(self) | {"reached": self.reached}

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

        Low and high are the tenths of the ratios within a round.
        """
        own, other = times[ours], times[baseline]
        paired = sorted(one / two for one, two in zip(own, other, strict=True))
        edge = len(paired) // 10
        mine, theirs = statistics.median(own), statistics.median(other)
        return cls(
            row=row,
            what=what,
            ours=1e3 * mine,
            unit="ms",
            baseline=baseline,
            theirs=1e3 * theirs,
            value=mine / theirs,
            low=paired[edge],
            high=paired[-1 - edge],
            goal=goal,
            limit=limit,
        )

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Goal:
        return cls(**{key: value for key, value in values.items() if key != "reached"})


def goal_table(goals: Iterable[Goal]) -> str:
    """One line per goal."""
    head = ("", "what", "ours", "baseline", "value", "10 to 90 %", "limit", "goal", "reached")
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
                "yes" if goal.reached else "NO",
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
