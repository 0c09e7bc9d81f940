"""The charts of one or several runs over the steps: loss, metrics, learning rate, loss scale, throughput.

Owns which lines each chart has. Runs are laid over each other; runs that differ only in the seed share a
colour and have a bold line, their mean.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from launcher.errors import listed
from launcher.report.charts.chart import Chart, Line, axis_of, steps_axis
from launcher.report.curve import COLUMNS, Curve, FloatArray
from launcher.report.run_record import RunRecord
from launcher.report.settings import NUM_COLORS, RunGroup, can_choose
from launcher.telemetry.events import OverflowEvent, RestartEvent
from launcher.telemetry.formatting import SHARES, metric, metric_title

MIN_COLUMNS = 60  # of each line, where there are many
MAX_METRICS = 4  # charts, two rows of the page
OfRun = Callable[[RunRecord], Curve | None]
Points = tuple[FloatArray, FloatArray]


def run_charts(settings: Sequence[RunGroup]) -> dict[str, Chart]:
    """Charts by name: loss, of several runs "validation", each metric, lr, scale, speed, grad_norm."""
    return _RunCharts(settings).charts()


def common_legend(settings: Sequence[RunGroup]) -> list[Line]:
    """The legend of all charts where settings can be chosen, else none."""
    point = np.zeros(1)
    lines = [Line(each.label, each.color, point, point, setting=each.place) for each in settings]
    return lines if can_choose(settings) else []


def restart_note(settings: Sequence[RunGroup]) -> str:
    """What the vertical marks of a single run's charts are; "" where there are none."""
    runs = [run for setting in settings for run in setting.runs]
    marks = _restarts(runs[0]) if len(runs) == 1 else []
    return f"Dashed lines: {listed([text for _, text in marks], 5)}." if marks else ""


class _RunCharts:
    def __init__(self, settings: Sequence[RunGroup]) -> None:
        self._settings = settings
        self._runs = [run for setting in settings for run in setting.runs]
        self._x = steps_axis(max((_last_step(run) for run in self._runs), default=1.0))
        self._columns = max(MIN_COLUMNS, min(COLUMNS, 5 * COLUMNS // max(1, len(self._runs))))
        self._alone = len(self._runs) == 1
        self._marks = _restarts(self._runs[0]) if self._alone else []
        self._can_choose = can_choose(settings)
        self._sets = list(dict.fromkeys(name for run in self._runs for name in run.recording.sets))

    def charts(self) -> dict[str, Chart]:
        return (
            self._losses()
            | {name: self._metric(name) for name in self._metrics()}
            | {
                "lr": self._chart("Learning rate", "", self._logged("lr"), base=1),
                "scale": self._scale(),
                "samples_per_s": self._chart(
                    "Throughput", "samples / s", self._logged("samples_per_s"), from_zero=True
                ),
                "grad_norm": self._chart("Gradient norm", "", self._logged("grad_norm")),
            }
        )

    def _losses(self) -> dict[str, Chart]:
        """One chart of a single run, with its validation loss; two of several runs."""
        bad = sum(run.recording.steps["loss"].num_not_finite for run in self._runs)
        note = f"{bad:,} logged values were not finite and are not shown." if bad else ""
        training = self._logged("loss")
        validation = self._lines(lambda run: run.recording.evaluations.get("loss"))
        if not self._alone:
            charts = {
                "loss": self._chart("Loss, training", "", training, note=note),
                "validation": self._chart("Loss, validation", "", validation),
            }
            return charts | {
                f"{name}/loss": self._metric(f"{name}/loss") for name in self._sets[1:MAX_METRICS]
            }
        named = [replace(line, name="training", color=0) for line in training]
        first = f"validation, {self._sets[0]}" if self._sets else "validation"
        named += [replace(line, name=first, color=1) for line in validation]
        for color, name in enumerate(self._sets[1:NUM_COLORS], 2):
            more = self._lines(_evaluated(f"{name}/loss"))
            named += [replace(line, name=f"validation, {name}", color=color % NUM_COLORS) for line in more]
        return {"loss": self._chart("Loss", "", named, note=note)}

    def _metrics(self) -> list[str]:
        """What the runs are compared by, then the same of the other sets."""
        names = [run.metric_name for run in self._runs if run.metric_name]
        sets = self._sets
        metrics = [next((n.removeprefix(f"{s}/") for s in sets if n.startswith(f"{s}/")), n) for n in names]
        named = [f"{sets[0]}/{n}" if sets and n in metrics else n for n in names]
        every = [*named, *(f"{each}/{metric}" for metric in metrics for each in sets)]
        charted = "loss", *(f"{each}/loss" for each in sets)
        return [name for name in dict.fromkeys(every) if name not in charted][:MAX_METRICS]

    def _metric(self, name: str) -> Chart:
        lines = self._lines(_evaluated(name))
        title, note = metric_title(name), ""
        in_percent = name.endswith(SHARES)
        if in_percent and self._alone and lines:
            best = int(lines[-1].y.argmax())
            note = f"Best: {metric(name, lines[-1].y[best])} at step {lines[-1].x[best]:,.0f}."
        if in_percent:
            lines = [replace(line, y=100 * line.y) for line in lines]
        title, unit = f"{title[:1].upper()}{title[1:]}, validation", "%" if in_percent else ""
        return self._chart(title, unit, lines, base=1, note=note)

    def _scale(self) -> Chart:
        """The loss scale in powers of two, and the steps that were skipped on overflow."""
        scales, skips = [], []
        for setting in self._settings:
            for run, name in zip(setting.runs, setting.names, strict=True):
                shown, scale = "loss scale" if self._alone else name, run.recording.steps["scale"]
                scales.append(self._line(shown, setting, self._points(scale), "steps"))
                skips.append(self._line("skipped steps", setting, self._points(run.recording.skips), "cross"))
        positive = [replace(line, x=line.x[line.y > 0], y=line.y[line.y > 0]) for line in [*scales, *skips]]
        skipped = sum(run.recording.of(OverflowEvent).count for run in self._runs)
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
        has_legend = not self._can_choose
        return Chart(title, unit, lines, self._x, y, marks=self._marks, note=note, has_legend=has_legend)

    def _lines(self, of: OfRun) -> list[Line]:
        """Each run's line; behind its mean where it was thinned, or where its setting has several runs."""
        faint: list[Line] = []
        bold: list[Line] = []
        for setting in self._settings:
            named = zip(setting.names, setting.runs, strict=True)
            curves = [(name, curve) for name, run in named if (curve := of(run)) and curve.num_points]
            if len(curves) == 1 and not curves[0][1].is_thinned:
                bold += [self._line(name, setting, self._points(curve), "line") for name, curve in curves]
            elif curves:
                faint += [self._line(name, setting, self._points(curve), "faint") for name, curve in curves]
                name = f"{setting.label}, mean" if len(curves) > 1 else setting.label
                bold.append(self._line(name, setting, mean_of([curve for _, curve in curves]), "mean"))
        return [*faint, *bold]

    def _logged(self, field: str) -> list[Line]:
        return self._lines(lambda run: run.recording.steps[field])

    def _points(self, curve: Curve) -> Points:
        return curve.points(self._columns)

    def _line(self, name: str, setting: RunGroup, points: Points, style: str) -> Line:
        place = setting.place if self._can_choose else None
        return Line(name, setting.color, *points, style, setting=place)


def mean_of(curves: Sequence[Curve]) -> tuple[FloatArray, FloatArray]:
    """The mean at each step of any of the curves, from where all have begun to where the first ends.

    Between its own steps a curve is straight. Of thinned curves their values count, not their peaks.
    """
    points = [curve.means() for curve in curves]
    if not points or not all(x.size for x, _ in points):
        return np.empty(0), np.empty(0)
    x = np.unique(np.concatenate([x for x, _ in points]))
    x = x[(x >= max(p[0] for p, _ in points)) & (x <= min(p[-1] for p, _ in points))]
    return x, np.mean([np.interp(x, px, py) for px, py in points], axis=0)


def _evaluated(name: str) -> OfRun:
    return lambda run: run.recording.evaluation(name)


def _last_step(run: RunRecord) -> float:
    recording = run.recording
    curves = [*recording.steps.values(), *recording.evaluations.values(), recording.skips]
    return max((float(x[-1]) for curve in curves if (x := curve.points()[0]).size), default=float(run.steps))


def _restarts(run: RunRecord) -> list[tuple[float, str]]:
    return [
        (float(event.step), f"resumed after step {event.step:,}")
        for event in run.recording.of(RestartEvent).all()
    ]
