"""Progress of the training steps on a terminal: a tqdm bar per epoch.

Owns the bar on stderr, the estimate of the remaining time, and the order in which the bar's text is
shortened. Leaves no thread running. From wide to narrow, these are dropped in order:

    the drawn bar; the epoch; the total of the steps; the word `samples`, the digits of the scale (65536
    becomes 2^16) and the commas; the ETA; the skipped steps; samples per second; the words `step` and
    `scale`; the scale; the step; the word `loss`.

With numbers of usual size, 80 columns show all but the drawn bar and the epoch, 40 show step, loss and scale.
No number and no word is ever cut.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TextIO

from launcher.process.streams import write
from launcher.process.terminal import USUAL_COLUMNS, columns_of
from launcher.telemetry.events import StartEvent, StepEvent
from launcher.telemetry.formatting import duration, number, rate, scale_text, step_details
from launcher.telemetry.status import Pace

SMALLEST_BAR, LARGEST_BAR = 10, 40  # characters: each is a tenth of the epoch, or less


class Bars:
    """A bar per epoch, cleared when the epoch ends."""

    def __init__(self, err: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        self._err = err
        self._pace = Pace(clock)
        self.plan = StartEvent(0)
        self._bar: Any = None
        self._epoch = -1
        self._step = 0
        self._latest: StepEvent | None = None

    def show(self, event: StepEvent) -> None:
        self._latest = event
        self.advance(event.epoch, event.step)

    def advance(self, epoch: int, step: int) -> None:
        bar = self._bar_of(epoch)
        self._step = step
        bar.update(step - epoch * (self.plan.steps_per_epoch or 0) - bar.n)

    def aside(self) -> contextlib.AbstractContextManager[None]:
        """A context in which the bar is not shown."""
        if self._bar is None:
            return contextlib.nullcontext()  # tqdm's lock would fix the start method of multiprocessing
        from tqdm import tqdm

        return tqdm.external_write_mode(file=self._err)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def text(self) -> str:
        """The current line, for the current width of the terminal."""
        per_epoch, total, epochs = self.plan.steps_per_epoch, self.plan.total_steps, self.plan.epochs
        moment = Moment(
            epoch=f"{self._epoch + 1}" + (f"/{epochs}" if epochs else ""),
            step=self._step,
            total_steps=total,
            share=(self._step - self._epoch * per_epoch) / per_epoch if per_epoch else None,
            eta_s=self._pace.eta_s(self._step, total),
            latest=self._latest,
        )
        return bar_line(moment, self.room())

    def room(self) -> int:
        """Available columns. The last one stays free, because some terminals wrap there."""
        return (columns_of(self._err) or USUAL_COLUMNS) - 1

    def _bar_of(self, epoch: int) -> Any:
        if self._bar is None or epoch != self._epoch:
            self.close()
            self._epoch = epoch
            self._bar = bar_of(self, self._err, self.plan.steps_per_epoch)
        return self._bar


def bar_of(bars: Bars, err: TextIO, steps_per_epoch: int | None) -> object:
    """A tqdm bar with the text of `bars`, because tqdm cuts its own text within words."""
    from tqdm import tqdm

    class Bar(tqdm):  # type: ignore[type-arg]
        monitor_interval = 0  # no monitor thread: it would outlive the run

        def __str__(self) -> str:
            return bars.text()

        @staticmethod
        def status_printer(file: object) -> Callable[[str], None]:
            def show(text: str) -> None:  # tqdm pads to the previous length, which may exceed the terminal
                write(f"\r{text:<{bars.room()}}", err)

            return show

    return Bar(total=steps_per_epoch, file=err, leave=False)


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
        parts["speed"] = f"{rate(latest.samples_per_s).replace(',', '')}/s"
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
