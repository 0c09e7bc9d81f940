"""A restart by torchrun resumes in the directory of the attempt before, from its newest checkpoint."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.faults import parent

WORDS = [*parent.WORDS, "train.max_steps=8", "checkpoint.every_steps=2", "train.log_every_steps=1"]
# Time to be killed in before it is done.
IN_STEP = "time.sleep(0.3 * (GENERATION == 0 and step > 4))"
IN_BUILD = "from tests.ranks.harness import leave_out_pictures; leave_out_pictures()"


def torchrun(directory: Path, ranks: int) -> subprocess.Popen[str]:
    environ = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    return subprocess.Popen(
        [*command, "--max-restarts=1", "--monitor-interval=0.1", "-m", "launcher", *WORDS],
        cwd=directory,
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )


def workers_of(agent: int) -> list[int]:
    return sorted(int(pid) for pid in Path(f"/proc/{agent}/task/{agent}/children").read_text().split())


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_restart_goes_on_in_the_same_directory(tmp_path, ranks) -> None:
    parent.write_recipe(tmp_path, IN_STEP, IN_BUILD)
    with torchrun(tmp_path, ranks) as agent:
        assert agent.stdout is not None
        seen = []
        for line in agent.stdout:
            seen.append(line)
            if "step 5/8" in line:
                os.kill(workers_of(agent.pid)[-1], signal.SIGKILL)
                break
        began = time.monotonic()
        seen += agent.stdout.readlines()
        assert agent.wait(timeout=60) == 0, "".join(seen)
        assert time.monotonic() - began < 60
    (run_dir,) = (tmp_path / "outputs" / "resnet18").iterdir()
    assert json.loads((run_dir / "result.json").read_text())["steps"] == 8
    assert any("resume after step" in line for line in seen), "".join(seen)
