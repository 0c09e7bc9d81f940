"""Ranks that wait in C for one that hangs, fails or dies end in time with their phase, and none too early."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from launcher.distributed.env import LaunchEnv
from launcher.distributed.exit_records import ExitRecord
from launcher.distributed.hang_timer import CLEAN_UP_S, HangTimer
from launcher.distributed.heartbeat import Heartbeat
from tests.configs import composed
from tests.faults import launching
from tests.faults.deaf import make_deaf
from tests.faults.launching import Ended, UserCode, run
from tests.faults.test_stopping import torchrun
from tests.faults.usercode import is_here, own_rank
from tests.limits import at_most

pytestmark = pytest.mark.timeout(90)
HANG_TIMEOUT_S = 1
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
def test_each_rank_of_a_run_that_hangs_names_its_phase(tmp_path: Path, rank: int, ranks: int) -> None:
    code = partial(at_step_9, rank=rank, act=sleep)
    ended = disturbed(tmp_path / "run", code, f"launch.hang_timeout_s={HANG_TIMEOUT_S}", ranks=ranks)
    assert ended.codes == [6] * ranks, ended
    assert seconds_to_end(ended) < at_most(HANG_TIMEOUT_S + 5)
    assert (ended.result["state"], ended.result["exit"]) == ("failed", 6)
    assert (ended.status["state"], ended.status["exit"]) == ("failed", 6)
    assert ended.result["error"] in "".join(ended.outputs)
    for each in range(ranks):
        place = "compute" if each == rank else "(compute|communication)"
        assert re.search(f"error: rank {each} hangs: in {place} of step 9 for", ended.outputs[each])
        stacks = (tmp_path / "run" / "logs" / f"stacks-rank{each}.txt").read_text()
        assert ("usercode" in stacks or "in sleep" in stacks) == (each == rank)


def test_a_rank_that_fails_ends_those_that_wait_for_it(tmp_path: Path) -> None:
    ended = disturbed(tmp_path / "run", partial(at_step_9, rank=1, act=fail), "launch.grace_s=3")
    assert ended.codes[1] == 1
    assert seconds_to_end(ended) < at_most(15)
    assert "a sample is broken" in ended.outputs[1]


# Code of the user may take as long as it likes, while the other ranks wait


LOADING_S, AFTER_S = 13, 7  # longer than the limits of these runs
SLOW_RECIPE = """
import os, time
from launcher.recipe import Recipe, TensorData, cross_entropy, recipe
import torch

RANK = int(os.environ.get("RANK", "0"))

def build():
    return torch.nn.Linear(4, 2)

def plot(model, index):
    time.sleep(AFTER_S)
    return {}

@recipe("tiny")
def tiny(config):
    if RANK == 1:
        time.sleep(LOADING_S)
    x = torch.randn(32, 4, generator=torch.Generator().manual_seed(0))
    data = TensorData({"image": x, "label": (x[:, 0] > 0).long()})
    return Recipe(build, data, data, cross_entropy, classes=("a", "b"), on_eval_end=plot)
"""
SLOW_WORDS = ("recipe=resnet18", "recipe.uses=tiny", "recipes.path=tiny.py", "tracker=none", "run.dir=run")
SLOW_WORDS += ("data.batch_size=8", "train.epochs=1", "launch.hang_timeout_s=5", "launch.init_timeout_s=12")


def slow_recipe(directory: Path, loading_s: float, after_s: float) -> None:
    text = SLOW_RECIPE.replace("LOADING_S", str(loading_s)).replace("AFTER_S", str(after_s))
    (directory / "tiny.py").write_text(text)


def start_slow(directory: Path, under_torchrun: bool, *words: str) -> subprocess.CompletedProcess[str]:
    run_module = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command = [sys.executable, *(run_module if under_torchrun else ()), "-m", "launcher", *SLOW_WORDS, *words]
    command += [] if under_torchrun else ["launch.nproc=2"]
    environ = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])}
    return subprocess.run(command, cwd=directory, env=environ, capture_output=True, text=True, timeout=80)


SLOW_PLACES = {
    "a fingerprint of the data": ("data = TensorData(", "data = Slow("),
    "a schedule": ("on_eval_end=plot", "schedule=slow_schedule"),
    "a loss in the trial": ("data, data, cross_entropy,", "data, data, slow_loss,"),
    "a transform of the evaluation": ("on_eval_end=plot", "eval_transform=slow_transform"),
    "a sample of the validation set": ("data, data, cross_entropy,", "data, SlowSamples(), cross_entropy,"),
    "a picture that is drawn when it is saved": ("return {}", "return {'plot': SlowPicture()}"),
}
IN_SLOW_PLACES = """
class Slow(TensorData):
    def fingerprint(self):
        time.sleep(LOADING_S * RANK)
        return "same"

CALLS = []

def slow_schedule(step, total):
    CALLS.append(step)
    time.sleep(LOADING_S * RANK * (len(CALLS) == 1))
    return 1.0

def slow_transform(batch):
    time.sleep(LOADING_S * RANK)
    return batch

def slow_loss(network, batch):
    if not network.training:
        CALLS.append(0)
        time.sleep(LOADING_S * RANK * (len(CALLS) == 1))
    return cross_entropy(network, batch)

class SlowSamples(torch.utils.data.Dataset):
    def __len__(self):
        return 32

    def __getitem__(self, index):
        CALLS.append(index)
        # The last but one: not of the first batch, and in the evaluation after the last step alone.
        time.sleep(LOADING_S * (index == 30))
        return {"image": torch.zeros(4), "label": index % 2}

class SlowPicture:
    def savefig(self, file, format):
        time.sleep(LOADING_S)
        from PIL import Image
        Image.new("L", (2, 2)).save(file, format=format)

@recipe("tiny")
"""


@pytest.mark.slow
@pytest.mark.parametrize("place", SLOW_PLACES)
def test_slow_code_of_one_rank_is_no_hang_anywhere(tmp_path: Path, place: str) -> None:
    slow_recipe(tmp_path, 0, 0)
    text = (tmp_path / "tiny.py").read_text().replace(*SLOW_PLACES[place])
    places = IN_SLOW_PLACES.replace("LOADING_S", str(LOADING_S))
    (tmp_path / "tiny.py").write_text(text.replace('@recipe("tiny")\n', places))
    ended = start_slow(tmp_path, False)
    assert ended.returncode == 0, ended.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    "under_torchrun", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["parent mode", "torchrun"]
)
def test_slow_code_of_the_user_is_no_hang(tmp_path: Path, under_torchrun: bool) -> None:
    """One rank loads its data for longer than every limit, and so does a plot after the evaluation."""
    slow_recipe(tmp_path, loading_s=LOADING_S, after_s=AFTER_S)
    ended = start_slow(tmp_path, under_torchrun)
    assert ended.returncode == 0, ended.stderr
    assert json.loads((tmp_path / "run" / "result.json").read_text())["state"] == "done"


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_who_waits_for_the_user_s_code_of_another_rank_names_that_one(tmp_path: Path, rank: int) -> None:
    """And shows no traceback of Gloo, whose connection breaks when the other rank ends."""
    slow_recipe(tmp_path, 0, 0)
    text = (tmp_path / "tiny.py").read_text()
    text = text.replace("return torch.nn", f"time.sleep(1000 * (RANK == {rank})); return torch.nn")
    (tmp_path / "tiny.py").write_text(text)
    ended = start_slow(tmp_path, True, "launch.user_code_timeout_s=4")
    assert ended.stderr.count(f"error: rank {rank} has been in the recipe's code for ") == 2
    assert "gloo" not in ended.stderr.lower(), ended.stderr
    assert f"rank {1 - rank} h" not in ended.stderr


def test_code_of_the_user_that_takes_too_long_is_not_restarted_to_take_as_long_again(tmp_path: Path) -> None:
    slow_recipe(tmp_path, 1000, 0)
    ended = start_slow(tmp_path, False, "launch.user_code_timeout_s=4")
    assert ended.returncode == 6, ended.stderr
    assert "has been in the recipe's code for " in ended.stderr
    assert "restart" not in ended.stderr


WAITS = {
    "rank0_first": "with rank0_first(): time.sleep(S)",
    "a barrier": "time.sleep(S * (RANK == 0)); torch.distributed.barrier(); time.sleep(S * (RANK == 1))",
}


def start_waiting(
    directory: Path, place: str, seconds: int, limit_s: int
) -> subprocess.CompletedProcess[str]:
    slow_recipe(directory, 0, 0)
    text = (directory / "tiny.py").read_text().replace("import Recipe", "import rank0_first, Recipe")
    waiting = f"S = {seconds}\n    {WAITS[place]}"
    (directory / "tiny.py").write_text(text.replace("if RANK == 1:", f"{waiting}\n    if RANK == 1:"))
    return start_slow(directory, True, f"launch.user_code_timeout_s={limit_s}")


@pytest.mark.slow
@pytest.mark.parametrize("place", ["rank0_first", "a barrier"])
def test_a_rank_that_waits_in_the_user_s_code_is_not_blamed(tmp_path: Path, place: str) -> None:
    ended = start_waiting(tmp_path, place, seconds=1000, limit_s=4)
    assert "error: rank 0 has been in the recipe's code for " in ended.stderr, ended.stderr
    of_rank_1 = re.search(r"error: rank 1 hangs: .*", ended.stderr)
    assert of_rank_1 is None or "It waits for another rank, whose own output" in of_rank_1[0]


@pytest.mark.slow
@pytest.mark.parametrize("place", WAITS)
def test_the_wait_for_another_rank_is_no_time_of_the_user_s_code(tmp_path: Path, place: str) -> None:
    assert (ended := start_waiting(tmp_path, place, seconds=7, limit_s=9)).returncode == 0, ended.stderr


# Under torchrun


def disturb(rank: int, act: Any) -> None:
    """In a worker: wait in C from here on, and let one rank act in its ninth step."""
    make_deaf()
    launching.USER_CODE = partial(at_step_9, rank=rank, act=act)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "rank", "act", "code", "named"),
    [
        (2, 1, "sleep", 6, "rank 1 hangs: in compute of step 9"),
        (3, 0, "sleep", 6, "rank 0 hangs: in compute of step 9"),
        (3, 1, "fail", 1, "a sample is broken"),
        (2, 0, "fail", 1, "a sample is broken"),
    ],
)
def test_under_torchrun(tmp_path: Path, ranks, rank, act, code, named) -> None:
    started = f"from tests.faults import test_hang_timer as t; t.disturb({rank}, t.{act})"
    words = (*ENDLESS, f"run.dir={tmp_path / 'run'}", f"launch.hang_timeout_s={4 if act == 'sleep' else 300}")
    with torchrun(tmp_path, *words, ranks=ranks, started=started) as process:
        output = process.communicate(timeout=60)[0]
    ended = Ended(tmp_path / "run", [process.returncode], [output], 0.0)
    assert ended.result["state"] == "failed", output
    assert ended.result["exit"] in ((6,) if code == 6 else (1, 143)), output
    assert "error: " in output
    assert named in " ".join(output.split())
    assert seconds_to_end(ended) < at_most(14)


def test_a_rank_whose_clean_up_hangs_ends_with_its_error() -> None:
    heartbeat = Heartbeat()
    timer = HangTimer(composed(), LaunchEnv(1, 2), None, "job", heartbeat)
    timer.limit_clean_up(ExitRecord(1, time.time(), "no data", 7))
    now = time.monotonic()
    assert timer._problem(heartbeat.latest, now) is None
    assert timer._problem(heartbeat.latest, now + CLEAN_UP_S) == ("rank 1 failed: no data", 7)
