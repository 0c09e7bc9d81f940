"""`gradients.png`: a run's gradients over the range of fp16, with and without the loss scale.

Owns the plot that shows the effect of loss scaling. Reads metrics.jsonl only. Elements that are zero as sent
were rounded to zero or are always zero (dead units, kernel positions that only see padding). The additional
zeros at a scale of 1 are those that the scale prevents.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launcher.report.plots import FAINT, INK, SKIPPED, TRAIN, figure_of, plain, save
from launcher.report.recording import read_recording

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Event = dict[str, Any]

GRADIENTS = "gradients.png"
UNSCALED = "#b9b9b9"
SMALLEST_SUBNORMAL, SMALLEST_NORMAL, END = -24, -14, 16  # exponents of fp16; END is the first that overflows
MAX_LAYERS = 24
VISIBLE_PERCENT = 0.005


def draw_exponents(run_dir: Path) -> Path | None:
    """gradients.png from the latest `gradients` event; None without one. Raises OSError, ValueError."""
    latest = read_recording(run_dir).gradients
    if latest is None:
        return None
    layers = worst_layers(latest)
    height_inches = max(4.6, 1.6 + 0.21 * len(layers))
    figure = figure_of(12.4, height_inches)
    histogram, shares = figure.subplots(1, 2, width_ratios=(2.5, 1))
    _draw_histogram(histogram, latest)
    _draw_layers(shares, layers, len(latest["layers"]))
    return save(figure, run_dir / GRADIENTS)


def worst_layers(event: Event) -> list[tuple[str, dict[str, float]]]:
    """The parameters with the most zeros at scale 1, most first."""
    layers: list[tuple[str, dict[str, float]]] = list(event["layers"].items())
    return sorted(layers, key=lambda layer: -layer[1]["zero_share_at_scale_1"])[:MAX_LAYERS]


def _draw_histogram(axes: Axes, event: Event) -> None:
    """Exponents as sent and at scale 1: the scale shifts them by its logarithm."""
    shift = round(math.log2(event["scale"]))
    counts: Sequence[int] = event["histogram"]
    elements = max(1, sum(counts) + event["zeros"])
    percent = [100 * count / elements for count in counts]
    exponents = range(event["first_exponent"], event["first_exponent"] + len(counts))
    left = min(
        (e - shift for e, part in zip(exponents, percent, strict=True) if part > VISIBLE_PERCENT), default=0
    )
    left = min(left, SMALLEST_SUBNORMAL - 3) - 3
    top = 1.5 * max(percent, default=1.0) or 1.0
    _mark_ranges(axes, left, top)
    if shift:
        axes.bar(
            [e - shift for e in exponents],
            percent,
            width=1.0,
            align="edge",
            color=UNSCALED,
            label=f"at scale 1: another {_percent(_lost(event))} would be zero",
        )
    axes.bar(
        exponents,
        percent,
        width=0.84,
        align="edge",
        color=TRAIN,
        label=f"as sent, at scale 2^{shift}: {_percent(event['zero_share'])} are zero",
    )
    if shift:
        _draw_shift(axes, exponents, percent, shift)
    axes.set_xlim(left, END + 4)
    axes.set_ylim(0, top)
    axes.set_xlabel("size of a gradient element, as a power of two")
    axes.set_ylabel("elements (%)")
    axes.set_title(f"step {event['step']:,}: {elements:,} elements", loc="left", fontsize=10, color=INK)
    axes.legend(frameon=False, loc="upper left", bbox_to_anchor=(0.0, 0.93))


def _mark_ranges(axes: Axes, left: float, top: float) -> None:
    """Mark where fp16 rounds to zero, is subnormal, is normal, and overflows."""
    for start, stop, name, color, strength in (
        (left, SMALLEST_SUBNORMAL - 1, "zero", SKIPPED, 0.10),
        (SMALLEST_SUBNORMAL - 1, SMALLEST_NORMAL, "subnormal", "#d4a72a", 0.10),
        (SMALLEST_NORMAL, END, "fp16's normal range", TRAIN, 0.05),
        (END, END + 4, "inf", SKIPPED, 0.10),
    ):
        axes.axvspan(start, stop, color=color, alpha=strength, linewidth=0)
        axes.text((start + stop) / 2, 0.965 * top, name, ha="center", va="top", fontsize=9, color=INK)


def _draw_shift(axes: Axes, exponents: Sequence[int], percent: Sequence[float], shift: int) -> None:
    """An arrow from the peak at scale 1 to the same peak as sent."""
    peak = max(range(len(percent)), key=percent.__getitem__)
    height = 1.06 * percent[peak]
    axes.annotate(
        "",
        xy=(exponents[peak] + 0.5, height),
        xytext=(exponents[peak] + 0.5 - shift, height),
        arrowprops={"arrowstyle": "->", "color": INK, "linewidth": 1.1},
    )
    axes.text(
        exponents[peak] + 0.5 - shift / 2, 1.02 * height, f"x 2^{shift}", ha="center", va="bottom", color=INK
    )


def _draw_layers(axes: Axes, layers: Sequence[tuple[str, dict[str, float]]], num_layers: int) -> None:
    """Zeros per parameter, at scale 1 and as sent."""
    names = [plain(name) for name, _ in layers]
    places = range(len(names), 0, -1)
    lost = [100 * shares["zero_share_at_scale_1"] for _, shares in layers]
    zero = [100 * shares["zero_share"] for _, shares in layers]
    axes.barh(places, lost, height=0.8, color=UNSCALED, label="at scale 1")
    axes.barh(places, zero, height=0.5, color=TRAIN, label="as sent")
    axes.set_yticks(places, names, fontsize=7)
    axes.tick_params(axis="y", length=0)
    axes.set_xlim(0, 100)
    axes.set_ylim(0.3, len(names) + 0.7)
    axes.set_xlabel("elements that are zero in fp16 (%)")
    title = "all parameters" if num_layers == len(names) else f"worst {len(names)} of {num_layers} parameters"
    axes.set_title(title, loc="left", fontsize=10, color=FAINT if not names else INK)
    axes.legend(frameon=False, loc="lower right", fontsize=9)


def _lost(shares: Event) -> float:
    """The share of elements that would be zero only at a scale of 1."""
    return float(shares["zero_share_at_scale_1"] - shares["zero_share"])


def _percent(share: float) -> str:
    return f"{share:.2%}".replace("%", " %")
