"""Thinned curves keep their peaks, whatever their length and however they arrive."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.report.curve import COLUMNS, Curve, downsampled

finite = st.floats(-1e6, 1e6)


@given(st.lists(finite, min_size=1, max_size=300), st.integers(1, 20))
def test_every_column_keeps_its_lowest_and_highest_point(values, columns):
    x, y = np.arange(len(values), dtype=float), np.array(values)
    kept_x, kept_y = downsampled(x, y, columns)
    assert kept_x.size <= max(2 * columns + 2, 2 * columns)
    assert np.all(np.diff(kept_x) > 0)
    assert {kept_x[0], kept_x[-1]} == {x[0], x[-1]}
    assert set(zip(kept_x, kept_y, strict=True)) <= set(zip(x, y, strict=True)), "points are never invented"
    column = np.minimum(x * columns / ((x[-1] - x[0]) or 1.0), columns - 1).astype(int)
    kept_column = column[kept_x.astype(int)]
    for number in set(column):
        assert kept_y[kept_column == number].min() == y[column == number].min()
        assert kept_y[kept_column == number].max() == y[column == number].max()


def curve_of(x, y):
    curve = Curve()
    for a, b in zip(x.tolist(), y.tolist(), strict=True):
        curve.add(a, b)
    return curve


def test_one_peak_among_many_steps_is_kept_at_its_step():
    x = np.arange(70_000, dtype=float)
    y = np.sin(x)
    y[31_234], y[17] = 9.0, -9.0
    curve = curve_of(x, y)
    kept = dict(zip(*curve.points(), strict=True))
    assert len(kept) <= 2 * COLUMNS + 2
    assert (kept[31_234], kept[17]) == (9.0, -9.0)
    assert (curve.num_points, curve.last, curve.highest) == (x.size, y[-1], 9.0)


def test_what_is_not_finite_is_counted_and_left_out():
    curve = curve_of(np.arange(4.0), np.array([1.0, np.nan, np.inf, 2.0]))
    curve.add(5.0, "a text")
    assert curve.points()[1].tolist() == [1.0, 2.0]
    assert (curve.num_points, curve.num_not_finite) == (2, 2)


@given(st.lists(finite, min_size=1, max_size=2000))
def test_the_means_of_all_intervals_are_the_mean_of_all_points(values):
    x, y = np.arange(len(values), dtype=float), np.array(values)
    curve = curve_of(x, y)
    mean_x, mean_y = curve.means()
    assert np.all(np.diff(mean_x) > 0)
    weights = np.diff(np.searchsorted(x, [*(mean_x[:-1] + mean_x[1:]) / 2, np.inf], side="left"), prepend=0)
    assert np.average(mean_y, weights=weights) == pytest.approx(y.mean(), rel=1e-6, abs=1e-6)
