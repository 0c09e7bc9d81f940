"""Progress of the training steps: a tqdm bar per epoch on a terminal, plain lines elsewhere.

Owns the bar on stderr and the pace of a run in words. Knows nothing of evaluations and summaries; no
thread is left behind.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Protocol, TextIO

from launcher.telemetry.status import Pace
from launcher.telemetry.stream import Record
from launcher.telemetry.wording import duration, number, step_details, step_line

if TYPE_CHECKING:
    from tqdm import tqdm

BAR_FORMAT = "{desc} {percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}{postfix}]"


class Progress(Protocol):
    """How far the steps of training are."""

    def start(self, record: Record) -> None: ...

    def show(self, record: Record) -> None: ...

    def advance(self, epoch: int, step: int) -> None: ...

    def aside(self) -> contextlib.AbstractContextManager[None]:
        """The place is free for other text while the context lasts."""
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

    def start(self, record: Record) -> None:
        self._epochs = record.get("epochs")
        self._total_steps = record.get("total_steps")

    def show(self, record: Record) -> None:
        eta_s = self._pace.eta_s(record["step"], self._total_steps)
        self._print_line(step_line(record, self._epochs, self._total_steps, eta_s))

    def advance(self, epoch: int, step: int) -> None:
        pass

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        yield

    def close(self) -> None:
        pass


class Bars:
    """A bar that lives as long as its epoch and then leaves its line to the table of evaluations."""

    def __init__(self, err: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        self._err = err
        self._pace = Pace(clock)
        self._plan: dict[str, int | None] = {"epochs": None, "steps_per_epoch": None, "total_steps": None}
        self._bar: tqdm[Any] | None = None
        self._epoch = -1
        self._details = ""

    def start(self, record: Record) -> None:
        self._plan = {key: record.get(key) for key in self._plan}

    def show(self, record: Record) -> None:
        self._details = ", ".join([f"loss {number(record.get('loss'))}", *step_details(record)])
        self.advance(record.get("epoch", 0), record["step"])

    def advance(self, epoch: int, step: int) -> None:
        bar = self._bar_of(epoch)
        eta_s = self._pace.eta_s(step, self._plan["total_steps"])
        details = [f"step {step}", self._details, "" if eta_s is None else f"eta {duration(eta_s)}"]
        bar.set_postfix_str(", ".join(filter(None, details)), refresh=False)
        bar.update(step - epoch * (self._plan["steps_per_epoch"] or 0) - bar.n)

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

    def _bar_of(self, epoch: int) -> tqdm[Any]:
        if self._bar is None or epoch != self._epoch:
            self.close()
            self._epoch = epoch
            self._bar = self._new_bar(epoch)
        return self._bar

    def _new_bar(self, epoch: int) -> tqdm[Any]:
        from tqdm import tqdm

        class Bar(tqdm):  # type: ignore[type-arg]
            monitor_interval = 0  # no monitor thread: it would outlive the run

        epochs = self._plan["epochs"]
        return Bar(
            total=self._plan["steps_per_epoch"],
            desc=f"epoch {epoch + 1}" + (f"/{epochs}" if epochs else ""),
            file=self._err,
            dynamic_ncols=True,
            leave=False,
            bar_format=BAR_FORMAT,
        )
