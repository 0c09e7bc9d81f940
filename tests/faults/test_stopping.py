"""Whoever is asked to stop, all ranks stop after the same step, saved, and the run ends as if it had not."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest

from launcher.telemetry.event_log import read_events
from tests.faults.launching import EPOCH, RECIPE, WORDS, Ended, Started, run
from tests.faults.parent import is_alive
from tests.faults.usercode import send_signal, slowly
from tests.limits import at_most

pytestmark = pytest.mark.timeout(90)


def step_reached(directory: Path, step: int) -> bool:
    file = directory / "metrics.jsonl"
    return file.exists() and any(e["event"] == "step" and e["step"] >= step for e in read_events(file))


def assert_stopped(ended: Ended, ranks: int) -> int:
    """All ranks after one step, of which there is a checkpoint; returns it."""
    assert ended.codes == [75] * ranks, ended
    status, result = ended.status, ended.result
    step = int(status["step"])
    assert (status["state"], status["exit"]) == (result["state"], result["exit"]) == ("stopped", 75)
    for rank in range(ranks):
        assert ended.log(rank).count(f"rank {rank}: after step {step}, on request; checkpoint saved") == 1
    assert max(ended.checkpoints) == step
    assert f"stopped: after step {step}, on request" in ended.outputs[0]
    assert f"run.dir={ended.directory}" in ended.outputs[0]
    assert "launcher/worker.py" not in "".join(ended.outputs), "a traceback of ours"
    return step


def go_on(ended: Ended, whole: Ended, ranks: int, *words: str) -> None:
    last = run(ended.directory, *words, ranks=ranks)
    assert last.digest == whole.digest
    assert last.warnings == []


def test_sigterm_to_one_of_three_stops_all_after_the_same_step(tmp_path: Path, undisturbed) -> None:
    with Started(tmp_path / "run", ranks=3, user_code=slowly) as started:
        started.until(lambda: step_reached(tmp_path / "run", 6))
        started.signal(signal.SIGTERM, 1)
        ended = started.end()
    assert 6 <= assert_stopped(ended, 3) <= 3 * EPOCH - 1
    go_on(ended, undisturbed(ranks=3), 3)


@pytest.mark.slow
def test_sigint_stops_a_process_on_its_own(tmp_path: Path, undisturbed) -> None:
    with Started(tmp_path / "run", user_code=slowly) as started:
        started.until(lambda: step_reached(tmp_path / "run", 6))
        started.signal(signal.SIGINT)
        ended = started.end()
    assert assert_stopped(ended, 1) >= 6
    go_on(ended, undisturbed(), 1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "passes", "training", "step"),
    [
        (signal.SIGTERM, 0, False, 1),  # when the evaluation is rehearsed: while data load, it ends at once
        (signal.SIGINT, 0, False, 1),
        (signal.SIGTERM, EPOCH, False, EPOCH),  # it is broken off, and made up on the way on
    ],
    ids=["before the first step", "Ctrl-C before it", "in an evaluation"],
)
def test_at_any_time(tmp_path: Path, undisturbed, number, passes, training, step) -> None:
    code = partial(send_signal, number=number, passes=passes, training=training, rank=0)
    words = ("recipe.uses=noisy_indexed", "data.num_workers=0")  # whose evaluation has several batches
    ended = run(tmp_path / "run", *words, user_code=code)
    assert assert_stopped(ended, 1) == step
    go_on(ended, undisturbed(*words), 1, *words)


def slow_disk() -> None:
    synced = os.fsync

    def fsync(descriptor: int) -> None:
        if "checkpoints" in os.readlink(f"/proc/self/fd/{descriptor}"):
            time.sleep(0.2)  # a save takes about a second
        synced(descriptor)

    os.fsync = fsync


@pytest.mark.slow
def test_in_a_save_and_twice(tmp_path: Path, undisturbed) -> None:
    """The save under way is finished first, and that of the stop follows it."""
    with Started(tmp_path / "run", ranks=2, user_code=slowly, prepare=slow_disk) as started:
        checkpoints = tmp_path / "run" / "checkpoints"
        started.until(lambda: list(checkpoints.glob(".unfinished-step-00000005-*")))
        started.signal(signal.SIGTERM)
        time.sleep(0.05)
        started.signal(signal.SIGTERM)
        assert not list(checkpoints.glob("step-*"))
        ended = started.end()
    stopped = assert_stopped(ended, 2)
    assert 6 <= stopped < 3 * EPOCH
    assert {5, stopped} <= ended.checkpoints.keys()
    assert not list(checkpoints.glob(".*"))
    go_on(ended, undisturbed(ranks=2), 2)


def test_sigusr1_saves_and_the_run_goes_on(tmp_path: Path, undisturbed) -> None:
    words = ("checkpoint.every_steps=null",)
    code = partial(send_signal, number=signal.SIGUSR1, passes=4, rank=1)
    ended = run(tmp_path / "run", *words, ranks=2, user_code=code)
    best = {event["step"] for event in ended.events("eval")}
    assert set(ended.checkpoints) - best == {6}
    assert ended.digest == undisturbed(ranks=2).digest


def test_saved_by_the_clock(tmp_path: Path, undisturbed) -> None:
    """Of rank 0, which tells the others."""
    words = ("checkpoint.every_steps=null", "checkpoint.every_s=0.2")
    ended = run(tmp_path / "run", *words, ranks=2, user_code=slowly)
    by_clock = ended.checkpoints.keys() - {event["step"] for event in ended.events("eval")}
    assert 2 <= len(by_clock) <= ended.seconds / 0.2
    assert ended.digest == undisturbed(ranks=2).digest


# Under torchrun

SLOW = f"""
import runpy, time
from tests.faults import launching
from tests.faults.usercode import slowly
from launcher.recipe import recipe

launching.USER_CODE = slowly
made = runpy.run_path({str(RECIPE)!r})["noisy"]

@recipe("noisy")
def noisy(config):
    STARTED
    return made(config)
"""


def torchrun(directory: Path, *words: str, ranks: int = 2, started: str = "pass") -> subprocess.Popen[str]:
    (directory / "slow.py").write_text(SLOW.replace("STARTED", started))
    environ = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])}
    started = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", "-m", "launcher"]
    return subprocess.Popen(
        [sys.executable, *started, *WORDS, f"recipes.path={directory / 'slow.py'}", *words],
        cwd=directory,
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def wait_for_step(process: subprocess.Popen[str], run_dir: Path, step: int) -> None:
    deadline = time.monotonic() + 40
    while not step_reached(run_dir, step):
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.01)


def children_of(pid: int) -> list[int]:
    """Of its main thread."""
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def workers_of(process: subprocess.Popen[str]) -> list[int]:
    return children_of(process.pid)


@pytest.mark.slow
def test_sigterm_to_torchrun_stops_all_its_workers(tmp_path: Path, undisturbed) -> None:
    run_dir = tmp_path / "run"
    process = torchrun(tmp_path, f"run.dir={run_dir}")
    try:
        wait_for_step(process, run_dir, 6)
        workers = workers_of(process)
        process.send_signal(signal.SIGTERM)
        output = process.communicate(timeout=25)[0]
    finally:
        process.kill()
    assert process.returncode != 0
    assert len(workers) == 2
    assert not [pid for pid in workers if Path(f"/proc/{pid}").exists()]
    assert_stopped(Ended(run_dir, [75, 75], [output, ""], 0.0), 2)
    go_on(Ended(run_dir, [75, 75], [], 0.0), undisturbed(ranks=2), 2)


@pytest.mark.slow
def test_workers_and_their_loader_processes_die_with_torchrun(tmp_path: Path) -> None:
    words = ("recipe.uses=noisy_indexed", f"recipes.path={RECIPE}", "data.num_workers=1", "train.epochs=1000")
    process = torchrun(tmp_path, *words, f"run.dir={tmp_path / 'run'}")
    try:
        wait_for_step(process, tmp_path / "run", 3)
        workers = workers_of(process)
        loaders = [loader for worker in workers for loader in children_of(worker)]
        assert len(workers) == 2
        assert len(loaders) >= 2, "no loader processes"
    finally:
        process.kill()
    killed = time.monotonic()
    while alive := [pid for pid in workers + loaders if is_alive(pid)]:
        assert time.monotonic() - killed < at_most(2), f"{alive} of workers {workers} and loaders {loaders}"
        time.sleep(0.01)
    process.communicate()


@pytest.mark.slow
def test_a_worker_that_is_killed_takes_the_others_with_it(tmp_path: Path, undisturbed) -> None:
    run_dir = tmp_path / "run"
    process = torchrun(tmp_path, f"run.dir={run_dir}")
    try:
        wait_for_step(process, run_dir, 8)
        workers = workers_of(process)
        os.kill(workers[1], signal.SIGKILL)
        began = time.monotonic()
        output = process.communicate(timeout=25)[0]
        seconds = time.monotonic() - began
    finally:
        process.kill()
    assert process.returncode == 1, output
    assert seconds < at_most(10), "the others waited for the dead rank"
    assert not [pid for pid in workers if Path(f"/proc/{pid}").exists()]
    go_on(Ended(run_dir, [1], [], 0.0), undisturbed(ranks=2), 2)


@pytest.mark.parametrize("hanging", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_without_a_parent_ranks_that_wait_for_one_that_hangs_say_so_and_end(
    tmp_path: Path, hanging: int
) -> None:
    """And the files say so, also where it is rank 0 that hangs, which writes them otherwise."""
    waiting = 1 - hanging
    words = ("launch.hang_timeout_s=2", "train.epochs=1000")
    with Started(tmp_path / "run", words, ranks=3, user_code=slowly) as started:
        started.until(lambda: step_reached(tmp_path / "run", 6))
        started.signal(signal.SIGSTOP, hanging)
        started.until(lambda: not started.processes[waiting].is_alive())
        started.signal(signal.SIGKILL, hanging)
        ended = started.end()
    assert ended.codes[waiting] == 6
    assert f"error: rank {waiting} hangs: in communication of step" in ended.outputs[waiting]
    assert "It waits for another rank, whose own output says where that is." in ended.outputs[waiting]
    assert (ended.result["state"], ended.result["exit"]) == ("failed", 6)
    assert (ended.status["state"], ended.status["exit"]) == ("failed", 6)
