"""The checkpoint that wandb keeps on request: which one, under which names, and never offline."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from launcher.telemetry.event_log import EventLog
from launcher.telemetry.tracker.wandb_tracker import checkpoint_artifact
from tests.faults.launching import WORDS
from tests.forked import launch_forked
from tests.telemetry.tracker.test_wandb_session import offline_records

ROOT = Path(__file__).parents[3]
UPLOAD = """
import os, sys
from pathlib import Path
from launcher.telemetry.tracker import RunInfo
from launcher.telemetry.tracker.sink import TrackerTimeouts
from launcher.telemetry.tracker.wandb_tracker import WandbOptions, WandbTracker, checkpoint_artifact

run_dir = Path(sys.argv[1])
options = WandbOptions(False, print, TrackerTimeouts(), lambda: checkpoint_artifact(run_dir, "best"))
tracker = WandbTracker(options)
tracker.start(RunInfo(run_dir, "a name", "anid0001", "a project", {}))
tracker.log(1, {"train/loss": 0.5})
tracker.finish(int(sys.argv[2]))
"""


def saved(run_dir: Path, *steps: tuple[int, bool]) -> None:
    log = EventLog(run_dir / EventLog.name)
    for step, best in steps:
        folder = run_dir / "checkpoints" / f"step-{step:08d}"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "weights.safetensors").write_bytes(b"weights of %d" % step)
        log.append({"event": "checkpoint", "time": 1.0, "step": step, "path": str(folder), "best": best})
    log.close()


@pytest.mark.parametrize(
    ("steps", "wanted", "step", "is_best"),
    [
        ([(5, True), (10, False)], "last", 10, False),
        ([(5, True), (10, False)], "best", 5, True),
        ([(5, True), (10, True)], "best", 10, True),
        ([(5, True), (10, True)], "last", 10, True),
    ],
)
def test_the_newest_or_the_best_checkpoint_is_chosen(tmp_path, steps, wanted, step, is_best) -> None:
    saved(tmp_path, *steps)
    chosen = checkpoint_artifact(tmp_path, wanted)
    assert chosen is not None
    assert (chosen.step, chosen.is_best) == (step, is_best)


def test_without_a_checkpoint_there_is_none(tmp_path: Path) -> None:
    assert checkpoint_artifact(tmp_path, "best") is None
    saved(tmp_path, (5, False))
    assert checkpoint_artifact(tmp_path, "best") is None


@pytest.mark.parametrize("exit_code", [0, pytest.param(5, marks=pytest.mark.slow)])
def test_the_files_and_aliases_are_in_the_run_of_wandb(tmp_path: Path, exit_code: int) -> None:
    """Read from the file of a run, which is what would be sent. A run that failed keeps nothing."""
    saved(tmp_path, (5, True), (10, False))
    kept = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
    homes = {"HOME": str(tmp_path), "WANDB_DATA_DIR": str(tmp_path), "WANDB_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", UPLOAD, str(tmp_path), str(exit_code)],
        env=kept | homes | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    records = offline_records(tmp_path)
    found = [record.artifact for record in records if record.WhichOneof("record_type") == "artifact"]
    assert len(found) == (exit_code == 0)
    for artifact in found:
        assert (artifact.name, artifact.type) == ("checkpoint-anid0001", "model")
        assert sorted(artifact.aliases) == ["best", "latest"]  # wandb keeps them in a set
        assert json.loads(artifact.metadata) == {"step": 5}
        assert [entry.path for entry in artifact.manifest.contents] == ["weights.safetensors"]


@pytest.mark.slow
def test_asked_for_offline_they_are_an_error_before_the_run(tmp_path: Path) -> None:
    words = [*WORDS, "tracker=wandb", "tracker.mode=offline", "tracker.artifacts=best", "run.dir=run"]
    done = launch_forked(tmp_path, words, HOME=str(tmp_path))
    assert done.returncode == 2
    assert "tracker.artifacts=best: checkpoints are uploaded by an online run only" in done.stderr
    assert not (tmp_path / "run" / "checkpoints").exists()
