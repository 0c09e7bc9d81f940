"""What a sweep varies, in Hydra's own syntax: choice(), range(), interval(), tag(log, ...), int(...).

Owns how the overrides of a command become dimensions, the number of their combinations, and how a point of
the space becomes the overrides of one job. Imports no sampler: a dimension says what a number in [0, 1)
stands for, and what it is to Optuna.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from hydra.core.override_parser.types import Override

DIGITS = 6  # of a value that is drawn: the name of its job stays short, and no result depends on the seventh


@dataclass(frozen=True)
class Choices:
    """A key with a finite number of values, written as in an override."""

    key: str
    values: tuple[str, ...]

    def sample(self, share: float) -> str:
        """The value at a share in [0, 1)."""
        return self.values[int(share * len(self.values))]

    @property
    def representative_values(self) -> tuple[str, ...]:
        """The values that stand for all in a check."""
        return self.values

    @property
    def size(self) -> float:
        return len(self.values)


@dataclass(frozen=True)
class Interval:
    """A key with any value from `low` to `high`, both included; whole numbers if `whole`."""

    key: str
    low: float
    high: float
    log: bool
    whole: bool

    def sample(self, share: float) -> str:
        """The value at a share in [0, 1), of the logarithms if `log`."""
        # A whole number has an equal share of the interval, reaching half a unit beyond it on each side.
        low, high = (self.low - 0.5, self.high + 0.5) if self.whole else (self.low, self.high)
        if self.log:
            return self.written(low * (high / low) ** share)
        return self.written(low + share * (high - low))

    def written(self, value: float) -> str:
        if self.whole:
            return str(min(max(round(value), int(self.low)), int(self.high)))
        return repr(min(max(float(f"{value:.{DIGITS}g}"), self.low), self.high))

    @property
    def representative_values(self) -> tuple[str, ...]:
        return (self.written(self.low), self.written(self.high))

    @property
    def size(self) -> float:
        return int(self.high - self.low) + 1 if self.whole else math.inf


Dimension = Choices | Interval


def value_of(dimension: Dimension, text: str) -> Any:
    """What Optuna knows a value by that stands in an override: the text of a choice, or a number."""
    if isinstance(dimension, Choices):
        return text
    return int(text) if dimension.whole else float(text)


def distribution(dimension: Dimension, kinds: Any) -> Any:
    """The dimension as one of `kinds`, which is `optuna.distributions`."""
    if isinstance(dimension, Choices):
        return kinds.CategoricalDistribution(dimension.values)
    if dimension.whole:
        return kinds.IntDistribution(int(dimension.low), int(dimension.high), log=dimension.log)
    return kinds.FloatDistribution(dimension.low, dimension.high, log=dimension.log)


@dataclass(frozen=True)
class Space:
    """The overrides of a sweep in their order: lines that all jobs share, and what varies."""

    items: tuple[str | Dimension, ...]

    @classmethod
    def of(cls, overrides: Sequence[Override]) -> Space:
        """The space of overrides that are well-formed. A key that is given twice has its last value."""
        by_key: dict[str, str | Dimension] = {}
        for override in overrides:
            key = override.get_key_element()
            line = override.input_line or ""
            by_key[key] = _dimension(override, key) if override.is_sweep_override() else line
        return cls(tuple(by_key.values()))

    @property
    def dimensions(self) -> list[Dimension]:
        return [item for item in self.items if not isinstance(item, str)]

    @property
    def size(self) -> float:
        """How many points it has; infinite with an interval of floating-point numbers."""
        return math.prod(each.size for each in self.dimensions)

    def overrides_of(self, values: Sequence[str]) -> tuple[str, ...]:
        """The overrides of the job with these values, one for each dimension."""
        left = iter(values)
        return tuple(item if isinstance(item, str) else f"{item.key}={next(left)}" for item in self.items)

    def grid(self) -> list[tuple[str, ...]]:
        """The overrides of all combinations, each once, the last key fastest as in Hydra. No intervals."""
        combinations = itertools.product(*(each.representative_values for each in self.dimensions))
        return [*dict.fromkeys(map(self.overrides_of, combinations))]

    def samples(self) -> Iterator[tuple[str, ...]]:
        """Jobs that have each choice, and both ends of each interval, at least once."""
        ends = [each.representative_values for each in self.dimensions]
        for number in range(max(map(len, ends), default=1)):
            yield self.overrides_of([values[number % len(values)] for values in ends])


def _dimension(override: Override, key: str) -> Dimension:
    swept: Any = override.value()
    if override.is_interval_sweep():
        return Interval(key, swept.start, swept.end, "log" in swept.tags, isinstance(swept.start, int))
    return Choices(key, tuple(override.sweep_string_iterator()))


def interval_problem(override: Override) -> str | None:
    """The problem of a swept interval or of its tags; None without one."""
    swept: Any = override.value()
    tags: set[str] = getattr(swept, "tags", set())
    if tags and not (tags == {"log"} and override.is_interval_sweep()):
        return "the only tag is log, of an interval: tag(log, interval(a,b))."
    if override.is_interval_sweep() and not -math.inf < swept.start < swept.end < math.inf:
        return "an interval goes from its lower end to its higher one, both finite."
    if tags and swept.start <= 0:
        return "a logarithm needs ends above 0. Raise the lower end, or leave out tag(log, ...)."
    return None


def count_of(override: Override) -> int:
    """How many values a swept override has, without listing those of a range."""
    swept: Any = override.value()
    if override.is_range_sweep():
        return max(0, math.ceil((swept.stop - swept.start) / swept.step)) if swept.step else 0
    return len(getattr(swept, "list", ())) or 1
