"""What a parent takes for the newest checkpoint of its run, and how it says that the run can be resumed."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from launcher.distributed.heartbeat import Heartbeats
from launcher.launch.agent import Agent
from launcher.launch.multi_node import SingleNode
from launcher.launch.root_cause import RunOutcome
from launcher.launch.worker_process import WorkerSpec
from launcher.os.signals import StopSignal
from launcher.run_dir.discarding import record_discarded
from tests.configs import composed


def agent_of(run_dir: Path, resume: str) -> Agent:
    config = composed()
    config = replace(
        config,
        run=replace(config.run, dir=str(run_dir)),
        checkpoint=replace(config.checkpoint, resume=resume),
    )
    work = WorkerSpec(config, Heartbeats(1), os.getpid(), (), -1)
    return Agent(work, 1, StopSignal(), SingleNode())


@pytest.mark.parametrize(
    ("resume", "before", "after"),
    [("auto", 1000, 1000), ("never", 0, 200), ("checkpoints/step-00000100", 100, 200)],
)
def test_checkpoints_that_a_run_sets_aside_are_not_its_progress(tmp_path, resume, before, after) -> None:
    """The first checkpoint of a run that began anew counted as none: three crashes later it was given up."""
    checkpoints = tmp_path / "checkpoints"
    for step in (100, 1000):
        (checkpoints / f"step-{step:08}").mkdir(parents=True)
    agent = agent_of(tmp_path, resume if resume in ("auto", "never") else str(tmp_path / resume))
    assert agent._restarts.newest_step == agent._newest_step() == before
    if resume != "auto":
        (checkpoints / "step-00001000").rename(checkpoints / "replaced-step-00001000")
        record_discarded(tmp_path)
        (checkpoints / "step-00000200").mkdir()
    assert agent._newest_step() == after


@pytest.mark.parametrize(("resume", "also"), [("auto", ""), ("never", " checkpoint.resume=auto")])
def test_a_run_that_began_anew_is_resumed_without_beginning_anew_again(tmp_path, resume, also) -> None:
    agent = agent_of(tmp_path, resume)
    if resume == "never":
        record_discarded(tmp_path)
    again = f"the same command with run.dir={tmp_path}{also}."
    assert agent._how_to_resume(7) == f"To resume from step 7: {again}"


@pytest.mark.parametrize(("crashed", "exit_code"), [(False, 75), (True, 143)])
def test_a_run_that_fails_while_it_stops_is_not_taken_for_saved(tmp_path, crashed, exit_code) -> None:
    agent = agent_of(tmp_path, "auto")
    outcome = RunOutcome(7, "rank 0 failed: no data", crashed=crashed, stop=signal.SIGTERM)
    error = agent._stop_error(outcome, newest=7)
    assert error.exit_code == exit_code
    assert ("rank 0 failed: no data" in str(error)) == crashed
