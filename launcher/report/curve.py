"""Curves, downsampled for a plot without losing their peaks.

Owns the downsampling: the lowest and the highest point of each of a fixed number of intervals is kept, at the
step at which it was recorded. Knows no file and draws nothing.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]

COLUMNS = 400  # intervals that a plot shows, about one per two pixels
MEAN_INTERVALS = 200  # a point per 4 pixels of a plot
LARGEST = 1e300  # beyond it, a number is no measurement, and arithmetic with it may overflow


class Curve:
    """(x, y) points of one quantity, in ascending x. `num_not_finite` counts values that were left out."""

    def __init__(self) -> None:
        self.num_not_finite = 0
        self._x: list[float] = []
        self._y: list[float] = []

    def add(self, x: float, y: object) -> None:
        """Add a point, if y is a number."""
        if isinstance(y, bool) or not isinstance(y, int | float):
            return
        if math.isfinite(y) and abs(y) < LARGEST:
            self._x.append(x)
            self._y.append(float(y))
        else:
            self.num_not_finite += 1

    def points(self, columns: int = COLUMNS) -> tuple[FloatArray, FloatArray]:
        """All points where they are few, else the extremes of each interval."""
        return downsampled(np.array(self._x, np.float64), np.array(self._y), columns)

    def means(self) -> tuple[FloatArray, FloatArray]:
        """The mean x and the mean y of each of some equal intervals of x."""
        x, y = np.array(self._x, np.float64), np.array(self._y)
        if not x.size:
            return x, y
        index = _intervals(x, MEAN_INTERVALS)
        count = np.bincount(index)
        used = count > 0
        return (np.bincount(index, x) / count.clip(1))[used], (np.bincount(index, y) / count.clip(1))[used]

    @property
    def num_points(self) -> int:
        return len(self._x)

    @property
    def is_downsampled(self) -> bool:
        return self.num_points > 2 * COLUMNS

    @property
    def values(self) -> Sequence[float]:
        return self._y

    @property
    def last(self) -> float | None:
        """The value at the largest x."""
        return self._y[-1] if self._y else None

    @property
    def mean_after_first(self) -> float | None:
        """The mean without the first of several values: that of a rate includes what is made once."""
        return statistics.fmean(self._y[1:] or self._y) if self._y else None

    @property
    def highest(self) -> float | None:
        return max(self._y, default=None)


def _intervals(x: FloatArray, count: int) -> NDArray[np.intp]:
    """The number of the interval that each x lies in, of `count` equal ones; x is ascending."""
    span = (x[-1] - x[0]) or 1.0
    found: NDArray[np.intp] = np.minimum(((x - x[0]) * (count / span)).astype(np.intp), count - 1)
    return found


def downsampled(x: FloatArray, y: FloatArray, columns: int) -> tuple[FloatArray, FloatArray]:
    """The lowest and highest point of each of `columns` intervals of x, and the first and last of all.

    x is ascending. At most 2 * columns + 2 points are returned; fewer are returned as they are.
    """
    if x.size <= 2 * columns:
        return x, y
    column = _intervals(x, columns)
    order = np.lexsort((y, column))  # by column, and by value within it
    starts = np.flatnonzero(np.diff(column[order], prepend=-1))
    ends = np.append(starts[1:], x.size) - 1
    kept = np.unique(np.concatenate([order[starts], order[ends], [0, x.size - 1]]))
    return x[kept], y[kept]
