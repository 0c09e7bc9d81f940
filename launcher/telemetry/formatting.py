"""Formats numbers, durations and tables for the console and reports.

Pure: values in, strings out.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from launcher.errors import escaped
from launcher.telemetry.events import EvalEvent, StepEvent

SHARES = ("accuracy",)  # shown in percent
COUNTS = ("samples", "tokens")
UNITS = ("B", "kB", "MB", "GB")
OF_TRAINING = ("train_loss", "train_accuracy")
LARGE, COUNTED = 1e6, 1e9  # floats from here on have an exponent; integral ones
NARROWEST = 6  # columns of a number in a table


def number(value: object) -> str:
    """Four significant digits for a float, digits in groups for an integer, a dash for None.

    Large floats have an exponent: 2.71e36. Integral ones, as of steps, keep their digits up to `COUNTED`.
    """
    if value is None:
        return "-"
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    if isinstance(value, int) or (1000 <= abs(value) < COUNTED and value == int(value)):
        return f"{int(value):,}"
    if LARGE <= abs(value) < math.inf:
        digits, _, exponent = f"{value:.3g}".partition("e")
        return f"{digits}e{int(exponent)}"
    if 1000 <= abs(value) < LARGE:
        return f"{value:,.0f}"
    return f"{value:.4g}"


def rate(per_s: float) -> str:
    """Whole samples per second; two digits of slow ones, as of large models, so that none is 0."""
    return f"{per_s:.2g}" if per_s < 10 else f"{per_s:,.0f}"


def duration(seconds: float | None) -> str:
    """0:07, 12:30, 1:02:03."""
    if seconds is None or not math.isfinite(seconds):
        return "-"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def metric(name: str, value: object) -> str:
    """A value of an evaluation: shares in percent, counts whole, the rest to four decimals."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return number(value)
    if any(name.endswith(share) for share in SHARES):
        return percent(value, 2)
    if name in COUNTS:
        return f"{value:,.0f}"
    return number(value) if LARGE <= abs(value) < math.inf else f"{value:.4f}"


def percent(share: float, decimals: int = 0) -> str:
    return f"{100 * share:.{decimals}f} %"


def size(value: float) -> str:
    """Bytes, in the largest unit of which there is one."""
    power = min(int(math.log10(max(value, 1.0)) / 3), len(UNITS) - 1)
    return f"{value / 1000**power:.{1 if power else 0}f} {UNITS[power]}"


def metric_title(name: str) -> str:
    """macro_f1 -> macro F1. Losses keep their names: train_loss, val_loss."""
    return name if name.endswith("_loss") else name.replace("_", " ").replace("f1", "F1")


def markdown_text(text: str) -> str:
    """The text in one line, that ends no cell of a table."""
    return escaped(" ".join(text.split()).replace("|", "\\|"))


def markdown_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """The lines of a Markdown table, whose cells are shown as they are."""
    lines = [f"| {' | '.join(map(markdown_text, cells))} |" for cells in (head, *rows)]
    return [lines[0], f"|{' --- |' * len(head)}", *lines[1:]]


def evaluation_cells(event: EvalEvent) -> dict[str, str]:
    """One row of the table of evaluations, as titles and texts; epochs count from 1 for people.

    Numbers of the training samples stand after the loss and the first metric of the validation samples.
    """
    held_out = {"val_loss": event.val_loss} | {k: v for k, v in event.metrics.items() if k not in OF_TRAINING}
    order = [*list(held_out)[:2], *OF_TRAINING, *held_out]
    values = {"val_loss": event.val_loss, **event.metrics}
    shown = {name: values[name] for name in dict.fromkeys(order) if name in values}
    shown |= {"samples": event.samples, "seconds": event.seconds}
    cells = {"epoch": number(event.epoch + 1), "step": number(event.step)}
    cells |= {} if event.set is None else {"set": event.set}
    return cells | {metric_title(k.removeprefix("macro_")): metric(k, v) for k, v in shown.items()}


def table_widths(cells: Mapping[str, str]) -> dict[str, int]:
    """The width of each column, by title. Rows with equal widths share one line of titles."""
    return {title: max(len(title), len(text), NARROWEST) for title, text in cells.items()}


def table_lines(cells: Mapping[str, str], widths: Mapping[str, int], with_titles: bool) -> list[str]:
    """The lines of a table with right-aligned columns."""
    row = "  ".join(cells[title].rjust(width) for title, width in widths.items())
    titles = "  ".join(title.rjust(width) for title, width in widths.items())
    return [titles, row] if with_titles else [row]


def step_line(event: StepEvent, epochs: int | None, total_steps: int | None, eta_s: float | None) -> str:
    """One line per `step` event, for logs and pipes."""
    parts = [
        f"epoch {_of(event.epoch + 1, epochs)}",
        f"step {_of(event.step, total_steps)}",
        f"train_loss {number(event.loss)}",
        f"lr {number(event.lr)}",
        *step_details(event),
    ]
    if eta_s is not None:
        parts.append(f"eta {duration(eta_s)}")
    return "  ".join(parts)


def step_details(event: StepEvent) -> list[str]:
    """Speed, loss scale and skipped steps."""
    speed, scale = f"{rate(event.samples_per_s)} samples/s", f"scale {scale_text(event.scale)}"
    return [speed, scale, f"skipped {event.skipped}"]


def scale_text(scale: float) -> str:
    return f"{scale:g}" if scale < 1 else f"{scale:.0f}"


def _of(value: object, total: int | None) -> str:
    return number(value) if total is None else f"{number(value)}/{number(total)}"
