"""What a recipe starts ends with its worker and holds nothing of the run: the same command starts again."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.faults.parent import Parent, is_alive, write_recipe
from tests.faults.test_parent_mode import DEAF, gone_within

pytestmark = pytest.mark.timeout(60)
LONG = ("train.epochs=100000", "run.dir=run")

NOTE = "open(f'child-{os.getpid()}', 'w').close()"
SLEEP = f"(signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65)), {NOTE}, time.sleep(1000))"
STARTED = {
    "os.fork": f"if os.fork() == 0: {SLEEP}",
    "multiprocessing": f"import multiprocessing\n    multiprocessing.Process(target=lambda: {SLEEP}).start()",
}
PROGRAM = f"import os, time; {NOTE}; time.sleep(1000)"
EXECUTED = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {PROGRAM!r}])"
BOTH = f"{STARTED['os.fork']}\n    {EXECUTED}"


def recipe(directory: Path, started: str) -> None:
    """Both ranks start a child in their second step, and never stop by themselves."""
    write_recipe(directory, f"{DEAF}\nif step == 2:\n    {started}")


def children_in(directory: Path) -> list[int]:
    return [int(path.name.partition("-")[2]) for path in directory.glob("child-*")]


@pytest.fixture
def left(tmp_path: Path):
    """Kills what a failed test leaves behind."""
    yield
    for pid in children_in(tmp_path):
        if is_alive(pid):
            os.kill(pid, signal.SIGKILL)


def started_in(parent: Parent, num: int) -> list[int]:
    parent.wait_until(lambda: len(children_in(parent.directory)) == num, 15, f"{num} children")
    pids = children_in(parent.directory)
    assert all(map(is_alive, pids)), "a child was killed before its time"
    return pids


def assert_starts_again(directory: Path, nproc: int | None) -> None:
    write_recipe(directory)
    with Parent(directory, "train.epochs=1", "run.dir=run", nproc=nproc, name="again") as parent:
        assert parent.end() == 0, parent.stderr


@pytest.mark.parametrize("started", ["os.fork", pytest.param("multiprocessing", marks=pytest.mark.slow)])
def test_children_die_with_the_parent(tmp_path: Path, left, started) -> None:
    recipe(tmp_path, STARTED[started])
    with Parent(tmp_path, *LONG) as parent:
        workers, pids = [parent.rank(0), parent.rank(1)], started_in(parent, 2)
        parent.signal(signal.SIGKILL)
        assert gone_within(workers + pids, 2)
    assert_starts_again(tmp_path, 2)


def test_children_die_with_their_worker(tmp_path: Path, left) -> None:
    """A program too, which is in the process group of its worker."""
    recipe(tmp_path, BOTH)
    with Parent(tmp_path, *LONG) as parent:
        parent.rank(0), parent.rank(1)
        pids = started_in(parent, 4)
        os.kill(parent.rank(1), signal.SIGKILL)
        assert gone_within(pids, 2)
        assert parent.end() == 1


HELD = """
import os, sys, time
from pathlib import Path
from launcher.run_dir.claim import open_run_dir
from tests.run_dir.test_records import sample_config

with open_run_dir(sample_config(sys.argv[1]), []):
    if CHILD == 0:
        print(os.getpid(), flush=True)
        time.sleep(100)
"""


def test_a_child_that_lives_on_holds_no_lock(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HELD.replace("CHILD", "os.fork()"), str(tmp_path / "run")]
    environ = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    with subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        pid = int(holder.stdout.readline())
        while is_alive(holder.pid):
            time.sleep(0.01)
        second = subprocess.run(
            [sys.executable, "-c", HELD.replace("CHILD", "1"), str(tmp_path / "run")],
            env=environ,
            capture_output=True,
            text=True,
        )
        os.kill(pid, signal.SIGKILL)
    assert second.returncode == 0, second.stderr
