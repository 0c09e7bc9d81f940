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
from launcher.sweep.carriers import NoAnswerError
from launcher.telemetry.event_log import read_events
from tests.configs import composed
from tests.sweep.carriers.jobs import ENDLESS, codes, ended, environment, follow, have_saved, jobs_in, started

pytest.importorskip("submitit", reason="the extra `slurm` is not installed")
if shutil.which("sbatch") is None:
    pytest.skip("there is no sbatch on PATH", allow_module_level=True)
from launcher.sweep.carriers.slurm import SlurmCarrier

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
    with SlurmCarrier(SWEEP) as carrier:
        for job, place in jobs:
            assert carrier.has_room(job)
            carrier.submit(job, place)
        follow(carrier, started(0, 1), changes)
        assert all(job.handle and len(job.devices) == 1 for job, _ in jobs)
    last = jobs[0][1] / "checkpoints" / "step-00000004"
    with SlurmCarrier(SWEEP) as carrier:  # of the process that continues the sweep
        for job, place in jobs:
            handle, job.handle = job.handle, None  # as if it was killed before it had recorded the job
            carrier.submit(job, place)
            assert job.handle == handle
        follow(carrier, lambda _: last.exists(), [])
        handle = str(jobs[0][0].handle)
        subprocess.run(["scancel", "--signal=USR1", handle], check=True, timeout=60)
        (tmp_path / "go").touch()
        changes = follow(carrier, ended(0, 1), [], 150)
    assert codes(changes) == {0: 0, 1: 0}
    assert jobs[0][0].handle != handle
    starts = [event for event in read_events(jobs[0][1] / "metrics.jsonl") if event["event"] == "start"]
    assert len(starts) == 2
    assert starts[-1]["step"] >= 4


def test_jobs_are_stopped_and_killed(tmp_path: Path) -> None:
    jobs = jobs_in(tmp_path, 2, ENDLESS, epochs=100000)
    changes: list[Any] = []
    with SlurmCarrier(SWEEP) as carrier:
        for job, place in jobs:
            carrier.submit(job, place)
        follow(carrier, lambda found: started(0, 1)(found) and have_saved(jobs), changes)
        carrier.stop(jobs[0][0])
        carrier.stop(jobs[1][0], at_once=True)
        follow(carrier, ended(0, 1), changes)
    found = codes(changes)
    assert found[0] == 75
    assert found[1] in (75, 128 + signal.SIGTERM)  # it may save within Slurm's KillWait


def test_a_slurm_that_does_not_answer_for_a_while_loses_no_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = jobs_in(tmp_path, 3, ENDLESS, epochs=100000)
    changes: list[Any] = []
    with SlurmCarrier(SWEEP) as carrier:
        for job, place in jobs[:2]:
            carrier.submit(job, place)
        follow(carrier, lambda found: started(0, 1)(found) and have_saved(jobs[:2]), changes)
        with monkeypatch.context() as silence:
            silence.setenv("SLURM_CONF", str(tmp_path / "none"))
            carrier.submit(*jobs[2])
            carrier.stop(jobs[0][0])
            with pytest.raises(NoAnswerError, match=r"sweep\.launcher=slurm: squeue fails: .*none"):
                follow(carrier, ended(0), changes)
        follow(carrier, lambda found: ended(0)(found) and started(2)(found), changes)
        for job, _ in jobs[1:]:
            carrier.stop(job)
        follow(carrier, ended(0, 1, 2), changes)
    assert [codes(changes)[number] for number in (0, 1)] == [75, 75]


def test_a_slurm_that_refuses_has_its_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SBATCH_PARTITION", "of-nobody")
    ((job, place),) = jobs_in(tmp_path, 1)
    with SlurmCarrier(SWEEP) as carrier, pytest.raises(PreflightError) as caught:
        carrier.submit(job, place)
    text = str(caught.value)
    assert "Invalid partition name specified" in text
    assert f"sweep.resume={tmp_path}" in str(caught.value)


def test_a_slurm_that_does_not_answer_has_its_words(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SLURM_CONF", str(tmp_path / "none"))
    with pytest.raises(PreflightError, match=r"sweep\.launcher=slurm: sinfo fails: "):
        SlurmCarrier(SWEEP)
