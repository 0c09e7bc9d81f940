"""What train.sbatch does where Slurm cannot requeue its job; tests/machines runs it on a cluster."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "slurm" / "train.sbatch"
JOB = {"SLURM_JOB_ID": "7", "SLURM_NNODES": "2", "SLURM_NTASKS": "2", "LAUNCHER": "python -m launcher"}


def programs(directory: Path, **bodies: str) -> str:
    """A PATH with these programs before the system's."""
    for name, body in bodies.items():
        program = directory / name
        program.write_text(f"#!/bin/bash\n{body}\n")
        program.chmod(0o755)
    return f"{directory}:{os.environ['PATH']}"


def script(path: str, **environ: str) -> subprocess.CompletedProcess[str]:
    environment = JOB | environ | {"PATH": path}
    return subprocess.run([SCRIPT, "seed=1"], env=environment, capture_output=True, text=True, timeout=30)


@pytest.mark.parametrize(("code", "advises"), [(0, False), (2, False), (75, True), (143, True)])
def test_without_scontrol_the_job_has_the_exit_code_of_the_run_and_a_line_how_to_resume(
    tmp_path: Path, code: int, advises: bool
) -> None:
    path = programs(tmp_path, srun=f"exit {code}", scontrol="echo not found >&2; exit 127")
    done = script(path)
    assert done.returncode == code
    assert ("To resume, submit it again with run.dir=outputs/slurm/7" in done.stderr) == advises


def test_a_job_that_is_asked_to_stop_before_it_trains_is_not_requeued_for_ever(tmp_path: Path) -> None:
    scontrol = '[ "$1" = requeue ] && echo requeued 2>&1; echo JobState=RUNNING'
    path = programs(tmp_path, srun="exit 138", scontrol=scontrol)
    assert "requeued" in script(path).stdout
    assert "requeued" not in script(path, SLURM_RESTART_COUNT="10").stdout


def test_a_task_of_an_array_has_a_directory_of_its_own(tmp_path: Path) -> None:
    path = programs(tmp_path, srun='echo "$@"')
    assert "run.dir=outputs/slurm/7 " in script(path).stdout
    assert (
        "run.dir=outputs/slurm/5_2 " in script(path, SLURM_ARRAY_JOB_ID="5", SLURM_ARRAY_TASK_ID="2").stdout
    )
