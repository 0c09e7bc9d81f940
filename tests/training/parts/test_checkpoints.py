"""A request to save survives a step that all ranks drop."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from launcher.training.parts.checkpoints import Checkpoints
from launcher.training.progress import Position
from launcher.training.reports import DroppedStepError
from launcher.training.votes import Question, Votes


class Reports:
    """Reads a dropped step once."""

    def __init__(self) -> None:
        self.dropped: Position | None = None

    def drain(self) -> None:
        dropped, self.dropped = self.dropped, None
        if dropped is not None:
            raise DroppedStepError(dropped)

    flush = drain

    def restart_timer(self) -> None:
        """No step is timed here."""


def nothing(*values: object, **named: object) -> None:
    """What is done for a step that this test does not look at."""


def test_an_agreed_save_is_made_after_the_step_that_is_taken_again(tmp_path: Path) -> None:
    votes, reports, saved = Votes(), Reports(), []
    run: Any = SimpleNamespace(
        config=SimpleNamespace(
            checkpoint=SimpleNamespace(keep=2, every_steps=None, every_s=None, on_error="continue")
        ),
        votes=votes,
        reports=reports,
        requests=SimpleNamespace(stop=None, take_save=lambda: False),
        env=SimpleNamespace(is_leader=True, group=None, world_size=1, rank=0),
        stepper=SimpleNamespace(vote=nothing, group=None),
        telemetry=SimpleNamespace(flush=nothing, emit=nothing, warn=nothing),
        heartbeat=SimpleNamespace(beat=nothing),
        average=None,
    )

    def take(position: Position, metric: object) -> Any:
        saved.append(position.step)

    second = Position(0, 1, 2)
    with Checkpoints(run, tmp_path / "checkpoints", take) as checkpoints:
        votes.agree(Question.SAVE)  # voted on in step 1, and read after step 2 was launched
        reports.dropped = second
        try:
            checkpoints.end_step(second, None)
        except DroppedStepError as dropped:
            checkpoints.retake(dropped.position)
        assert saved == []
        checkpoints.end_step(second, None)
    assert saved == [2]
