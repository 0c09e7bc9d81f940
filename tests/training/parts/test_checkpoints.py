"""What Checkpoints does with votes: the end of a run that was moved."""

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
from launcher.training.votes import Votes


class Reports:
    """Has read all steps."""

    def drain(self) -> None:
        """No step is waiting."""

    flush = restart_timer = drain


def nothing(*values: object, **named: object) -> None:
    """What is done for a step that this test does not look at."""


def run_of(votes: Votes, reports: Reports) -> Any:
    return SimpleNamespace(
        config=SimpleNamespace(
            checkpoint=SimpleNamespace(keep=2, every_steps=None, every_s=None, on_error="continue")
        ),
        votes=votes,
        reports=reports,
        stop_signal=SimpleNamespace(stop=None, pop_save=lambda: False),
        is_asked_to_end=lambda: False,
        env=SimpleNamespace(is_leader=True, group=None, world_size=1, rank=0),
        stepper=SimpleNamespace(vote=votes.agree, group=None),
        telemetry=SimpleNamespace(flush=nothing, emit=nothing, warn=nothing),
        heartbeat=SimpleNamespace(beat=nothing),
        average=None,
    )


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
