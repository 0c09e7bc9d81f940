"""The pictures of a run and of a sweep for READMEs and trackers: which charts of the page each one shows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from launcher.report.charts.confusion import ConfusionChart, confusion_picture
from launcher.report.charts.gradient_chart import gradient_charts
from launcher.report.charts.picture import write_picture
from launcher.report.charts.run_charts import metric_chart, run_charts
from launcher.report.run_record import RunRecord
from launcher.report.settings import RunSetting, best_places, can_choose, run_settings
from launcher.run_dir.atomic import write_content

CURVES = "curves.png"
CONFUSION_MATRIX = "confusion_matrix.png"
GRADIENTS = "gradients.png"
GRADIENTS_HEIGHT = 480  # pixels: a lane for each of the worst parameters


def draw_curves(run: RunRecord) -> Path | None:
    """Write curves.png; None without a training step to show. Raises OSError."""
    if not run.recording.last_step:
        return None
    charts = run_charts(run_settings([run]))
    measured = metric_chart(charts, run.metric_name or "")
    if measured is None or run.metric_name == "loss":  # which is in the first chart
        measured = charts["samples_per_s"]
    scale = charts["scale"]
    moves = any(line.y.size and line.y.min() < line.y.max() for line in scale.lines) or scale.note
    shown = [charts["loss"], measured, charts["lr"], scale if moves else charts["grad_norm"]]
    return write_picture(shown, run.directory / CURVES)


def draw_confusion_matrix(run: RunRecord) -> Path | None:
    """Write confusion_matrix.png; None where no classes were counted. Raises OSError."""
    found = ConfusionChart.of(run)
    if found is None:
        return None
    write_content(run.directory / CONFUSION_MATRIX, confusion_picture(found))
    return run.directory / CONFUSION_MATRIX


def draw_gradients(run: RunRecord) -> Path | None:
    """Write gradients.png of the latest gradients; None without any. Raises OSError."""
    charts = gradient_charts(run)
    return write_picture(charts, run.directory / GRADIENTS, height=GRADIENTS_HEIGHT) if charts else None


def draw_comparison(settings: Sequence[RunSetting], metric_name: str, path: Path) -> Path:
    """Write training loss and this metric of the settings, of many the best. Raises OSError."""
    best = sorted(best_places(settings)) if can_choose(settings) else range(len(settings))
    charts = run_charts([replace(settings[k], place=place) for place, k in enumerate(best)])
    held_out = metric_chart(charts, "held out" if metric_name == "loss" else metric_name)
    shown = [charts["loss"], *([held_out] if held_out is not None and held_out.present else [])]
    return write_picture(shown, path)
