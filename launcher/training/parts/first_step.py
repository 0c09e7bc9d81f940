"""Logs the first step of a process at once, and has the limits of waiting fall after it."""

from __future__ import annotations

from collections.abc import Callable

from launcher.engine import StepResult
from launcher.training.progress import Position
from launcher.training.run import Run


class FirstStep:
    """Calls `done` when all ranks have made a step: they have started and compiled."""

    name = "first_step"

    def __init__(self, run: Run, done: Callable[[], None]) -> None:
        self._run = run
        self._done: Callable[[], None] | None = done

    def after_launch(self, position: Position, result: StepResult) -> None:
        if self._done is not None:
            self._run.reports.drain()
            done, self._done = self._done, None
            done()
