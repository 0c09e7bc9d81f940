"""Trackers that sleep, raise or work change nothing about a run, and a kill loses no event (G25)."""

from __future__ import annotations

import os
import signal
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from launcher.telemetry import setup
from tests.faults.launching import RECIPE, Ended, run
from tests.faults.usercode import is_here

pytestmark = pytest.mark.timeout(90)
BAD = """

import time
from launcher.telemetry.tracker import tracker


class _Nothing:
    def start(self, run): ...
    def log(self, step, values): ...
    def media(self, step, name, item): ...
    def finish(self, exit_code): ...


@tracker("sleeping")
class Sleeping(_Nothing):
    def log(self, step, values):
        time.sleep(0.1)


@tracker("raising")
class Raising(_Nothing):
    def log(self, step, values):
        raise OSError("disk full")
"""


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Ended:
    ended = run(tmp_path_factory.mktemp("none") / "run", "train.max_steps=26")
    assert ended.codes == [0], ended
    assert "\ntracker none: events are written only to the files of the run\n" in f"\n{ended.outputs[0]}"
    return ended


def losses(ended: Ended) -> list[tuple[int, float]]:
    return [(event["step"], event["loss"]) for event in ended.events("step")]


def test_all_trackers_at_once_good_and_bad_leave_the_bits_as_they_are(
    tmp_path: Path, undisturbed: Ended
) -> None:
    own = tmp_path / "mine.py"
    own.write_text(RECIPE.read_text() + BAD)
    words = ("train.max_steps=26", f"recipes.path={own}", "tracker.mode=offline")
    ended = run(tmp_path / "run", *words, "tracker.name=[wandb,tensorboard,sleeping,raising]")
    assert ended.codes == [0], ended
    assert ended.digest == undisturbed.digest
    assert losses(ended) == losses(undisturbed)
    line = own.read_text().splitlines().index('        raise OSError("disk full")') + 1
    assert ended.warnings == [
        f"raising is given up: OSError: disk full (at {own}:{line}, in log). The run continues without it."
    ]
    assert ended.log(0).count("OSError: disk full\n") == 1, "its traceback"


def kill_with(network: Any, batch: Any, published: Path) -> None:
    """SIGKILL in step 11, as soon as the checkpoint of step 10 is there; that of step 5 is long reported."""
    time.sleep(0.03)
    if is_here(network, 10):
        while not published.exists():
            time.sleep(0.001)
        os.kill(os.getpid(), signal.SIGKILL)


def never_in_time() -> None:
    """The thread that writes events does not get its turn by itself."""
    setup.EVERY_S = 3600.0


def test_a_kill_right_after_a_checkpoint_loses_no_event_that_the_resumed_run_does_not_repeat(
    tmp_path: Path, undisturbed: Ended
) -> None:
    """The events of steps wait for their thread: those before the checkpoint must be in the file by then."""
    words, directory = ("train.max_steps=26",), tmp_path / "run"
    at_once = partial(kill_with, published=directory / "checkpoints" / "step-00000010")
    killed = run(directory, *words, user_code=at_once, prepare=never_in_time)
    assert killed.codes == [-signal.SIGKILL], killed
    resumed = run(tmp_path / "run", *words)
    assert resumed.codes == [0], resumed
    assert resumed.digest == undisturbed.digest
    assert losses(resumed) == losses(undisturbed)
