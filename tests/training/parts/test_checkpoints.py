"""What Checkpoints does with votes: a save after a dropped step, the end of a run that was moved."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from launcher.errors import StorageError
from launcher.run_dir.lock import locked
from launcher.training.parts.checkpoints import Checkpoints
from launcher.training.progress import Measured, Position
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


def run_of(votes: Votes, reports: Reports) -> Any:
    return SimpleNamespace(
        config=SimpleNamespace(
            checkpoint=SimpleNamespace(keep=2, every_steps=None, every_s=None, on_error="continue")
        ),
        votes=votes,
        reports=reports,
        requests=SimpleNamespace(stop=None, take_save=lambda: False),
        is_asked_to_end=lambda: False,
        env=SimpleNamespace(is_leader=True, group=None, world_size=1, rank=0),
        stepper=SimpleNamespace(vote=votes.agree, group=None),
        telemetry=SimpleNamespace(flush=nothing, emit=nothing, warn=nothing),
        heartbeat=SimpleNamespace(beat=nothing),
        average=None,
    )


def test_an_agreed_save_is_made_after_the_step_that_is_taken_again(tmp_path: Path) -> None:
    votes, reports, saved = Votes(), Reports(), []

    def take(position: Position, metric: object) -> Any:
        saved.append(position.step)

    second = Position(0, 1, 2)
    with Checkpoints(run_of(votes, reports), tmp_path / "checkpoints", take) as checkpoints:
        votes.agree(Question.SAVE)  # voted on in step 1, and read after step 2 was launched
        reports.dropped = second
        try:
            checkpoints.end_step(second, None)
        except DroppedStepError as dropped:
            checkpoints.retake(dropped.position)
        assert saved == []
        checkpoints.end_step(second, None)
    assert saved == [2]


@pytest.mark.parametrize("last", [False, True])
def test_a_run_whose_directory_is_moved_ends_on_all_ranks(tmp_path: Path, last: bool, message: Any) -> None:
    run_dir, votes = tmp_path / "run", Votes()
    run_dir.mkdir()
    staged: Any = lambda: SimpleNamespace(progress=SimpleNamespace(step=1))  # noqa: E731
    with (
        locked(run_dir),
        Checkpoints(run_of(votes, Reports()), run_dir / "checkpoints", lambda *_: staged) as checkpoints,
    ):
        run_dir.rename(tmp_path / "away")
        if not last:
            checkpoints.vote(Position(0, 1, 2))
        with pytest.raises(StorageError) as caught:
            checkpoints.end_step(Position(0, 1, 2), Measured(None, is_last=True) if last else None)
    assert message(caught.value).endswith(f"To resume: the same command with run.dir={tmp_path / 'away'}")
    assert not run_dir.exists()


def test_a_run_whose_directory_another_run_has_taken_is_not_told_to_free_space(tmp_path: Path) -> None:
    run_dir, votes = tmp_path / "run", Votes()
    run_dir.mkdir()
    staged: Any = lambda: SimpleNamespace(progress=SimpleNamespace(step=1))  # noqa: E731
    with (
        locked(run_dir),
        Checkpoints(run_of(votes, Reports()), run_dir / "checkpoints", lambda *_: staged) as checkpoints,
    ):
        shutil.rmtree(run_dir)
        run_dir.mkdir()
        with locked(run_dir), pytest.raises(StorageError) as caught:
            checkpoints.end_step(Position(0, 1, 2), Measured(None, is_last=True))
    assert str(caught.value).endswith(
        "another process uses the path now. To train on, choose another directory."
    )
