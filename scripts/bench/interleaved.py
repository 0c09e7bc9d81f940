"""Measurements whose sides alternate, and the figures that are read off them.

Owns how times are taken, how a ratio and its spread are computed, and the form of a figure in a result file.
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
class Figure:
    """One result of a benchmark: `value` is ours over the baseline's, or ours alone.

    `low` and `high` bound the median, as `median_interval` does. `promised` is the largest value that the
    project promises; None where it promises none.
    """

    what: str
    ours: float
    unit: str
    baseline: str  # "" if there is none
    theirs: float | None
    value: float
    low: float
    high: float
    promised: float | None = None

    @property
    def kept(self) -> str:
        """Whether the promise is kept; it cannot be said where it lies within the interval."""
        if self.promised is None:
            return ""
        if self.low <= self.promised < self.high:
            return CANNOT_BE_SAID
        return "yes" if self.value <= self.promised else "no"

    @classmethod
    def ratio(
        cls,
        what: str,
        times: Mapping[str, Sequence[float]],
        ours: str,
        baseline: str,
        promised: float | None = None,
    ) -> Figure:
        """The median of ours over that of a baseline; the interval is that of the ratios within a round."""
        own, other = times[ours], times[baseline]
        low, high = median_interval([one / two for one, two in zip(own, other, strict=True)])
        mine, theirs = statistics.median(own), statistics.median(other)
        return cls(what, 1e3 * mine, "ms", baseline, 1e3 * theirs, mine / theirs, low, high, promised)

    @classmethod
    def alone(cls, what: str, values: Sequence[float], unit: str, promised: float | None = None) -> Figure:
        """The median of what has no baseline."""
        median = statistics.median(values)
        return cls(what, median, unit, "", None, median, *median_interval(values), promised)


HEAD = ("what", "ours", "baseline", "ratio or value", "90 % interval", "promised", "kept")


def cells(figure: Figure) -> tuple[str, ...]:
    """A figure's line of a table, under HEAD."""
    theirs = "" if figure.theirs is None else f": {rounded(figure.theirs)} {figure.unit}"
    return (
        figure.what,
        f"{rounded(figure.ours)} {figure.unit}".rstrip(),
        figure.baseline + theirs,
        f"{figure.value:.2f}",
        f"{figure.low:.2f} to {figure.high:.2f}",
        "" if figure.promised is None else f"<= {figure.promised:g}",
        figure.kept,
    )


def rounded(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def text_table(figures: Iterable[Figure]) -> str:
    """One line per figure, for a terminal."""
    lines = [HEAD, *map(cells, figures)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(HEAD))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )


def write(
    file: Path | None, what: str, repeats: int, rows: Any, figures: Sequence[Figure] = (), **more: Any
) -> None:
    """The result file of a benchmark: machine, versions, date, repeats, rows and figures."""
    if file is None:
        return
    content = {
        "what": what,
        "machine": machine(),
        "n": repeats,
        **more,
        "rows": rows,
        "figures": [asdict(figure) for figure in figures],
    }
    file.write_text(json.dumps(content, indent=2) + "\n")
