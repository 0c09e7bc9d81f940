"""Curves of any length in bounded memory, thinned without losing their peaks, and spreads of their values.

Owns the thinning: the lowest and the highest point of each of a fixed number of intervals is kept, at the
step at which it was recorded. Knows no file and draws nothing.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]

COLUMNS = 400  # intervals that a plot shows, about one per two pixels
# While points are added: finer, so that a plot's own intervals lose nothing visible.
KEPT_COLUMNS = 4 * COLUMNS
BUFFERED = 1 << 15  # points that wait for being thinned
MEAN_INTERVALS = 256  # of which at least half are used: a point per 4 pixels of a plot


class Curve:
    """(x, y) points of one quantity. Memory does not grow with their number.

    `num_points` counts the finite values that were added, `num_not_finite` the others.
    """

    def __init__(self) -> None:
        self.num_points = 0
        self.num_not_finite = 0
        self.mean = Means()
        self._parts: list[FloatArray] = []  # [(x, y), points]
        self._buffered = 0

    def add(self, x: FloatArray, y: FloatArray) -> None:
        """Add points; x and y are of equal length."""
        points = np.stack([x, y])
        points = points[:, np.isfinite(points).all(axis=0)]
        num_finite = points.shape[1]
        self.num_points += num_finite
        self.num_not_finite += y.size - num_finite
        if not num_finite:
            return
        self.mean.add(*points)
        self._parts.append(points)
        self._buffered += num_finite
        if self._buffered > BUFFERED:
            self._parts = [np.stack(thinned(*self._joined(), KEPT_COLUMNS))]
            self._buffered = self._parts[0].shape[1]

    def add_point(self, x: float, y: float) -> None:
        self.add(np.array([x], dtype=np.float64), np.array([y], dtype=np.float64))

    def points(self, columns: int = COLUMNS) -> tuple[FloatArray, FloatArray]:
        """The points in ascending x: all where they are few, else the extremes of each interval."""
        return thinned(*self._joined(), columns)

    @property
    def is_thinned(self) -> bool:
        return self.num_points > 2 * COLUMNS

    @property
    def last(self) -> float | None:
        """The value at the largest x."""
        _, y = self._joined()
        return float(y[-1]) if y.size else None

    def _joined(self) -> tuple[FloatArray, FloatArray]:
        x, y = np.concatenate([np.empty((2, 0)), *self._parts], axis=1)
        if np.any(np.diff(x) < 0):  # files that were edited by hand
            order = np.argsort(x, kind="stable")
            x, y = x[order], y[order]
        return x, y


class Means:
    """Means of y over equal intervals of x, whose width doubles as x grows."""

    def __init__(self) -> None:
        self._origin: float | None = None
        self._width = 1.0
        self._sums = np.zeros((3, MEAN_INTERVALS))  # of x, of y, of ones

    def add(self, x: FloatArray, y: FloatArray) -> None:
        if self._origin is None:
            self._origin = float(x[0])
        places = np.maximum(x - self._origin, 0.0)
        while places.max() >= self._width * MEAN_INTERVALS:
            self._widen()
        index = (places / self._width).astype(np.intp)
        for row, weights in enumerate((x, y, None)):
            self._sums[row] += np.bincount(index, weights, MEAN_INTERVALS)

    def points(self) -> tuple[FloatArray, FloatArray]:
        """The mean x and the mean y of each interval that has points."""
        used = self._sums[2] > 0
        x, y, count = self._sums[:, used]
        return x / count, y / count

    def _widen(self) -> None:
        pairs = self._sums.reshape(3, MEAN_INTERVALS // 2, 2).sum(axis=2)
        self._sums = np.concatenate([pairs, np.zeros_like(pairs)], axis=1)
        self._width *= 2


def thinned(x: FloatArray, y: FloatArray, columns: int) -> tuple[FloatArray, FloatArray]:
    """The lowest and highest point of each of `columns` intervals of x, and the first and last of all.

    x is ascending. At most 2 * columns + 2 points are returned; fewer are returned as they are.
    """
    if x.size <= 2 * columns:
        return x, y
    span = (x[-1] - x[0]) or 1.0
    column = np.minimum(((x - x[0]) * (columns / span)).astype(np.intp), columns - 1)
    order = np.lexsort((y, column))  # by column, and by value within it
    starts = np.flatnonzero(np.diff(column[order], prepend=-1))
    ends = np.append(starts[1:], x.size) - 1
    kept = np.unique(np.concatenate([order[starts], order[ends], [0, x.size - 1]]))
    return x[kept], y[kept]


def mean_and_deviation(values: Sequence[float | None], shown: Callable[[float], str]) -> str:
    """Mean ± standard deviation of what was measured; a dash where nothing was."""
    known = [value for value in values if value is not None]
    if len(known) < 2:
        return shown(known[0]) if known else "-"
    return f"{shown(statistics.fmean(known))} ± {shown(statistics.stdev(known))}"
