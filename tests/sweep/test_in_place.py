"""Sweeps in place, under the real torchrun: several jobs on the same ranks, one after another."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.faults.parent import ENDLESS, WORDS, write_recipe
from tests.limits import at_most
from tests.sweep.launchers.jobs import environment

SWEEPS = int(os.environ.get("LAUNCHER_TEST_SWEEPS", "2"))  # 20 have passed
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]


@pytest.mark.slow
@pytest.mark.timeout(120 * SWEEPS)
def test_sweeps_in_a_row_have_no_failure(tmp_path: Path) -> None:
    """Each job has a process group of its own: keys of the store used again would make most sweeps fail."""
    write_recipe(tmp_path)
    command = [*TORCHRUN, "-m", "launcher", "-m", *WORDS, "train.epochs=2", "seed=0,1,2,3"]
    for number in range(SWEEPS):
        done = subprocess.run(
            command, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=at_most(100)
        )
        assert done.returncode == 0, f"sweep {number}: {done.stdout}{done.stderr}"
        assert "sweep: 4 of 4 jobs done" in done.stdout


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_sweep_that_is_stopped_continues_with_the_jobs_that_are_not_done(tmp_path: Path) -> None:
    """SIGTERM to torchrun: the job in progress is saved, no other starts, the same command runs the rest."""
    write_recipe(tmp_path, "if os.path.exists('slow'): " + ENDLESS)
    command = [*TORCHRUN, "-m", "launcher", "-m", *WORDS, "train.epochs=60", "seed=0,1,2"]
    (tmp_path / "slow").touch()
    with subprocess.Popen(
        [*command, "hydra.sweep.dir=sweep"],
        cwd=tmp_path,
        env=environment(),
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        until = time.monotonic() + at_most(100)
        while not [*tmp_path.glob("sweep/*/metrics.jsonl")] and time.monotonic() < until:
            time.sleep(0.1)
        time.sleep(3)
        process.send_signal(signal.SIGTERM)
        _, told = process.communicate(timeout=at_most(60))
    assert process.returncode != 0
    assert "the same command with sweep.resume=" in told, told

    def jobs() -> list[dict[str, object]]:
        found: list[dict[str, object]] = json.loads((tmp_path / "sweep" / "sweep.json").read_text())["jobs"]
        return found

    assert [job["state"] for job in jobs()] == ["stopped", "waiting", "waiting"]
    (tmp_path / "slow").unlink()
    done = subprocess.run(
        [*command, "sweep.resume=sweep"],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=at_most(100),
    )
    assert done.returncode == 0, done.stderr
    assert "sweep: 3 of 3 jobs done" in done.stdout
    assert [(job["state"], job["attempts"]) for job in jobs()] == [("done", 2), ("done", 1), ("done", 1)]
