"""Progress of the training steps on a terminal: a tqdm bar per epoch, on stderr."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Any, TextIO

from launcher.telemetry.events import StartEvent, StepEvent
from launcher.telemetry.formatting import duration, number, step_details
from launcher.telemetry.status import EtaEstimator

# What matters first: tqdm cuts a line that is longer than the terminal.
SIZED = "{desc} |{bar}| {n_fmt}/{total_fmt}{postfix}"
UNSIZED = "{desc} step {n_fmt}{postfix}"  # an epoch of unknown length


class ProgressBar:
    """A bar per epoch, cleared when the epoch ends. `plan` is the `start` event of the run."""

    def __init__(self, err: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        self._err = err
        self._pace = EtaEstimator(clock)
        self.plan = StartEvent(0)
        self._bar: Any = None
        self._epoch = -1

    def show(self, event: StepEvent) -> None:
        """Show the numbers of a logged step."""
        eta_s = self._pace.eta_s(event.step, self.plan.total_steps)
        eta = [] if eta_s is None else [f"eta {duration(eta_s)}"]
        texts = [f"train_loss {number(event.loss)}", *eta, *step_details(event)]
        self._bar_of(event.epoch).set_postfix_str(", ".join(texts), refresh=False)
        self.on_step(event.epoch, event.step)

    def on_step(self, epoch: int, step: int) -> None:
        bar = self._bar_of(epoch)
        bar.update(step - epoch * (self.plan.steps_per_epoch or 0) - bar.n)

    def paused(self) -> contextlib.AbstractContextManager[None]:
        """A context in which the bar is not shown, so that other lines can be printed."""
        if self._bar is None:
            return contextlib.nullcontext()  # tqdm's lock would fix the start method of multiprocessing
        from tqdm import tqdm

        return tqdm.external_write_mode(file=self._err)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def _bar_of(self, epoch: int) -> Any:
        if self._bar is None or epoch != self._epoch:
            from tqdm import tqdm

            class Bar(tqdm):  # type: ignore[type-arg]
                monitor_interval = 0  # no monitor thread: it would outlive the run

            self.close()
            self._epoch, total = epoch, self.plan.steps_per_epoch
            self._bar = Bar(
                desc=f"epoch {epoch + 1}" + (f"/{self.plan.epochs}" if self.plan.epochs else ""),
                total=total,
                file=self._err,
                leave=False,
                dynamic_ncols=True,
                bar_format=SIZED if total else UNSIZED,
            )
        return self._bar
