"""The text of an epoch's progress bar for a given number of columns.

Owns the order in which it is shortened; knows no terminal. From wide to narrow, these are dropped in order:

    the drawn bar; the epoch; the total of the steps; the word `samples`, the digits of the scale (65536
    becomes 2^16) and the commas; the ETA; the skipped steps; samples per second; the words `step` and
    `scale`; the scale; the step; the word `loss`.

With numbers of usual size, 80 columns show all but the drawn bar and the epoch, 40 show step, loss and scale.
No number and no word is ever cut.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from launcher.telemetry.events import StepEvent
from launcher.telemetry.formatting import duration, number, scale_text, step_details

SMALLEST_BAR, LARGEST_BAR = 10, 40


@dataclass(frozen=True)
class Moment:
    """Progress within an epoch. `latest` is None before the first `step` event."""

    epoch: str  # 3/10
    step: int  # of the run
    total_steps: int | None
    share: float | None  # of the epoch, 0 to 1
    eta_s: float | None
    latest: StepEvent | None = None


def bar_line(moment: Moment, columns: int) -> str:
    """The fullest text that fits; "" where none does."""
    long = f"epoch {moment.epoch}  {', '.join(_parts(moment, with_total=True))}"
    room = columns - len(long) - len("100% [] ")
    if moment.share is not None and room >= SMALLEST_BAR:
        return f"{_drawn(moment.share, min(room, LARGEST_BAR))} {long}"
    return next((text for text in (long, *_shorter(moment)) if len(text) <= columns), "")


def _shorter(moment: Moment) -> Iterator[str]:
    """Texts of decreasing length, in the order of the module's docstring."""
    yield ", ".join(_parts(moment, with_total=True))
    yield ", ".join(_parts(moment, with_total=False))
    short = _short_parts(moment)
    order = ("step", "loss", "speed", "scale", "skipped", "eta")
    for left_out in ((), ("eta",), ("eta", "skipped"), ("eta", "skipped", "speed")):
        yield " ".join(short[key] for key in order if key in short and key not in left_out)
    loss, step = short["loss"], short["step"].removeprefix("step ")
    scale = short.get("scale", "").removeprefix("scale ")
    yield " ".join(filter(None, (step, loss, scale)))
    yield f"{short['step']} {loss}"
    yield f"{step} {loss}"
    yield loss
    yield loss.removeprefix("loss ")


def _parts(moment: Moment, with_total: bool) -> list[str]:
    total, latest = moment.total_steps, moment.latest
    step = f"step {moment.step}" + (f"/{total}" if with_total and total else "")
    loss = f"loss {number(latest.loss if latest else None)}"
    eta = [] if moment.eta_s is None else [f"eta {duration(moment.eta_s)}"]
    return [step, loss, *(step_details(latest) if latest else []), *eta]


def _short_parts(moment: Moment) -> dict[str, str]:
    latest, parts = moment.latest, {"step": f"step {moment.step}"}
    parts["loss"] = f"loss {number(latest.loss if latest else None)}".replace(",", "")
    if latest is not None:
        parts["speed"] = f"{latest.samples_per_s:.0f}/s"
        parts["scale"] = f"scale {_power(latest.scale)}"
        parts["skipped"] = f"skipped {latest.skipped}"
    if moment.eta_s is not None:
        parts["eta"] = f"eta {duration(moment.eta_s)}"
    return parts


def _power(scale: float) -> str:
    """65536 as 2^16. Only large powers of two are written as powers."""
    fraction, exponent = math.frexp(scale) if math.isfinite(scale) else (0.0, 0)
    return f"2^{exponent - 1}" if fraction == 0.5 and scale >= 1024 else scale_text(scale)


def _drawn(share: float, columns: int) -> str:
    share = min(max(share, 0.0), 1.0)
    return f"{share:4.0%} [{'#' * round(share * columns):<{columns}}]"
