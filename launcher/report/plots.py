"""The plots of a run: curves over the steps, and the confusion matrix.

Owns their style. Reads only the files of the run, and draws without a display and without matplotlib's global
state, so that it works in any process.
"""

from __future__ import annotations

import io
import logging
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launcher.report.curve import Curve
from launcher.report.recording import Recording, read_recording
from launcher.run_dir.atomic import read_json, write_content
from launcher.run_dir.records import RESULT
from launcher.telemetry.formatting import middle_cut

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Event = dict[str, Any]

CURVES = "curves.png"
CONFUSION_MATRIX = "confusion_matrix.png"
TRAIN, HELD_OUT, SKIPPED, INK, FAINT = "#2f6ca3", "#d4722a", "#b3261e", "#222222", "#8a8a8a"
MAX_NAMED_CLASSES = 60
MAX_COUNTED_CLASSES = 30
MAX_NAME = 40  # of a class; longer ones leave no room for the matrix

# It writes into the output of a run that it builds its font cache, once per machine.
logging.getLogger("matplotlib.font_manager").setLevel(logging.ERROR)


def draw_curves(run_dir: Path) -> Path | None:
    """curves.png from metrics.jsonl; None without a training step to show. Raises OSError, ValueError."""
    recording = read_recording(run_dir)
    if not recording.last_step:
        return None
    steps = recording.steps
    figure = figure_of(10.0, 6.6)
    loss, metric, rate, last = figure.subplots(2, 2, sharex=True).flat
    _draw_loss(loss, steps["loss"], recording.evaluations.get("loss", Curve()))
    _draw_metric(metric, recording)
    _draw_series(rate, steps["lr"], "learning rate")
    if len({value for _, value in points_of(steps["scale"])}) > 1 or recording.skips.num_points:
        _draw_scale(last, steps["scale"], recording.skips)
    else:
        _draw_series(last, steps["grad_norm"], "gradient norm", logarithmic=True)
    for axes in (rate, last):
        axes.set_xlabel("step")
    return save(figure, run_dir / CURVES)


def draw_confusion_matrix(run_dir: Path) -> Path | None:
    """confusion_matrix.png from result.json; None where that holds none. Raises OSError, ValueError."""
    from matplotlib.colors import PowerNorm

    result = read_json(run_dir / RESULT)
    counts: list[list[int]] | None = result.get("confusion_matrix")
    if not counts:
        return None
    classes = [plain(middle_cut(str(name), MAX_NAME)) for name in result.get("classes") or range(len(counts))]
    side_inches = min(14.0, 3.2 + 0.42 * len(counts))
    figure = figure_of(side_inches + 1.2, side_inches)
    axes = figure.subplots()
    shares = [[count / max(1, sum(row)) for count in row] for row in counts]
    # The square root of the share, so that a few mistakes among many samples still show.
    image = axes.imshow(shares, cmap="Blues", norm=PowerNorm(0.5, vmin=0.0, vmax=1.0))
    if len(counts) <= MAX_COUNTED_CLASSES:
        _write_counts(axes, counts, shares)
    _name_classes(axes, classes)
    bar = figure.colorbar(image, ax=axes, fraction=0.046, pad=0.03)
    bar.set_label("share of the true class")
    bar.ax.tick_params(labelsize=9)
    bar.outline.set_visible(False)
    right = sum(counts[k][k] for k in range(len(counts)))
    total = sum(map(sum, counts))
    axes.set_title(f"{right:,} of {total:,} right", loc="left", fontsize=11)
    return save(figure, run_dir / CONFUSION_MATRIX)


def _draw_loss(axes: Axes, training: Curve, held_out: Curve) -> None:
    _draw_series(axes, training, "loss")
    points = points_of(held_out)
    if points:
        axes.plot(*zip(*points, strict=True), color=HELD_OUT, marker="o", markersize=3.5, label="held out")
    values = [value for _, value in points_of(training) + points]
    if values and min(values) > 0 and max(values) / min(values) > 20:
        use_log_scale(axes, values)
    axes.legend(frameon=False)


def _draw_metric(axes: Axes, recording: Recording) -> None:
    """Plot the accuracy where the task has it, otherwise the speed."""
    points = points_of(recording.evaluations.get("accuracy", Curve()))
    if not points:
        _draw_series(axes, recording.steps["samples_per_s"], "samples / s")
        return
    axes.plot(
        [step for step, _ in points],
        [100 * value for _, value in points],
        color=HELD_OUT,
        marker="o",
        markersize=3.5,
    )
    axes.set_ylabel("accuracy, held out (%)")
    step, best = max(points, key=lambda point: point[1])
    axes.set_title(f"best {best:.2%} at step {step:,}".replace("%", " %"), loc="left", fontsize=10, color=INK)


def _draw_scale(axes: Axes, scale: Curve, skips: Curve) -> None:
    """The loss scale in powers of two, and the steps that were skipped on overflow."""
    changes = sorted(points_of(scale) + points_of(skips))
    axes.step(
        [step for step, _ in changes],
        [value for _, value in changes],
        where="post",
        color=TRAIN,
        linewidth=1.3,
    )
    axes.set_yscale("log", base=2)
    axes.set_ylabel("loss scale")
    skipped = points_of(skips)
    if skipped:
        axes.plot(
            [step for step, _ in skipped],
            [value for _, value in skipped],
            linestyle="none",
            marker="x",
            color=SKIPPED,
            label=f"skipped steps: {skips.num_points:,}",
        )
        axes.legend(frameon=False)


def _draw_series(axes: Axes, curve: Curve, label: str, logarithmic: bool = False) -> None:
    points = points_of(curve)
    axes.set_ylabel(label)
    if not points:
        axes.text(0.5, 0.5, "not recorded", transform=axes.transAxes, ha="center", color=FAINT)
        return
    axes.plot(*zip(*points, strict=True), color=TRAIN, linewidth=1.3, label="training")
    if logarithmic and all(value > 0 for _, value in points):
        use_log_scale(axes, [value for _, value in points])


def use_log_scale(axes: Axes, values: Sequence[float]) -> None:
    """A logarithmic axis with plain numbers, also over less than a decade."""
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    decades = math.log10(max(values) / min(values))
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0,) if decades > 2.5 else (1.0, 2.0, 5.0)))
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())


def _write_counts(axes: Axes, counts: Sequence[Sequence[int]], shares: Sequence[Sequence[float]]) -> None:
    size = 9 if len(counts) <= 15 else 6
    for row, (numbers, parts) in enumerate(zip(counts, shares, strict=True)):
        for column, (count, share) in enumerate(zip(numbers, parts, strict=True)):
            if count:
                color = "white" if share > 0.35 else INK
                axes.text(column, row, f"{count:,}", ha="center", va="center", fontsize=size, color=color)


def _name_classes(axes: Axes, classes: Sequence[str]) -> None:
    axes.set_xlabel("predicted class")
    axes.set_ylabel("true class")
    if len(classes) > MAX_NAMED_CLASSES:
        return  # ticks show class numbers
    size = 9 if len(classes) <= 15 else 6
    slanted = max(map(len, classes)) > 3
    axes.set_xticks(range(len(classes)), classes, fontsize=size)
    axes.set_yticks(range(len(classes)), classes, fontsize=size)
    if slanted:
        for label in axes.get_xticklabels():
            label.set(rotation=45, horizontalalignment="right", rotation_mode="anchor")
    axes.tick_params(length=0)


def points_of(curve: Curve) -> list[tuple[float, float]]:
    """(step, value), thinned."""
    x, y = curve.points()
    return list(zip(x.tolist(), y.tolist(), strict=True))


def plain(name: str) -> str:
    """The name as matplotlib shows it unchanged: a pair of dollar signs would be a formula."""
    return name.replace("$", r"\$")


def figure_of(width_inches: float, height_inches: float) -> Figure:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width_inches, height_inches), dpi=120)
    figure.set_layout_engine("constrained", w_pad=0.1, h_pad=0.1)
    return figure


def save(figure: Figure, path: Path) -> Path:
    for axes in figure.axes:
        axes.spines[["top", "right"]].set_visible(False)
        axes.spines[["left", "bottom"]].set_color(FAINT)
        if not axes.images:
            axes.grid(axis="y", color="#e3e3e3", linewidth=0.7)
            axes.set_axisbelow(True)
    content = io.BytesIO()
    figure.savefig(content, format="png")
    write_content(path, content.getvalue())
    return path
