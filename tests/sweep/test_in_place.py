"""Sweeps in place, under the real torchrun: several jobs on the same ranks, one after another."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

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
