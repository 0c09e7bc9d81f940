"""A call before each training step of a real run, by which its recipe takes times."""

from __future__ import annotations

from collections.abc import Callable

from launcher.engine import StepResult
from launcher.training.progress import Position
from launcher.training.task import Task


def call_before_each_step(call: Callable[[], None]) -> None:
    """Not by a function of the recipe: a transform, say, costs the launcher what the other side lacks."""
    train_on = Task.train_on

    def called(task: Task, position: Position) -> StepResult:
        call()
        return train_on(task, position)

    Task.train_on = called  # type: ignore[method-assign]
