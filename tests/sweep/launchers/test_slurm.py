"""Jobs on a real Slurm cluster: that of the sbatch on PATH, whose nodes have to share this machine's files.

Its partition needs room for two workers; a cluster of one machine is enough.
"""

from __future__ import annotations

import shutil
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from launcher.errors import PreflightError
from launcher.sweep.launchers import slurm
from launcher.telemetry.event_log import read_events
from tests.configs import composed
from tests.sweep.launchers.jobs import (
    ENDLESS,
    codes,
    ended,
    environment,
    follow,
    have_saved,
    jobs_in,
    started,
)

pytest.importorskip("submitit", reason="the extra `slurm` is not installed")
if shutil.which("sbatch") is None:
    pytest.skip("there is no sbatch on PATH", allow_module_level=True)
from launcher.sweep.launchers.slurm import SlurmLauncher

SWEEP = composed().sweep
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name, value in environment().items():  # sbatch hands it on
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)


def test_a_job_that_slurm_preempts_resumes_and_another_process_follows_it(tmp_path: Path) -> None:
    jobs = jobs_in(tmp_path, 2)
    changes: list[Any] = []
    with SlurmLauncher(SWEEP) as launcher:
        for job, place in jobs:
            assert launcher.has_capacity(job)
            launcher.submit(job, place)
        follow(launcher, started(0, 1), changes)
        assert all(job.handle and len(job.devices) == 1 for job, _ in jobs)
    last = jobs[0][1] / "checkpoints" / "step-00000004"
    with SlurmLauncher(SWEEP) as launcher:  # of the process that continues the sweep
        for job, place in jobs:
            handle, job.handle = job.handle, None  # as if it was killed before it had recorded the job
            launcher.submit(job, place)
            assert job.handle == handle
        follow(launcher, lambda _: last.exists(), [])
        handle = str(jobs[0][0].handle)
        subprocess.run(["scancel", "--signal=USR1", handle], check=True, timeout=60)
        (tmp_path / "go").touch()
        changes = follow(launcher, ended(0, 1), [], 150)
    assert codes(changes) == {0: 0, 1: 0}
    assert jobs[0][0].handle != handle
    starts = [event for event in read_events(jobs[0][1] / "metrics.jsonl") if event["event"] == "start"]
    assert len(starts) == 2
    assert starts[-1]["step"] >= 4


def test_jobs_are_stopped_and_killed(tmp_path: Path) -> None:
    jobs = jobs_in(tmp_path, 2, ENDLESS, epochs=100000)
    changes: list[Any] = []
    with SlurmLauncher(SWEEP) as launcher:
        for job, place in jobs:
            launcher.submit(job, place)
        follow(launcher, lambda found: started(0, 1)(found) and have_saved(jobs), changes)
        launcher.stop(jobs[0][0])
        launcher.stop(jobs[1][0], at_once=True)
        follow(launcher, ended(0, 1), changes)
    found = codes(changes)
    assert found[0] == 75
    assert found[1] in (75, 128 + signal.SIGTERM)  # it may save within Slurm's KillWait


def test_a_slurm_that_does_not_answer_for_a_while_loses_no_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = jobs_in(tmp_path, 1)
    changes: list[Any] = []
    with SlurmLauncher(SWEEP) as launcher:
        launcher.submit(*jobs[0])
        follow(launcher, started(0), changes)
        with monkeypatch.context() as silence:
            silence.setenv("SLURM_CONF", str(tmp_path / "none"))
            silence.setattr(slurm, "TRIES", 2)  # each takes seconds
            silence.setattr(slurm, "RETRY_S", 0.1)
            with pytest.raises(
                PreflightError, match=r"sweep\.launcher=slurm: squeue fails: .*none"
            ) as caught:
                follow(launcher, ended(0), changes)
            assert f"sweep.resume={tmp_path}" in str(caught.value)
    (tmp_path / "go").touch()
    with SlurmLauncher(SWEEP) as launcher:  # of the process that continues the sweep
        launcher.submit(*jobs[0])
        assert codes(follow(launcher, ended(0), [])) == {0: 0}


def test_a_slurm_that_refuses_has_its_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SBATCH_PARTITION", "of-nobody")
    ((job, place),) = jobs_in(tmp_path, 1)
    with SlurmLauncher(SWEEP) as launcher, pytest.raises(PreflightError) as caught:
        launcher.submit(job, place)
    text = str(caught.value)
    assert "Invalid partition name specified" in text
    assert f"sweep.resume={tmp_path}" in str(caught.value)


def test_a_slurm_that_does_not_answer_has_its_words(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SLURM_CONF", str(tmp_path / "none"))
    with pytest.raises(PreflightError, match=r"sweep\.launcher=slurm: sinfo fails: "):
        SlurmLauncher(SWEEP)
