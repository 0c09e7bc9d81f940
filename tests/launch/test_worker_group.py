"""When an attempt of workers counts as hanging: real processes, heartbeats written by hand."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from launcher.distributed.exit_records import ExitRecord
from launcher.distributed.heartbeat import Heartbeats
from launcher.launch import worker_group
from launcher.launch.root_cause import RunOutcome, outcome_of
from launcher.launch.worker_group import WorkerGroup
from launcher.launch.worker_process import WorkerSpec
from tests.configs import composed

INIT_S, HANG_TIMEOUT_S = 100.0, 200.0


class Clock:
    """The machine's clock, which a test can put forward: a sleep on a busy machine may exceed a limit."""

    def __init__(self) -> None:
        self.ahead_s = 0.0
        self._read = time.monotonic

    def __call__(self) -> float:
        return self._read() + self.ahead_s


@pytest.fixture
def clock(monkeypatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(time, "monotonic", clock)
    monkeypatch.setattr(worker_group, "PAUSE_S", float("inf"))  # the parent was not stopped meanwhile
    return clock


@pytest.fixture
def table() -> Heartbeats:
    return Heartbeats(2)


@pytest.fixture
def group(table, tmp_path: Path) -> Iterator[WorkerGroup]:
    config = composed()
    limits = replace(config.launch, init_timeout_s=INIT_S, hang_timeout_s=HANG_TIMEOUT_S)
    config = replace(config, launch=limits, run=replace(config.run, dir=str(tmp_path)))
    work = WorkerSpec(config, table, 0, (), -1)
    processes = [multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,)) for _ in range(2)]
    for process in processes:
        process.start()
    group = WorkerGroup(processes, work)
    yield group
    group.kill()


def verdict_on(group: WorkerGroup) -> RunOutcome | None:
    report = group.poll()
    return None if report is None else outcome_of([report], group.stacks)


def until_there(path: Path) -> None:
    while not path.exists():
        time.sleep(0.01)


def beat(table: Heartbeats, phase: str, step: int, has_stepped: bool = False) -> None:
    for rank in range(2):
        heartbeat = table.of(rank)
        if has_stepped:
            heartbeat.first_step_done()
        heartbeat.beat(phase, step)


def test_ranks_that_all_read_data_are_not_taken_for_ranks_before_their_first_step(
    group, table, clock
) -> None:
    """A run longer than launch.init_timeout_s was ended at the first poll at which all ranks read data."""
    beat(table, "data", 9, has_stepped=True)
    assert group.poll() is None
    clock.ahead_s += INIT_S
    assert group.poll() is None
    beat(table, "data", 10)
    clock.ahead_s += INIT_S
    assert group.poll() is None


@pytest.mark.parametrize(("phase", "step"), [("data", 10), ("compute", 10), ("evaluation", 0)])
def test_after_the_first_step_a_phase_may_take_hang_timeout_s(phase, step, group, table, clock) -> None:
    beat(table, phase, step, has_stepped=phase != "evaluation")
    clock.ahead_s += INIT_S + 1
    assert group.poll() is None
    clock.ahead_s += HANG_TIMEOUT_S - INIT_S
    outcome = verdict_on(group)
    assert outcome is not None
    assert outcome.exit_code == 6
    assert "rank 0 (pid" in outcome.text
    assert "hangs" in outcome.text


@pytest.mark.parametrize("phase", ["loading data", "compute"])
def test_before_the_first_step_all_phases_together_may_take_init_timeout_s(
    phase, group, table, clock
) -> None:
    beat(table, "loading data", 0)
    assert group.poll() is None
    clock.ahead_s += INIT_S
    beat(table, phase, 10)  # of a resumed run, a moment ago
    outcome = verdict_on(group)
    assert outcome is not None
    assert outcome.exit_code == 6


def test_while_a_rank_runs_code_of_the_user_none_hangs_and_then_the_time_starts_again(
    group, table, clock
) -> None:
    beat(table, "evaluation", 8, has_stepped=True)
    rank0 = table.of(0)
    rank0.first_step_done()
    rank0.beat("evaluation", 8)
    with rank0.in_user_code():
        for _ in range(5):
            clock.ahead_s += HANG_TIMEOUT_S
            assert group.poll() is None
    rank0.beat("data", 9)
    assert group.poll() is None, "rank 1 has waited for long, and not for nothing"
    clock.ahead_s += HANG_TIMEOUT_S
    outcome = verdict_on(group)
    assert outcome is not None
    assert outcome.text.startswith("rank 1 (pid")


def test_a_rank_that_is_stopped_in_code_of_the_user_hangs(group, table, clock) -> None:
    beat(table, "loading data", 0)
    with table.of(1).in_user_code():
        os.kill(group._processes[1].pid, signal.SIGSTOP)
        while not worker_group.is_stopped(group._processes[1].pid):
            time.sleep(0.01)
        clock.ahead_s += max(INIT_S, HANG_TIMEOUT_S)
        outcome = verdict_on(group)
    assert outcome is not None
    assert "(stopped by SIGSTOP)" in outcome.text


def test_ranks_that_end_just_as_they_count_as_hanging_have_ended(group) -> None:
    """None was left to name as the one that hangs, and the parent ended with a traceback."""
    group.kill()
    assert group._hanging() is None
    outcome = verdict_on(group)
    assert outcome is not None
    assert outcome.text.startswith("rank 0 was killed by SIGKILL")


def test_rank_0_may_finish_its_tracker_once_another_rank_was_killed(table, tmp_path: Path) -> None:
    """It was killed at once: no row of the last seconds and no exit code."""
    config = composed("tracker=wandb")
    work = WorkerSpec(replace(config, run=replace(config.run, dir=str(tmp_path))), table, 0, (), -1)
    beat(table, "compute", 3, has_stepped=True)
    forking = multiprocessing.get_context("fork")
    finished = tmp_path / "finished"
    ranks = [forking.Process(target=until_there, args=(tmp_path / name,)) for name in ("finished", "never")]
    for process in ranks:
        process.start()
    group = WorkerGroup(ranks, work)
    assert group.poll() is None
    ranks[1].kill()
    ranks[1].join()
    assert verdict_on(group) is None
    finished.touch()
    ranks[0].join()
    table.exit_records.write(ExitRecord(0, 0.0, "Connection closed by peer", 1, is_secondary=True))
    assert ranks[0].exitcode == 0
    outcome = verdict_on(group)
    assert outcome is not None
    assert outcome.text.startswith("rank 1 was killed by SIGKILL")
