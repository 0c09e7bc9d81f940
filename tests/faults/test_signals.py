"""Every signal that can end a run saves it, or is recorded in its files; further ones change nothing."""

from __future__ import annotations

import os
import shlex
import signal
import time
from pathlib import Path

import pytest

from launcher.os.signals import DUMP_STACKS_SIGNAL
from tests.faults.parent import ENDLESS, Parent, is_alive, write_recipe
from tests.limits import at_most

pytestmark = pytest.mark.timeout(90)
LONG = "train.epochs=100000"


def in_slurm() -> None:
    os.environ["SLURM_JOB_ID"] = "7"


def assert_saved_and_stopped(parent: Parent, state: str = "stopped") -> None:
    assert parent.end(40) == 75
    status = parent.json("status.json")
    assert (status["state"], status["exit"]) == (state, 75)
    assert (parent.run_dir / "checkpoints" / f"step-{status['step']:08d}").is_dir()


@pytest.mark.parametrize("nproc", [2, pytest.param(None, marks=pytest.mark.slow)])
def test_a_stop_is_answered_at_once_and_acted_on_after_the_step_in_progress(tmp_path: Path, nproc) -> None:
    """The steps are long, and the main thread is in C, where no handler of Python's runs."""
    asleep = (
        "if step >= 5: open(f'asleep-{step}-{RANK}', 'w').close(); LIBC.usleep(900_000); LIBC.usleep(900_000)"
    )
    write_recipe(tmp_path, f"LIBC = ctypes.CDLL(None)\n{asleep}")
    with Parent(tmp_path, LONG, nproc=nproc) as parent:
        parent.wait_until((tmp_path / "asleep-5-0").exists, 20, "the fifth step")
        parent.signal(signal.SIGINT)
        began = time.monotonic()
        line = "stopping after step 5, then saving; Ctrl-C again ends without saving\n"
        parent.wait_until(lambda: line in parent.stderr, 5, "an answer")
        assert time.monotonic() - began < at_most(0.2)
        assert_saved_and_stopped(parent)
        assert parent.json("status.json")["step"] == 5


@pytest.mark.slow
def test_sigusr2_saves_and_the_run_continues_and_another_signal_shows_the_stacks(tmp_path: Path) -> None:
    write_recipe(tmp_path, ENDLESS)
    with Parent(tmp_path, LONG) as parent:
        ranks = [parent.rank(0), parent.rank(1)]
        parent.signal(signal.SIGUSR2)
        checkpoints = parent.run_dir / "checkpoints"
        parent.wait_until(lambda: list(checkpoints.glob("step-*")), 20, "a checkpoint was written")
        os.kill(ranks[1], DUMP_STACKS_SIGNAL)
        stacks = parent.run_dir / "logs" / "stacks-rank1.txt"
        parent.wait_until(lambda: "most recent call first" in stacks.read_text(), 10, "its stacks")
        assert all(map(is_alive, ranks))
        assert not (parent.run_dir / "logs" / "stacks-rank0.txt").read_text()


@pytest.mark.slow
def test_sigusr2_under_slurm_stops_the_run(tmp_path: Path) -> None:
    write_recipe(tmp_path, ENDLESS)
    with Parent(tmp_path, LONG, prepare=in_slurm) as parent:
        parent.rank(0), parent.rank(1)
        parent.signal(signal.SIGUSR2)
        assert_saved_and_stopped(parent, "preempted")


@pytest.mark.slow
def test_what_a_stopped_sweep_advises_completes_it(tmp_path: Path) -> None:
    write_recipe(tmp_path, "if os.path.exists('slow'): " + ENDLESS)
    (tmp_path / "slow").touch()
    words = ("-m", "train.epochs=10", "seed=0,1")
    with Parent(tmp_path, *words, "hydra.sweep.dir='lr=1'") as parent:
        parent.rank(0)
        parent.signal(signal.SIGTERM)
        assert parent.end() == 75
        assert "sweep: job 1 of 2 stopped" in parent.stderr
        assert "failed" not in parent.stderr
        assert "run.dir=" not in parent.stderr
        (advice,) = [
            line for line in parent.stderr.splitlines() if line.startswith("sweep: stopped. To resume")
        ]
        again = advice.partition("the same command with ")[2].partition(": it continues")[0]
    (tmp_path / "slow").unlink()
    with Parent(tmp_path, *words, *shlex.split(again), name="again") as parent:
        assert parent.end(40) == 0
        assert "sweep: 2 of 2 jobs done" in parent.stdout
        assert len(list((tmp_path / "lr=1").glob("*/result.json"))) == 2
