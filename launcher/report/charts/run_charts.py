"""The charts of one or several runs over the steps: loss, metrics, learning rate, loss scale, throughput.

Owns which lines each chart has. Runs are laid over each other; runs that differ only in the seed share a
colour and have a bold line, their mean.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from launcher.report.charts.chart import Chart, Line, axis_of, steps_axis
from launcher.report.curve import COLUMNS, Curve, FloatArray
from launcher.report.run import Run
from launcher.report.run_groups import NUM_COLORS, RunGroup, best_first, short_names
from launcher.telemetry.events import OverflowEvent
from launcher.telemetry.formatting import SHARES, metric, metric_title

MIN_COLUMNS = 60  # of each line, where there are many
MAX_METRICS = 4  # charts, two rows of the page
OfRun = Callable[[Run], Curve | None]
Points = tuple[FloatArray, FloatArray]


def run_charts(groups: Sequence[RunGroup]) -> list[Chart]:
    """Loss, each metric, learning rate, loss scale, throughput and gradient norm of the best groups."""
    return _RunCharts(best_of(groups)).charts()


def best_of(groups: Sequence[RunGroup]) -> list[RunGroup]:
    """As many groups as there are colours, the best ones, in the order in which they ran."""
    return sorted(best_first(groups)[:NUM_COLORS], key=lambda group: group.place)


def curves_note(groups: Sequence[RunGroup]) -> str:
    """Whose curves are shown, where not all are."""
    return f"Of the best {NUM_COLORS} of {len(groups)} settings." if len(groups) > NUM_COLORS else ""


class _RunCharts:
    def __init__(self, groups: Sequence[RunGroup]) -> None:
        self._groups = groups
        self._colors = {group.place: color for color, group in enumerate(groups)}
        self._runs = [run for group in groups for run in group.runs]
        self._names = short_names(self._runs)
        self._x = steps_axis(max((_last_step(run) for run in self._runs), default=1.0))
        self._columns = max(MIN_COLUMNS, min(COLUMNS, 5 * COLUMNS // max(1, len(self._runs))))
        self._alone = len(self._runs) == 1
        self._sets = list(dict.fromkeys(name for run in self._runs for name in run.history.sets))

    def charts(self) -> list[Chart]:
        speed = self._logged("samples_per_s")
        return [
            *self._losses(),
            *(self._metric(name) for name in self._metrics()),
            self._chart("Learning rate", "", self._logged("lr"), base=1),
            self._scale(),
            self._chart("Throughput", "samples / s", speed, from_zero=True),
            self._chart("Gradient norm", "", self._logged("grad_norm")),
        ]

    def _losses(self) -> list[Chart]:
        """One chart of a single run, with its validation losses; one for each loss of several runs."""
        bad = sum(run.history.steps["loss"].num_not_finite for run in self._runs)
        note = f"{bad:,} logged values were not finite and are not shown." if bad else ""
        training = self._logged("loss")
        names = [f"{each}/val_loss" for each in self._sets[:MAX_METRICS]] or ["val_loss"]
        if not self._alone:
            return [self._chart("train_loss", "", training, note=note), *map(self._metric, names)]
        lines = {"train_loss": training} | {name: self._lines(_evaluated(name)) for name in names}
        named = [
            replace(line, name=name, color=color)
            for color, (name, found) in enumerate(lines.items())
            for line in found
        ]
        return [self._chart("Loss", "", named, note=note)]

    def _metrics(self) -> list[str]:
        """What the runs are compared by, in every set."""
        names = list(dict.fromkeys(name for run in self._runs if (name := run.metric_name)))
        if self._sets:
            names = [f"{each}/{name.rpartition('/')[2]}" for name in names for each in self._sets]
        return [name for name in dict.fromkeys(names) if not name.endswith("val_loss")][:MAX_METRICS]

    def _metric(self, name: str) -> Chart:
        lines = self._lines(_evaluated(name))
        is_loss, title, note = name.endswith("_loss"), metric_title(name), ""
        in_percent = name.endswith(SHARES)
        if in_percent and self._alone and lines:
            best = int(lines[-1].y.argmax())
            note = f"Best: {metric(name, lines[-1].y[best])} at step {lines[-1].x[best]:,.0f}."
        if in_percent:
            lines = [replace(line, y=100 * line.y) for line in lines]
        title = title if is_loss else f"{title[:1].upper()}{title[1:]}, validation"
        return self._chart(title, "%" if in_percent else "", lines, base=None if is_loss else 1, note=note)

    def _scale(self) -> Chart:
        """The loss scale in powers of two, and the steps that were skipped on overflow."""
        scales, skips = [], []
        for group in self._groups:
            for run in group.runs:
                shown = "loss scale" if self._alone else self._name(run, group)
                scales.append(self._line(shown, group, self._points(run.history.steps["scale"]), "steps"))
                skips.append(self._line("skipped steps", group, self._points(run.history.skips), "cross"))
        positive = [replace(line, x=line.x[line.y > 0], y=line.y[line.y > 0]) for line in [*scales, *skips]]
        skipped = sum(len(run.history.all(OverflowEvent)) for run in self._runs)
        were = "step was" if skipped == 1 else "steps were"
        note = f"{skipped:,} {were} skipped (dots)." if skipped else ""
        return self._chart("Loss scale", "", positive, base=2, note=note)

    def _chart(
        self,
        title: str,
        unit: str,
        lines: Sequence[Line],
        base: int | None = None,
        from_zero: bool = False,
        note: str = "",
    ) -> Chart:
        values = np.concatenate([line.y for line in lines]) if lines else np.empty(0)
        y = axis_of(values, base, from_zero)
        return Chart(title, unit, lines, self._x, y, note=note)

    def _lines(self, of: OfRun) -> list[Line]:
        """Each run's line; faint behind its mean if downsampled, or if its group has several runs."""
        faint: list[Line] = []
        bold: list[Line] = []
        for group in self._groups:
            curves = [
                (self._name(run, group), curve)
                for run in group.runs
                if (curve := of(run)) and curve.num_points
            ]
            if len(curves) == 1 and not curves[0][1].is_downsampled:
                bold += [self._line(name, group, self._points(curve), "line") for name, curve in curves]
            elif curves:
                faint += [self._line(name, group, self._points(curve), "faint") for name, curve in curves]
                name = f"{group.label}, mean" if len(curves) > 1 else group.label
                bold.append(self._line(name, group, mean_of([curve for _, curve in curves]), "mean"))
        return [*faint, *bold]

    def _logged(self, field: str) -> list[Line]:
        return self._lines(lambda run: run.history.steps[field])

    def _points(self, curve: Curve) -> Points:
        return curve.points(self._columns)

    def _name(self, run: Run, group: RunGroup) -> str:
        return group.label if len(group.runs) == 1 else self._names[run.directory]

    def _line(self, name: str, group: RunGroup, points: Points, style: str) -> Line:
        return Line(name, self._colors[group.place], *points, style)


def mean_of(curves: Sequence[Curve]) -> tuple[FloatArray, FloatArray]:
    """The mean at each step of any of the curves, from where all have begun to where the first ends.

    Between its own steps a curve is straight. Of downsampled curves their values count, not their peaks.
    """
    points = [curve.means() for curve in curves]
    if not points or not all(x.size for x, _ in points):
        return np.empty(0), np.empty(0)
    x = np.unique(np.concatenate([x for x, _ in points]))
    x = x[(x >= max(p[0] for p, _ in points)) & (x <= min(p[-1] for p, _ in points))]
    return x, np.mean([np.interp(x, px, py) for px, py in points], axis=0)


def _evaluated(name: str) -> OfRun:
    return lambda run: run.history.evaluation(name)


def _last_step(run: Run) -> float:
    history = run.history
    curves = [*history.steps.values(), *history.evaluations.values(), history.skips]
    return max((float(x[-1]) for curve in curves if (x := curve.points()[0]).size), default=float(run.steps))
