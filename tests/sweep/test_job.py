"""A job of a sweep as a file, from which any process can start it."""

from __future__ import annotations

import dataclasses
import json
import signal
import subprocess
import time
from pathlib import Path

import pytest

from launcher.config.schema import Config
from launcher.errors import ConfigError
from launcher.run_dir.lock import locked
from launcher.sweep.launchers import command_of
from launcher.sweep.launchers.slurm import Submitted
from launcher.sweep.prepare import refuse_another_sweep
from launcher.sweep.state import JobState, SweepJob, SweepState, read_job, record_job, write_job
from tests.configs import composed
from tests.limits import at_most
from tests.sweep.launchers.jobs import ENDLESS, environment, have_saved, jobs_in

WORDS = ("optim.lr=0.1", "data=synthetic")


def placed(config: Config, directory: Path) -> Config:
    return dataclasses.replace(config, run=dataclasses.replace(config.run, dir=str(directory)))


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize(
    "words",
    [
        WORDS,
        ("recipe=bert",),
        ("recipe=gpt", "optim=adamw", "optim.groups=[{match: '*.bias', lr_scale: 2}]"),
        ("precision=bf16", "precision.loss_scale.init_scale=8"),
        ("tracker.notes='a ${oc.env:NO_SUCH_VARIABLE,b} c'",),
    ],
)
def test_a_job_is_read_as_it_was_written(tmp_path, words) -> None:
    config = placed(composed(*words), tmp_path)
    write_job(config, words)
    assert read_job(tmp_path) == (config, words)


def test_a_folder_without_a_job_is_refused_in_words(tmp_path) -> None:
    for folder in (tmp_path / "none", tmp_path):
        with pytest.raises(ConfigError, match=r"holds no job\.json.*Give the folder of a job of a sweep"):
            read_job(folder)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"config": 1, "overrides": []}'])
def test_a_file_without_a_job_is_refused(tmp_path, text) -> None:
    (tmp_path / "job.json").write_text(text)
    with pytest.raises(ConfigError, match=r"holds no job\.json that this version can read"):
        read_job(tmp_path)


def test_a_key_of_another_version_is_refused(tmp_path) -> None:
    write_job(placed(composed(*WORDS), tmp_path), WORDS)
    record = json.loads((tmp_path / "job.json").read_text())
    del record["config"]["seed"]
    (tmp_path / "job.json").write_text(json.dumps(record))
    with pytest.raises(ConfigError, match="seed"):
        read_job(tmp_path)


def test_a_sweep_continues_with_the_overrides_that_change_a_result(tmp_path) -> None:
    record = SweepState([], ("recipe=cnn", "seed=0,1", "tracker=none"))
    refuse_another_sweep(record, tmp_path, ("recipe=cnn", "seed=0,1", "tracker=wandb", "launch.nproc=2"))
    with pytest.raises(ConfigError, match=r"seed=0,1 is there and not here; optim\.lr=1 is here"):
        refuse_another_sweep(record, tmp_path, ("recipe=cnn", "optim.lr=1"))
    same = ("recipe=cnn", "seed=0,1", "sweep.parallel=2")
    with pytest.raises(ConfigError, match=r"sweep=random is here and not there"):
        refuse_another_sweep(record, tmp_path, (*same, "sweep=random"))


def test_a_job_that_is_run_by_itself_is_recorded_in_the_sweep_unless_that_runs(tmp_path) -> None:
    jobs = [SweepJob(0, "0_a", (), state=JobState.PRUNED, metric=0.5), SweepJob(1, "1_b", ())]
    SweepState(jobs, ()).write(tmp_path)
    (tmp_path / "0_a").mkdir()
    result = {"state": "done", "exit": 0, "metric_name": "accuracy", "metric": 0.75}
    (tmp_path / "0_a" / "result.json").write_text(json.dumps(result))
    with locked(tmp_path):
        record_job(tmp_path / "0_a")
        assert SweepState.read(tmp_path).jobs[0].state == "pruned", "the process of the sweep records it"
    record_job(tmp_path / "0_a")
    first, second = SweepState.read(tmp_path).jobs
    assert (first.state, first.exit, first.metric) == ("done", 0, 0.75)
    assert second.state == "waiting"
    record_job(tmp_path / "elsewhere" / "0_a")


def test_jobs_of_sweeps_with_one_name_have_different_names_in_a_queue(tmp_path) -> None:
    place = tmp_path / "sweep" / "0_a"
    one, other = (Submitted(SweepJob(0, "0_a", ()), place) for _ in range(2))
    assert one.name != other.name
    SweepState([one.job], ()).write(tmp_path)
    (again,) = SweepState.read(tmp_path).jobs
    assert Submitted(again, place).name == one.name, "also for a process that continues the sweep"


@pytest.mark.slow
def test_a_job_that_is_stopped_by_hand_says_how_to_resume_it(tmp_path) -> None:
    (of_job,) = jobs_in(tmp_path, 1, ENDLESS, epochs=100_000)
    command = command_of(of_job[1])
    with subprocess.Popen(
        command, stderr=subprocess.PIPE, text=True, cwd=tmp_path, env=environment()
    ) as process:
        until = time.monotonic() + at_most(60)
        while not have_saved([of_job]) and time.monotonic() < until:
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=at_most(60))
    assert process.returncode == 75
    assert said.strip().endswith("checkpoint saved. To resume: the same command.")
