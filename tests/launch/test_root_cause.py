"""Who is to blame, what a restart can mend, how many workers there are: the decisions, without a process."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from pathlib import Path

import pytest

from launcher.config.schema import LaunchConfig
from launcher.distributed.env import LaunchEnv
from launcher.distributed.exit_records import ExitRecord
from launcher.distributed.heartbeat import HeartbeatRecord
from launcher.errors import LauncherError, PreflightError
from launcher.launch import worker_count
from launcher.launch.restart_policy import RestartPolicy
from launcher.launch.root_cause import (
    GroupResult,
    RankResult,
    RunOutcome,
    find_root_cause,
    hang_outcome,
    outcome_of,
)

LOST = (
    "RuntimeError: [third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:1"
)
KILL, SEGV, ABRT = (-getattr(signal, f"SIG{name}") for name in ("KILL", "SEGV", "ABRT"))


def result(
    rank: int,
    exit_code: int | None = None,
    error: str | None = None,
    step: int = 7,
    phase: str = "communication",
    age_s: float = 0.1,
    time_s: float = 0.0,
    is_sigstopped: bool = False,
) -> RankResult:
    """A rank with a record where `error` is given, "" for a rank that ended well."""
    lost = error == LOST
    record = None if error is None else ExitRecord(rank, time_s, error, exit_code or 0, is_secondary=lost)
    return RankResult(rank, 100 + rank, HeartbeatRecord(phase, step, age_s), exit_code, record, is_sigstopped)


def lost(rank: int, time_s: float = 0.0) -> RankResult:
    return result(rank, 1, LOST, time_s=time_s)


@pytest.mark.parametrize(
    ("results", "exit_code", "text"),
    [
        ([result(0, 0, ""), result(1, 0, "")], 0, ""),
        (
            [lost(0), result(1, KILL, phase="compute")],
            1,
            "rank 1 was killed by SIGKILL (pid 101) in compute of step 7",
        ),
        ([lost(0), result(1, 7, "no data"), lost(2)], 7, "rank 1 failed: no data"),
        ([result(0, 7, "later", time_s=2), result(1, 5, "first", time_s=1)], 5, "rank 1 failed: first"),
        ([result(0, ABRT), result(1, 7, "no data")], 7, "rank 1 failed: no data"),
        ([lost(0), result(1, SEGV), lost(2)], 1, "rank 1 was killed by SIGSEGV"),
        ([lost(0), result(1, 0)], 1, "rank 1 (pid 101) ended with exit code 0 and no error"),
        (
            [result(0, 0, ""), result(1, KILL, phase="finishing")],
            1,
            "rank 1 was killed by SIGKILL (pid 101) w",
        ),
        ([lost(0, 1), lost(1, 2)], 1, "rank 0 failed: RuntimeError"),
        ([result(0, 8, "disk full"), result(1, 8, "disk full"), result(2)], 8, "disk full"),
        ([result(0, 1, "in rank0.log", time_s=2), result(1, 1, "in rank1.log", time_s=1)], 1, "in rank1.log"),
        ([result(0, 4, "rank 0 lacks"), result(1, 4, "rank 1 lacks")], 4, "each rank lacks"),
        ([result(0, 1, "my mistake")], 1, "my mistake"),
        ([result(0, 75, "saved"), result(1, 75, "saved")], 75, "saved"),
        ([result(0, 75, "saved"), result(1, 8, "disk full")], 8, "rank 1 failed: disk full"),
        ([result(0, 75, "saved"), result(1)], 1, "rank 1 (pid 101) did not stop, in communication of step 7"),
    ],
)
def test_the_culprit_is_named(results: Sequence[RankResult], exit_code, text) -> None:
    outcome = find_root_cause(results)
    assert outcome.exit_code == exit_code
    assert outcome.text.startswith(text)


@pytest.mark.parametrize(
    ("results", "text"),
    [
        (
            [result(0, age_s=12), result(1, phase="compute", age_s=12.4)],
            "rank 1 (pid 101) hangs: in compute of step 7 for 12 s",
        ),
        (
            [result(0, age_s=12), result(1, phase="report", age_s=12, is_sigstopped=True)],
            "rank 1 (pid 101) hangs: in report of step 7 for 12 s (stopped by SIGSTOP)",
        ),
        (
            [result(0, age_s=5), result(1, age_s=4)],
            "rank 0 (pid 100) hangs: in communication of step 7 for 5 s; "
            "rank 1 (pid 101) hangs: in communication of step 7 for 4 s",
        ),
        (
            [result(0, phase="done"), result(1, 0, "", step=1)],
            "rank 0 (pid 100) hangs: after its last step for 0 s",
        ),
    ],
)
def test_those_whom_the_others_wait_for_hang(results, text) -> None:
    assert hang_outcome(results) == RunOutcome(6, text)


@pytest.mark.parametrize(
    ("of_rank_1", "crashed"),
    [
        (result(1, SEGV), True),
        (result(1, 0), True),  # without a record
        (result(1, 7, "no data"), True),
        (result(1, KILL), False),  # from outside, as at the end of the grace
        (result(1), False),
    ],
)
def test_only_a_rank_that_was_killed_or_left_over_may_have_saved_all(of_rank_1, crashed) -> None:
    assert find_root_cause([result(0, 75, "saved"), of_rank_1]).crashed == crashed


def test_a_run_was_asked_to_stop_if_one_of_its_machines_was() -> None:
    machines = [GroupResult([result(0, KILL)]), GroupResult([result(1, KILL)], stop=signal.SIGTERM)]
    assert outcome_of(machines, Path("logs")).stop == signal.SIGTERM


# Restarts


def fate_of(restarts: RestartPolicy, outcome: RunOutcome, newest_step: int) -> str:
    try:
        restarts.record_or_raise(outcome, newest_step)
    except LauncherError as error:
        return f"{type(error).__name__} {error.exit_code}"
    return "restart"


@pytest.mark.parametrize("exit_code", range(1, 11))
def test_only_what_a_restart_can_mend_is_restarted(exit_code) -> None:
    expected = "restart" if exit_code in (1, 6, 9) else f"JobFailed {exit_code}"
    assert fate_of(RestartPolicy(3), RunOutcome(exit_code, "it failed"), 0) == expected


@pytest.mark.parametrize(
    ("allowed", "before", "steps", "expected"),
    [
        (1, 0, [0, 0], ["restart", "JobFailed 1"]),
        (2, 0, [0, 0, 0], ["restart", "restart", "NoProgressError 10"]),
        (50, 0, [0, 0, 100, 100, 100, 100], [*["restart"] * 5, "NoProgressError 10"]),
        (4, 0, [1, 2, 3, 4, 5], [*["restart"] * 4, "JobFailed 1"]),
    ],
)
def test_three_attempts_without_a_new_checkpoint_end_a_run(allowed, before, steps, expected) -> None:
    restarts = RestartPolicy(allowed, before)
    assert [fate_of(restarts, RunOutcome(1, "it failed"), step) for step in steps] == expected


@pytest.mark.parametrize(
    ("restart_helps", "code", "expected"), [(False, 1, "JobFailed 1"), (True, 7, "restart")]
)
def test_an_error_may_say_whether_a_restart_helps(restart_helps, code, expected) -> None:
    """That of the recipe's code does not, a loader process that was killed does."""
    outcome = RunOutcome(code, "it failed", restart_helps=restart_helps)
    assert fate_of(RestartPolicy(3), outcome, 0) == expected


# Workers


def wish(nproc: str | int = "auto", max_restarts: int = 0) -> LaunchConfig:
    return LaunchConfig(
        nproc,
        "auto",
        "auto",
        None,
        max_restarts,
        init_timeout_s=1,
        hang_timeout_s=1,
        user_code_timeout_s=None,
        grace_s=1,
        preempt_signals="auto",
        log_level="info",
    )


@pytest.mark.parametrize(
    ("asked", "gpus", "expected"),
    [
        (wish(), 0, None),
        (wish(), 1, None),
        (wish(), 4, 4),
        (wish(max_restarts=2), 0, 1),
        (wish(max_restarts=2), 1, 1),
        (wish(1), 0, None),
        (wish(1), 2, None),
        (wish(1, max_restarts=2), 2, 1),
        (wish(3), 0, 3),
        (wish(2), 4, 2),
    ],
)
def test_the_number_of_workers(asked, gpus, expected, monkeypatch) -> None:
    monkeypatch.setattr(worker_count, "count_gpus", lambda: gpus)
    assert worker_count.num_workers(asked, LaunchEnv()) == expected


@pytest.mark.parametrize(
    ("gpus", "nproc", "expected"), [(0, "auto", 2), (0, 1, None), (1, "auto", None), (2, "auto", 2)]
)
def test_the_script_asks_for_two_workers_where_there_is_no_gpu(monkeypatch, gpus, nproc, expected) -> None:
    monkeypatch.setenv(worker_count.CPU_WORKERS, "2")
    monkeypatch.setattr(worker_count, "count_gpus", lambda: gpus)
    assert worker_count.num_workers(wish(nproc), LaunchEnv()) == expected


def test_more_workers_than_gpus_are_refused(monkeypatch) -> None:
    monkeypatch.setattr(worker_count, "count_gpus", lambda: 2)
    with pytest.raises(PreflightError, match=r"launch\.nproc=3 asks for more workers than the 2 GPU"):
        worker_count.num_workers(wish(3), LaunchEnv())


def test_who_is_launched_by_another_starts_nobody() -> None:
    launch = LaunchEnv(rank=0, world_size=4, local_world_size=2, has_external_launcher=True)
    for nproc in ("auto", 2, 3):
        assert worker_count.num_workers(wish(nproc, max_restarts=3), launch) is None
