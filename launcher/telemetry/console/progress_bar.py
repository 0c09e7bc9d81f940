"""Progress of the training steps: a tqdm bar per epoch on a terminal, plain lines elsewhere.

Owns the bar on stderr and the estimate of the remaining time. Knows nothing of evaluations and summaries.
Leaves no thread running.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any, Protocol, TextIO

from launcher.process.terminal import USUAL_COLUMNS, columns_of
from launcher.telemetry.console.bar import Moment, bar_line
from launcher.telemetry.events import StartEvent, StepEvent
from launcher.telemetry.formatting import step_line
from launcher.telemetry.status import Pace


class Progress(Protocol):
    """Display of the training progress."""

    def start(self, event: StartEvent) -> None: ...

    def show(self, event: StepEvent) -> None: ...

    def advance(self, epoch: int, step: int) -> None: ...

    def aside(self) -> contextlib.AbstractContextManager[None]:
        """Within the context, other text may be printed."""
        ...

    def close(self) -> None: ...


class Lines:
    """One line per `step` event, through `print_line`."""

    def __init__(
        self, print_line: Callable[[str], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._print_line = print_line
        self._pace = Pace(clock)
        self._epochs: int | None = None
        self._total_steps: int | None = None

    def start(self, event: StartEvent) -> None:
        self._epochs, self._total_steps = event.epochs, event.total_steps

    def show(self, event: StepEvent) -> None:
        eta_s = self._pace.eta_s(event.step, self._total_steps)
        self._print_line(step_line(event, self._epochs, self._total_steps, eta_s))

    def advance(self, epoch: int, step: int) -> None:
        pass

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        yield

    def close(self) -> None:
        pass


class Bars:
    """A bar per epoch, cleared when the epoch ends."""

    def __init__(self, err: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        self._err = err
        self._pace = Pace(clock)
        self._plan = StartEvent(0)
        self._bar: Any = None
        self._epoch = -1
        self._step = 0
        self._latest: StepEvent | None = None

    def start(self, event: StartEvent) -> None:
        self._plan = event

    def show(self, event: StepEvent) -> None:
        self._latest = event
        self.advance(event.epoch, event.step)

    def advance(self, epoch: int, step: int) -> None:
        bar = self._bar_of(epoch)
        self._step = step
        bar.update(step - epoch * (self._plan.steps_per_epoch or 0) - bar.n)

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        if self._bar is None:
            yield
            return
        self._bar.clear()
        yield
        self._bar.refresh()

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def text(self) -> str:
        """The current line, for the current width of the terminal."""
        per_epoch, total, epochs = self._plan.steps_per_epoch, self._plan.total_steps, self._plan.epochs
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
            self._bar = bar_of(self, self._err, self._plan.steps_per_epoch)
        return self._bar


def bar_of(bars: Bars, err: TextIO, steps_per_epoch: int | None) -> Any:
    """A tqdm bar with the text of `bars`, because tqdm cuts its own text within words."""
    from tqdm import tqdm

    class Bar(tqdm):  # type: ignore[type-arg]
        monitor_interval = 0  # no monitor thread: it would outlive the run

        def __str__(self) -> str:
            return bars.text()

        @staticmethod
        def status_printer(file: Any) -> Callable[[str], None]:
            def show(text: str) -> None:  # tqdm pads to the previous length, which may exceed the terminal
                err.write(f"\r{text:<{bars.room()}}")
                err.flush()

            return show

    return Bar(total=steps_per_epoch, file=err, leave=False)
