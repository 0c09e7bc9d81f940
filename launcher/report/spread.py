"""Number, mean and deviation of values that are not kept."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass
from functools import reduce
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from launcher.report.curve import FloatArray


@dataclass(frozen=True)
class Spread:
    """Count and spread of some values; `squares` is the sum of squared deviations from their mean."""

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0

    @classmethod
    def of(cls, values: FloatArray) -> Spread:
        if not values.size:
            return cls()
        mean = float(values.mean())
        return cls(int(values.size), mean, float(((values - mean) ** 2).sum()))

    def plus(self, other: Spread) -> Spread:
        """The spread of the values of both (Chan, Golub and LeVeque, 1979)."""
        count = self.count + other.count
        if not count:
            return self
        gap = other.mean - self.mean
        squares = self.squares + other.squares + gap * gap * self.count * other.count / count
        return Spread(count, self.mean + gap * other.count / count, squares)

    @property
    def deviation(self) -> float:
        """The standard deviation of a sample; at least two values are needed."""
        return math.sqrt(self.squares / (self.count - 1))


def mean_and_deviation(values: Sequence[float | None], shown: Callable[[float], str]) -> str:
    """Mean ± standard deviation of what was measured; a dash where nothing was."""
    known = [value for value in values if value is not None]
    if len(known) < 2:
        return shown(known[0]) if known else "-"
    return f"{shown(statistics.fmean(known))} ± {shown(statistics.stdev(known))}"


def joined(spreads: Iterable[Spread]) -> Spread:
    return reduce(Spread.plus, spreads, Spread())
