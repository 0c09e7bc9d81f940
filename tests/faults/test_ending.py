"""A run that is not whole is not called done: nothing was learned, or its last checkpoint is missing."""

from __future__ import annotations

import contextlib
import math
import os
import resource
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.faults.launching import Ended, run
from tests.faults.parent import Parent, write_recipe
from tests.faults.test_damaged_runs import full_disk, wait_for_writers
from tests.faults.usercode import is_here, own_rank, slowly

pytestmark = pytest.mark.timeout(90)

LAST = 12  # steps of the runs here
WORDS = (f"train.max_steps={LAST}",)


def poison(network: Any, batch: Any, first_pass: int, training: bool = True, rank: int = 0) -> None:
    """NaN for the samples of one rank from this forward pass in training on, or in evaluations after it."""
    here = network is not None and network.training == training and int(network.passes) >= first_pass
    if here and own_rank() == rank:
        batch["x"].fill_(math.nan)


def assert_diverged(ended: Ended, text: str) -> None:
    assert set(ended.codes) == {5}, ended
    assert text in ended.result["error"]
    assert (ended.result["state"], ended.result["exit"]) == ("failed", 5)
    assert (ended.status["state"], ended.status["exit"]) == ("failed", 5)
    assert [event["state"] for event in ended.events("end")] == ["failed"]
    assert "done" not in ended.outputs[0].replace("so the run is not done", "")


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_last_loss_that_is_not_finite_is_no_good_end(tmp_path: Path, undisturbed, ranks) -> None:
    """What was saved before stays, and the same command ends as if nothing had happened."""
    code = partial(poison, first_pass=LAST - 1, rank=ranks - 1)
    ended = run(tmp_path / "run", *WORDS, ranks=ranks, user_code=code)
    assert_diverged(ended, f"the loss was not finite in the last 1 of {LAST} steps, so the run is not done.")
    assert f"  rank {ranks - 1}: training sample" in ended.result["error"]
    assert list(ended.checkpoints) == [5, 10]
    again = run(tmp_path / "run", *WORDS, ranks=ranks)
    assert again.digest == undisturbed(*WORDS, ranks=ranks).digest
    assert again.events("start")[-1]["step"] == 10


def test_a_run_of_which_no_step_was_applied_is_not_done(tmp_path: Path) -> None:
    words = ("train.max_steps=3", "precision.loss_scale.init_scale=16777216")
    ended = run(tmp_path / "run", *words, ranks=2)
    assert_diverged(ended, "none of 3 steps was applied, because every gradient overflowed")
    assert not ended.checkpoints


@pytest.mark.slow
def test_a_held_out_loss_that_is_not_finite_at_the_end_is_no_good_end(tmp_path: Path) -> None:
    ended = run(tmp_path / "run", *WORDS, ranks=2, user_code=partial(poison, first_pass=0, training=False))
    assert_diverged(ended, f"the loss on the held-out set is nan after the last of {LAST} steps")
    assert list(ended.checkpoints) == [5, 10]


def test_the_parent_says_the_same(tmp_path: Path) -> None:
    write_recipe(
        tmp_path,
        in_build="model = nn.Linear(4, 2)\n"
        "model.register_forward_hook(lambda module, inputs, output: output * float('nan'))\n"
        "return model",
    )
    with Parent(tmp_path, "train.max_steps=3") as parent:
        assert parent.end() == 5
        assert "the loss was not finite in the last 3 of 3 steps" in parent.stderr
        for name in ("result.json", "status.json"):
            assert (parent.json(name)["state"], parent.json(name)["exit"]) == ("failed", 5)


# The last checkpoint cannot be written


def slowly_fill(network: Any, batch: Any, begins: int, ends: int) -> None:
    """Each step leaves time for the checkpoint before it."""
    slowly(network, batch)
    full_disk(network, batch, begins, ends)


def assert_not_saved(ended: Ended) -> None:
    assert set(ended.codes) == {8}, ended
    assert f"the checkpoint of step {LAST} cannot be written" in ended.result["error"]
    assert (ended.result["state"], ended.result["exit"]) == ("failed", 8)
    assert (ended.status["state"], ended.status["exit"]) == ("failed", 8)
    assert 5 in ended.checkpoints
    assert LAST not in ended.checkpoints
    assert "done after" not in ended.outputs[0]


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize(
    ("ranks", "on_error"), [pytest.param(1, "stop", marks=pytest.mark.slow), (2, "warn")]
)
def test_with_room_again_the_same_command_makes_up_for_a_full_disk(
    tmp_path: Path, undisturbed, ranks, on_error
) -> None:
    words = (*WORDS, "train.log_every_steps=1000", f"checkpoint.on_error={on_error}")
    code = partial(slowly_fill, begins=LAST - 1, ends=1000)
    ended = run(tmp_path / "run", *words, ranks=ranks, user_code=code)
    assert_not_saved(ended)
    newest = max(ended.checkpoints)
    again = run(tmp_path / "run", *words, ranks=ranks)
    assert again.digest == undisturbed(*WORDS, ranks=ranks).digest
    assert (again.status["state"], again.result["state"]) == ("done", "done")
    assert again.events("start")[-1]["step"] == newest
    assert list(again.checkpoints) == [5, 10, LAST]


@pytest.mark.slow
def test_a_checkpoint_that_is_missing_in_the_middle_is_only_a_warning(tmp_path: Path, undisturbed) -> None:
    words = (*WORDS, "train.log_every_steps=1000")
    ended = run(tmp_path / "run", *words, user_code=partial(slowly_fill, begins=9, ends=LAST - 1))
    assert ended.digest == undisturbed(*WORDS).digest
    (warning,) = ended.warnings
    assert "the checkpoint of step 10 cannot be written" in warning
    assert list(ended.checkpoints) == [5, LAST]
    assert ended.status["state"] == "done"


def slow_to_write() -> None:
    from launcher.checkpoint import async_writer

    publish = async_writer.publish

    def slowly_published(*given: Any) -> Path:
        time.sleep(1)
        return publish(*given)

    async_writer.publish = slowly_published


def fail(network: Any, batch: Any) -> None:
    if is_here(network, 7):
        raise RuntimeError("planted")


@pytest.mark.slow
def test_a_checkpoint_that_is_being_written_when_the_run_fails_is_recorded(tmp_path: Path) -> None:
    ended = run(tmp_path / "run", *WORDS, user_code=fail, prepare=slow_to_write)
    assert ended.codes == [1], ended
    assert list(ended.checkpoints) == [5]
    assert [event["step"] for event in ended.events("checkpoint")] == [5]


FAILED = threading.Event()


def full_for_a_moment(network: Any, batch: Any, begins: int, ends: int) -> None:
    """No file may hold anything for a moment in which all are written, a checkpoint among them."""
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    if is_here(network, begins):
        resource.setrlimit(resource.RLIMIT_FSIZE, (10, hard))
        os.kill(os.getpid(), signal.SIGUSR1)  # asks for a checkpoint
    elif is_here(network, ends):
        assert FAILED.wait(30), "the thread that writes status.json has met the full disk"
        wait_for_writers()
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))


def often() -> None:
    from launcher.checkpoint import async_writer
    from launcher.telemetry import status

    write = status.write_json

    def noting(*given: Any) -> None:
        try:
            write(*given)
        except OSError:
            FAILED.set()
            raise

    status.write_json = noting
    async_writer.FIRST_RETRY_S = 0.0
    status.EVERY_S = 0.0
    status.StatusFile.__init__.__defaults__ = (0.0, status.time.monotonic)  # type: ignore[misc]


def test_a_disk_that_is_full_for_a_moment_costs_no_event_no_status_and_no_checkpoint(tmp_path: Path) -> None:
    words = (*WORDS, "checkpoint.every_steps=null", f"checkpoint.every_s={1e6:g}")
    code = partial(full_for_a_moment, begins=4, ends=7)
    ended = run(tmp_path / "run", *words, user_code=code, prepare=often)
    assert (ended.codes, ended.status["state"], ended.status["exit"]) == ([0], "done", 0)
    assert ended.status["step"] == LAST
    assert [event["step"] for event in ended.events("step")] == list(range(1, LAST + 1))
    assert (ended.directory / "metrics.jsonl").read_bytes().endswith(b"}\n")
    said = {text.split(":")[0] for text in ended.warnings}
    assert said >= {"metrics.jsonl cannot be written", "status.json cannot be written"}
    assert not [text for text in ended.warnings if "lacks" in text]
    assert 0 < min(ended.checkpoints) < LAST, "the one that was due is written once there is room again"


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 MB, seen by all processes."""
    directory = tmp_path / "run"
    directory.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(directory)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("no file systems can be mounted here")
    yield directory
    subprocess.run(["umount", str(directory)], check=True)


def fill(network: Any, batch: Any, disk: Path) -> None:
    """Leave no block free from the step before the last one on."""
    if is_here(network, LAST - 1):
        with contextlib.suppress(OSError), open(disk / "filler.log", "wb", buffering=0) as file:
            while True:
                file.write(bytes(4096))


@pytest.mark.slow
def test_a_disk_without_a_free_block_keeps_no_run_from_its_end(small_disk: Path, undisturbed) -> None:
    """Not even a temporary file fits, but in place of status.json."""
    words = (*WORDS, "checkpoint.on_error=warn")
    ended = run(small_disk, *words, user_code=partial(fill, disk=small_disk))
    assert ended.codes == [8], ended
    assert f"the checkpoint of step {LAST} cannot be written" in ended.outputs[0]
    assert (ended.status["state"], ended.status["exit"]) == ("failed", 8)
    assert LAST not in ended.checkpoints
    (small_disk / "filler.log").unlink()
    again = run(small_disk, *words)
    assert again.digest == undisturbed(*WORDS).digest
    assert (again.status["state"], again.result["state"]) == ("done", "done")
