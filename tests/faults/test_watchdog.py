"""Ranks that wait in C for one that stalls, fails or dies: each leaves in time, and the run names the one."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.faults import launching
from tests.faults.deaf import make_deaf
from tests.faults.launching import Ended, Started, UserCode, run
from tests.faults.parent import write_recipe
from tests.faults.test_stopping import go_on, step_reached, torchrun
from tests.faults.usercode import is_here, kill, own_rank, slowly
from tests.limits import at_most

pytestmark = pytest.mark.timeout(90)
STALL_S = 1
ENDLESS = ("train.epochs=1000", "checkpoint.every_steps=null")


def at_step_9(network: Any, batch: Any, rank: int, act: Any) -> None:
    if own_rank() == rank and is_here(network, 8):
        act()


def sleep() -> None:
    time.sleep(3600)


def fail() -> None:
    raise ValueError("a sample is broken")


def disturbed(directory: Path, code: UserCode, *words: str, ranks: int = 2) -> Ended:
    return run(directory, *ENDLESS, *words, ranks=ranks, user_code=code, prepare=make_deaf)


def seconds_to_end(ended: Ended) -> float:
    """From the last step that was logged to the verdict."""
    return float(ended.status["updated"] - ended.events("step")[-1]["time"])


@pytest.mark.parametrize(("rank", "ranks"), [(1, 2), pytest.param(0, 3, marks=pytest.mark.slow)])
def test_a_rank_that_stalls_is_named_by_those_that_wait(tmp_path: Path, rank: int, ranks: int) -> None:
    code = partial(at_step_9, rank=rank, act=sleep)
    ended = disturbed(tmp_path / "run", code, f"launch.stall_s={STALL_S}", ranks=ranks)
    assert ended.codes == [6] * ranks, ended
    assert seconds_to_end(ended) < at_most(STALL_S + 10)
    assert (ended.result["state"], ended.result["exit"]) == ("failed", 6)
    assert (ended.status["state"], ended.status["exit"]) == ("failed", 6)
    assert f"rank {rank} hangs: in compute of step 9" in ended.result["error"]
    assert ended.result["error"] in ended.outputs[0]
    for each in range(ranks):
        stacks = (tmp_path / "run" / "logs" / f"stacks-rank{each}.txt").read_text()
        assert ("usercode" in stacks or "in sleep" in stacks) == (each == rank)


def test_a_rank_that_fails_ends_those_that_wait_for_it(tmp_path: Path) -> None:
    ended = disturbed(tmp_path / "run", partial(at_step_9, rank=1, act=fail))
    assert ended.codes[0] == 1
    assert seconds_to_end(ended) < at_most(10)
    assert ended.result["exit"] == 1
    assert ended.result["error"].startswith("rank 1 failed: ")
    assert "a sample is broken" in ended.result["error"]


@pytest.mark.slow
def test_where_rank_0_fails_the_others_leave_too(tmp_path: Path) -> None:
    ended = disturbed(tmp_path / "run", partial(at_step_9, rank=0, act=fail), ranks=3)
    assert ended.codes == [1, 1, 1]
    assert seconds_to_end(ended) < at_most(10)
    assert "a sample is broken" in ended.result["error"]


@pytest.mark.slow
def test_a_rank_that_is_killed_is_named_once_torchrun_ends_the_others(tmp_path: Path) -> None:
    ended = disturbed(tmp_path / "run", kill(8, rank=1))
    assert ended.codes == [1, -signal.SIGKILL]
    assert seconds_to_end(ended) < at_most(13)
    assert ended.result["error"].startswith("rank 1 has died or does not answer")


def late(network: Any, batch: Any) -> None:
    slowly(network, batch)
    if own_rank() == 1 and is_here(network, 8):
        time.sleep(8)  # longer than a rank that was asked to stop may be deaf


@pytest.mark.slow
def test_who_is_asked_to_stop_while_it_waits_for_a_slow_rank_is_saved(tmp_path: Path, undisturbed) -> None:
    with Started(tmp_path / "run", (), ranks=2, user_code=late, prepare=make_deaf) as started:
        started.until(lambda: step_reached(tmp_path / "run", 7))
        time.sleep(1)
        started.signal(signal.SIGTERM)
        ended = started.end()
    assert ended.codes == [75, 75], ended
    go_on(ended, undisturbed(ranks=2), 2)


@pytest.mark.slow
def test_who_is_asked_to_stop_while_another_rank_hangs_says_for_whom_it_waited(tmp_path: Path) -> None:
    code = partial(at_step_9, rank=1, act=sleep)
    words = (*ENDLESS, "launch.grace_s=8")
    with Started(tmp_path / "run", words, ranks=2, user_code=code, prepare=make_deaf) as started:
        started.until(lambda: step_reached(tmp_path / "run", 7))
        started.signal(signal.SIGTERM)
        ended = started.end()
    assert ended.codes == [143, 143], ended
    assert "stopped by SIGTERM before a checkpoint could be written: rank 1 hangs" in ended.result["error"]


@pytest.mark.slow
def test_a_long_phase_of_all_ranks_is_no_stall(tmp_path: Path) -> None:
    """Before the first step ranks may load and build for as long as they like, as long as none waits."""
    words = ("train.max_steps=3", "launch.init_timeout_s=1")
    ended = run(tmp_path / "run", *words, ranks=2, user_code=slow_to_load, prepare=make_deaf)
    assert ended.codes == [0, 0], ended


def slow_to_load(network: Any, batch: Any) -> None:
    if network is None:
        time.sleep(5)


# Under torchrun


def disturb(rank: int, act: Any) -> None:
    """In a worker: wait in C from here on, and let one rank act in its ninth step."""
    make_deaf()
    launching.USER_CODE = partial(at_step_9, rank=rank, act=act)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "rank", "act", "code", "named"),
    [
        (2, 1, "sleep", 6, "rank 1 hangs: in compute of step 9"),
        (3, 0, "sleep", 6, "rank 0 hangs: in compute of step 9"),
        (3, 1, "fail", 1, "a sample is broken"),
        (2, 0, "fail", 1, "a sample is broken"),
        (3, 1, "die", 1, "rank 1 has died or does not answer"),
        (2, 0, "die", 1, "rank 0 has died or does not answer"),
    ],
)
def test_under_torchrun(tmp_path: Path, ranks, rank, act, code, named) -> None:
    started = f"from tests.faults import test_watchdog as t; t.disturb({rank}, t.{act})"
    words = (*ENDLESS, f"run.dir={tmp_path / 'run'}", f"launch.stall_s={4 if act == 'sleep' else 300}")
    with torchrun(tmp_path, *words, ranks=ranks, started=started) as process:
        output = process.communicate(timeout=60)[0]
    ended = Ended(tmp_path / "run", [process.returncode], [output], 0.0)
    assert (ended.result["state"], ended.result["exit"]) == ("failed", code), output
    assert named in ended.result["error"]
    assert "error: " in output
    assert named in " ".join(output.split())
    assert seconds_to_end(ended) < at_most(14)


def host(directory: Path, number: int, port: int) -> subprocess.Popen[str]:
    """The torchrun of one of two machines, here both on this one, with one rank each."""
    rendezvous = ["--nnodes=2", f"--node-rank={number}", "--master-addr=127.0.0.1", f"--master-port={port}"]
    words = ["recipe=resnet18", "recipe.uses=tiny", "recipes.path=tiny.py", "tracker=none", "run.dir=run"]
    words += ["train.epochs=100000", f"launch.stall_s={STALL_S}", "data.batch_size=8"]
    command = [sys.executable, "-m", "torch.distributed.run", *rendezvous, "-m", "launcher", *words]
    environ = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])}
    with open(directory / f"host{number}.txt", "w") as out:
        return subprocess.Popen(command, cwd=directory, env=environ, stdout=out, stderr=out, text=True)


@pytest.mark.slow
def test_a_frozen_host_of_the_store_does_not_hold_the_others(tmp_path: Path) -> None:
    """It keeps its connections and never answers: no call of the store's client fails, none returns."""
    write_recipe(tmp_path, in_step="__import__('time').sleep(0.02)")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    hosts = [host(tmp_path, number, port) for number in (0, 1)]
    frozen = [hosts[0].pid]
    try:
        events = tmp_path / "run" / "metrics.jsonl"
        assert within(60, lambda: events.is_file() and '"step": 20' in events.read_text())
        children = Path(f"/proc/{hosts[0].pid}/task/{hosts[0].pid}/children").read_text()
        frozen += [int(pid) for pid in children.split()]
        for pid in frozen:
            os.kill(pid, signal.SIGSTOP)
        hosts[1].wait(STALL_S + 25)  # the rank leaves within STALL_S + 10, its torchrun after it
        assert hosts[1].returncode == 1
        result = json.loads((tmp_path / "run" / "result.json").read_text())
        assert (result["exit"], "does not answer" in result["error"]) == (6, True)
        status = json.loads((tmp_path / "run" / "status.json").read_text())
        last = [json.loads(line)["time"] for line in events.read_text().splitlines()][-1]
        assert status["updated"] - last < STALL_S + 10
    finally:
        for pid in frozen:
            os.kill(pid, signal.SIGCONT)
        for process in hosts:
            process.terminate()
            process.wait(60)


def within(seconds: float, holds: Callable[[], bool]) -> bool:
    end = time.monotonic() + seconds
    while not holds() and time.monotonic() < end:
        time.sleep(0.1)
    return holds()
