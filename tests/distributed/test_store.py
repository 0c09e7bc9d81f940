"""Two launches at one MASTER_PORT, and ranks that never come: refused in words and in time."""

from __future__ import annotations

import json
import time

import pytest

from tests.launch.test_config_broadcast import FRONT, ends, start
from tests.limits import at_most

__all__ = ["start"]  # the fixture

WORDS = ["recipe=resnet18", "seed=5"]
# The process itself, with its signals, and a job that a test ends.
PROCESS = """
import sys, time, pathlib
from launcher import cli
from launcher.__main__ import main

def work(config, launch, store, job):
    pathlib.Path(f"works-{launch.rank}").touch()
    while not pathlib.Path("end").exists():
        time.sleep(0.01)

cli.run_worker = work
sys.exit(main())
"""


def test_a_rank_of_another_launch_is_refused_and_the_launch_that_it_met_is_not_disturbed(start) -> None:
    (rank0,) = start(FRONT, WORDS, 2, [0])
    (stray,) = start(FRONT, ["recipe=resnet18", "seed=6"], 2, [1])
    assert stray.wait(30) == 3
    assert "rank 1 was given recipe=resnet18 seed=6, and the rank 0 that it found at " in stray.stderr
    assert " recipe=resnet18 seed=5: they are not of one launch." in stray.stderr
    assert stray.stderr.count("\n") == 1, "one sentence"
    (own,) = start(FRONT, WORDS, 2, [1])
    results = ends([rank0, own])
    assert [code for code, _, _ in results] == [0, 0], results


def test_a_port_in_use_is_one_sentence(start, tmp_path) -> None:
    rank0, own = start(PROCESS, WORDS, 2)
    wait_for(tmp_path / "works-0")
    began = time.monotonic()
    (second,) = start(PROCESS, ["recipe=resnet18", "seed=6"], 2, [0])
    assert second.wait(30) == 3
    assert time.monotonic() - began < at_most(10)
    (line,) = second.stderr.splitlines()
    assert line.startswith("error: MASTER_ADDR=")
    assert "Address already in use. If another launch uses it, give this one another port" in line
    (tmp_path / "end").touch()
    assert [code for code, _, _ in ends([rank0, own])] == [0, 0]


@pytest.mark.sampled(every=2, first=1)
@pytest.mark.parametrize(
    ("rank", "text"), [(0, "rank 1 did not come to MASTER_ADDR="), (1, "rank 1 could not reach")]
)
def test_a_rank_that_never_comes_is_awaited_for_init_timeout_s(start, rank, text) -> None:
    began = time.monotonic()
    (alone,) = start(FRONT, [*WORDS, "launch.init_timeout_s=2"], 2, [rank])
    assert alone.wait(30) == 6
    assert time.monotonic() - began < at_most(10)
    (line,) = alone.stderr.splitlines()
    assert line.startswith(f"error: {text}")
    assert "within 2 s" in line


# The hang timer of a rank whose store is gone, after rank 0 has written how the run ended.
STRAY = """
import os, sys, time
from pathlib import Path
from launcher.config.schema import Config
from launcher.distributed.hang_timer import HangTimer
from launcher.distributed.heartbeat import Heartbeat
from launcher.distributed.env import LaunchEnv
from launcher.run_dir.records import write_failure
from launcher.run_dir.result import Failure
from tests.configs import composed
from dataclasses import replace

config = composed()
config = replace(config, run=replace(config.run, dir=os.getcwd()))
timer = HangTimer(config, LaunchEnv(0, 2), None, "0", Heartbeat())
write_failure(Path.cwd(), Failure(sys.argv[1], 0, ""))
timer._abort("rank 0 hangs.", 6, Heartbeat().latest)
"""


@pytest.mark.parametrize(("state", "kept"), [("done", True), ("preempted", True), ("running", False)])
def test_a_rank_that_is_left_over_does_not_write_over_a_run_that_has_ended(
    start, tmp_path, state, kept
) -> None:
    (stray,) = start(STRAY, [state], 2, [1])
    assert stray.wait(30) == 6
    for name in ("status.json", "result.json"):
        assert json.loads((tmp_path / name).read_text())["state"] == (state if kept else "failed")


def wait_for(path) -> None:
    deadline = time.monotonic() + at_most(30)
    while not path.exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
