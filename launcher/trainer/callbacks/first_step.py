"""Lowers the limits of waiting after the first step of a process."""

from __future__ import annotations

from collections.abc import Callable

from launcher.trainer.callback import Callback, StepMetrics
from launcher.trainer.progress import Position


class FirstStep(Callback):
    """Calls `done` when all ranks have made a step: they have started and compiled."""

    name = "first_step"

    def __init__(self, done: Callable[[], None]) -> None:
        self._done: Callable[[], None] | None = done

    def on_step_metrics(self, position: Position, metrics: StepMetrics) -> None:
        if self._done is not None:
            self._done()
            self._done = None
