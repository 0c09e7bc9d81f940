"""Sweeps in place, under the real torchrun: several jobs on the same ranks, one after another."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from launcher.commands import sweep
from launcher.config.composition import Request
from launcher.config.resolve import compose_jobs
from launcher.config.schema import Config
from launcher.distributed.env import LaunchEnv
from launcher.errors import PreemptedError
from launcher.sweep.state import SweepState
from tests.faults.parent import WORDS, write_recipe
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


def test_a_sweep_that_continues_counts_the_time_of_the_jobs_in_place(tmp_path: Path, monkeypatch) -> None:
    def take_a_while(config: Config, *more: object) -> None:
        time.sleep(0.01)
        if config.seed == 1:
            raise PreemptedError("stopped on request")

    monkeypatch.setattr(sweep, "run_job", take_a_while)
    leader: Any = SimpleNamespace(launch=LaunchEnv(0, 2, has_external_launcher=True), group_broken=False)
    words = ("recipe=cnn", "tracker=none", "seed=0,1,2", f"hydra.sweep.dir={tmp_path}")
    request = Request(words, multirun=True)
    seconds = []
    for _ in range(2):
        assert sweep.run_in_place(request, compose_jobs(request), leader, ()) == 75
        record = SweepState.read(tmp_path)
        seconds.append([job.seconds for job in record.jobs])
        assert record.device_seconds == pytest.approx(2 * sum(seconds[-1]))
    assert min(seconds[0][:2]) >= 0.01
    assert min(seconds[1][:2]) >= 0.02
    assert seconds[1][2] == 0
