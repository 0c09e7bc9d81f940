"""The plot of a sweep: a colour per setting, a thin line per seed, a bold one for their mean.

Owns the lines and the panels; a panel without lines is left out. Reads no files.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from launcher.report.curve import Curve
from launcher.report.plots import FAINT, INK, figure_of, plain, points_of, save, use_log_scale

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLORS = ("#2f6ca3", "#d4722a", "#b3261e", "#3a8f5c", "#7a5aa6", "#8c6d3f", "#4a4a4a", "#c2528b")
DASHES = (
    (),
    (5, 3),
    (1, 2),
    (6, 2, 1, 2),
    (9, 3),
    (5, 2, 1, 2, 1, 2),
    (2.5, 2.5),
    (9, 2, 3, 2),
)  # as on the page
HEIGHT, WIDTH_OF_ONE, WIDTH_OF_TWO = 4.6, 7.0, 11.0  # inches
MARKED = 30  # points; a line of fewer has a mark at each

Points = Mapping[float, float]  # a value by step


@dataclass(frozen=True)
class Line:
    """A curve of a run, of any length, as it is drawn."""

    points: Points = field(default_factory=dict)  # thinned without losing peaks
    means: Points = field(default_factory=dict)  # over intervals, where it had to be thinned, else `points`

    @classmethod
    def of(cls, curve: Curve | None) -> Line:
        if curve is None:
            return cls()
        points = dict(points_of(curve))
        x, y = curve.mean.points()
        return cls(points, dict(zip(x.tolist(), y.tolist(), strict=True)) if curve.is_thinned else points)


@dataclass(frozen=True)
class Panel:
    """One plot: by setting, the lines of its runs."""

    title: str
    lines: Sequence[Sequence[Line]]
    factor: float = 1.0  # that values are multiplied by

    @property
    def is_empty(self) -> bool:
        return not any(line.points for of_setting in self.lines for line in of_setting)


def mean_of(lines: Sequence[Line]) -> Points:
    """The mean at each step of any of these lines, from where all have begun to where the first ends.

    Between its own steps a line is straight.
    """
    if len(lines) == 1:
        return lines[0].points
    found = [line.means for line in lines]
    begin, end = max(map(min, found), default=0.0), min(map(max, found), default=0.0)
    steps = [step for step in sorted(set().union(*found)) if begin <= step <= end]
    if not steps:
        return {}
    values = [np.interp(steps, list(each), list(each.values())) for each in found]
    return dict(zip(steps, np.mean(values, axis=0).tolist(), strict=True))


def draw(labels: Sequence[str], panels: Sequence[Panel], path: Path) -> Path:
    """Write the plot of these settings. Raises OSError."""
    shown = [panel for panel in panels if not panel.is_empty] or panels[:1]
    figure = figure_of(WIDTH_OF_TWO if len(shown) > 1 else WIDTH_OF_ONE, HEIGHT)
    found = figure.subplots(1, len(shown), squeeze=False)[0]
    for axes, panel in zip(found, shown, strict=True):
        _draw_panel(axes, labels, panel)
    if any(len(of_setting) > 1 for of_setting in shown[-1].lines):
        found[-1].set_title("thin: one seed, bold: their mean", loc="right", fontsize=9, color=FAINT)
    if found[0].lines:
        found[0].legend(frameon=False)
    return save(figure, path)


def _draw_panel(axes: Axes, labels: Sequence[str], panel: Panel) -> None:
    drawn: list[float] = []
    for index, (label, lines) in enumerate(zip(labels, panel.lines, strict=True)):
        color = COLORS[index % len(COLORS)]
        present = [line for line in lines if line.points]
        for line in present if len(present) > 1 else ():
            drawn += _draw_line(axes, line.points, panel.factor, color=color, linewidth=0.7, alpha=0.45)
        mean = mean_of(present)
        drawn += _draw_line(
            axes,
            mean,
            panel.factor,
            label=plain(label),
            color=color,
            linestyle=(0, DASHES[index % len(DASHES)]) if index % len(DASHES) else "-",
            linewidth=4.5 if index == 0 else 2.2,  # the first remains visible below the others
            marker="o" if len(mean) < MARKED else None,
            markersize=3.5,
        )
    if not drawn:
        axes.text(0.5, 0.5, "not recorded", transform=axes.transAxes, ha="center", color=INK)
    positive = [value for value in drawn if value > 0]
    if "loss" in panel.title and positive and max(positive) / min(positive) > 20:
        use_log_scale(axes, positive)
    axes.set_ylabel(panel.title)
    axes.set_xlabel("step")


def _draw_line(axes: Axes, points: Points, factor: float, **style: Any) -> list[float]:
    """Draw one line, if it has points; returns their values."""
    if points:
        axes.plot(list(points), [factor * value for value in points.values()], **style)
    return list(points.values())
