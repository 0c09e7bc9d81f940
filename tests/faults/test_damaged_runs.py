"""Whole runs on damaged or hostile files, full disks and wrong numbers: reported, never loaded or saved."""

from __future__ import annotations

import gc
import os
import pickle
import resource
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from launcher.checkpoint.checkpointer import Checkpointer
from launcher.checkpoint.export import export
from launcher.checkpoint.manifest import MANIFEST, OPTIMIZER, STATE, WEIGHTS, verify
from launcher.checkpoint.storage import load, publish
from launcher.engine import Stepper
from tests.checkpoint.test_checkpoint import Canary
from tests.faults.launching import EPOCH, Ended, Started, run
from tests.faults.noisy import Noisy
from tests.faults.saving import outcome_of
from tests.faults.test_checkpoint_files import flip, truncate, unfinished
from tests.faults.usercode import is_here, own_rank, slowly, stop_after
from tests.forked import launch_forked
from tests.snapshots import comparable, forge

pytestmark = pytest.mark.timeout(90)


@pytest.fixture(scope="module")
def stopped(tmp_path_factory) -> Path:
    """A run that has stopped after step 12, with checkpoints of 5, 10 and 12."""
    ended = run(tmp_path_factory.mktemp("stopped") / "run", user_code=stop_after(12))
    assert ended.codes == [75], ended
    assert list(ended.checkpoints) == [5, 10, 12]
    return ended.directory


@pytest.fixture
def again(tmp_path: Path, stopped: Path) -> Path:
    """A copy of it, to be damaged."""
    shutil.copytree(stopped, tmp_path / "run")
    return tmp_path / "run"


def step_dir(run_dir: Path, step: int) -> Path:
    return run_dir / "checkpoints" / f"step-{step:08d}"


def names(run_dir: Path) -> list[str]:
    return sorted(path.name for path in (run_dir / "checkpoints").iterdir())


# G6: damage is detected, never loaded

DAMAGE: dict[str, Callable[[Path], object]] = {
    "a flipped bit": lambda path: flip(path / WEIGHTS, 300, 3),
    "a truncated file": lambda path: truncate(path / OPTIMIZER, 0.5),
    "a missing file": lambda path: (path / STATE).unlink(),
    "an empty manifest": lambda path: truncate(path / MANIFEST, 0),
}


@pytest.mark.sampled(every=4)
@pytest.mark.parametrize("damage", DAMAGE)
def test_the_newest_damaged(again: Path, undisturbed, damage) -> None:
    """Beside a newer one that has never been finished; times of files say nothing."""
    DAMAGE[damage](step_dir(again, 12))
    unfinished(again / "checkpoints")
    for age, path in enumerate(sorted((again / "checkpoints").iterdir())):
        os.utime(path, (1e9 - age, 1e9 - age))
    ended = run(again)
    assert ended.events("start")[-1]["step"] == 10
    assert any("damaged checkpoint is skipped and set aside: step-00000012" in w for w in ended.warnings)
    assert ended.digest == undisturbed().digest
    assert "damaged-step-00000012" in names(again)


@pytest.mark.slow
@pytest.mark.parametrize("demanded", [True, False])
def test_none_intact(again: Path, undisturbed, demanded) -> None:
    for step in (5, 10, 12):
        flip(step_dir(again, step) / STATE, 50, 1)
    ended = run(again, *([f"checkpoint.resume={again}"] if demanded else []))
    if demanded:
        assert ended.codes == [8]
        assert "there is no intact checkpoint. Damaged: step-00000012" in ended.outputs[0]
        assert names(again) == [f"step-{step:08d}" for step in (5, 10, 12)]
    else:
        assert len(ended.warnings) == 3
        assert ended.digest == undisturbed().digest


# G7: a full disk is an error, not a loss


def wait_for_writers() -> None:
    """Until no checkpoint is being written: beside other work, with pauses."""
    for each in gc.get_objects():
        if isinstance(each, Checkpointer) and each._pending is not None:
            each._pending.result(timeout=60)


def full_disk(
    network: Any, batch: Any, begins: int, ends: int, then: Callable[[], None] | None = None
) -> None:
    """No file may be longer than 60 kB during these passes: a checkpoint's weights are, others are not."""
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    if is_here(network, begins):
        wait_for_writers()
        resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, hard))
        if then is not None:
            then()
    elif is_here(network, ends):
        wait_for_writers()
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))


FEW_LINES = (
    "train.log_every_steps=1000",
    "telemetry.gradient_histogram_every_steps=null",
    "checkpoint.every_steps=10",
)


def assert_all_intact(ended: Ended) -> None:
    """What bears a final name is whole."""
    assert ended.checkpoints
    assert {path: verify(path) for path in ended.checkpoints.values() if verify(path)} == {}


@pytest.mark.slow
def test_a_full_disk_costs_a_checkpoint_and_not_the_run(tmp_path: Path, undisturbed) -> None:
    ended = run(tmp_path / "run", *FEW_LINES, user_code=partial(full_disk, begins=18, ends=24))
    whole = undisturbed(*FEW_LINES)
    assert ended.digest == whole.digest
    (warning,) = ended.warnings
    assert "checkpoint of step 20 cannot be written" in warning
    assert "File too large" in warning
    assert 20 not in ended.checkpoints
    assert ended.checkpoints.keys() >= whole.checkpoints.keys() - {20}  # one that made up for it is later
    assert f"warning: {warning}" in ended.outputs[0]
    assert_all_intact(ended)
    assert not [name for name in names(ended.directory) if name.startswith(".")]


@pytest.mark.slow
def test_a_full_disk_ends_the_run_on_all_ranks_where_that_is_asked_for(tmp_path: Path, undisturbed) -> None:
    words = (*FEW_LINES, "checkpoint.on_error=stop")
    ended = run(tmp_path / "run", *words, ranks=2, user_code=partial(full_disk, begins=18, ends=1000))
    assert ended.codes == [8, 8], ended
    assert "the checkpoint of step 20 cannot be written" in ended.outputs[0]
    assert max(ended.checkpoints) < 20
    assert ended.status["step"] < 30, "only noticed at the end"
    assert (ended.status["state"], ended.status["exit"]) == ("failed", 8)
    assert_all_intact(ended)
    assert run(tmp_path / "run", *words, ranks=2).digest == undisturbed(ranks=2).digest


# G8: what is kept


@pytest.mark.slow
def test_the_newest_and_the_best_are_kept(tmp_path: Path) -> None:
    """The best is that of the second epoch: the third one's labels are wrong. It is known across a stop."""
    words = ("checkpoint.keep=2", "checkpoint.every_steps=3")
    code = partial(forget, then=stop_after(2 * EPOCH + 4))
    assert run(tmp_path / "run", *words, user_code=code).codes == [75]
    ended = run(tmp_path / "run", *words, user_code=forget)
    assert ended.codes == [0], ended
    losses = {event["step"]: event["val_loss"] for event in ended.events("eval")}
    best = min(losses, key=losses.__getitem__)
    assert best == 2 * EPOCH
    assert list(ended.checkpoints) == [best, 36, 39]
    assert export(ended.directory, tmp_path / "w", best=True).checkpoint == ended.checkpoints[best]


def forget(network: Any, batch: Any, then: Callable[[Any, Any], None] | None = None) -> None:
    """From the third epoch on the labels are those of another class."""
    if network is not None and network.training and int(network.passes) >= 2 * EPOCH:
        batch["label"] = (batch["label"] + 1) % 3
    if then is not None:
        then(network, batch)


# G16: what cannot recover ends with its cause


def poison(network: Any, batch: Any, since: int, rank: int) -> None:
    """NaN in the input of one rank from a pass on. A skipped step does not count, so it is for ever."""
    if network is not None and network.training and own_rank() == rank and int(network.passes) >= since:
        batch["x"][0, 2] = float("nan")


@pytest.mark.slow
def test_nan_on_one_rank_ends_the_run_and_leaves_the_checkpoints(tmp_path: Path, undisturbed) -> None:
    ended = run(tmp_path / "run", ranks=2, user_code=partial(poison, since=11, rank=1))
    assert ended.codes == [5, 5], ended
    assert (
        "the loss was not finite in 5 steps with none applied between them, the last being step 16"
        in ended.outputs[0]
    )
    assert "on ranks [1]" in ended.outputs[0]
    assert (ended.status["state"], ended.status["exit"]) == ("failed", 5)
    for step in (5, 10):
        theirs = undisturbed(ranks=2).checkpoints[step]
        assert comparable(load(ended.checkpoints[step]).engine) == comparable(load(theirs).engine)
    # In between it has been saved with the count of bad losses, of which it may not have five anew.
    later = {step: load(path) for step, path in ended.checkpoints.items() if step > 10}
    assert {step: taken.engine.counters["bad_loss_steps"] for step, taken in later.items()} == {13: 2, 15: 4}
    same_again = run(tmp_path / "run", ranks=2, user_code=partial(poison, since=11, rank=1))
    assert same_again.codes == [5, 5]
    assert "the last being step 16" in same_again.outputs[0]
    mended = run(tmp_path / "run", ranks=2)
    assert mended.codes == [0, 0], mended
    assert mended.result["skipped_steps"] == 4


# G17: replicas that drift apart are not saved


def the_stepper() -> Stepper:
    (stepper,) = [each for each in gc.get_objects() if type(each) is Stepper]
    return stepper


def flip_one_bit(network: Any, batch: Any, where: str, passes: int, rank: int) -> None:
    """In memory, as a faulty chip does. Of a half weight it would not last: it is rounded from its master."""
    if not (is_here(network, passes) and own_rank() == rank):
        return
    stepper = the_stepper()
    tensor = {
        "norm.weight (weight)": lambda: network.norm.weight,
        "inner.weight (master)": lambda: masters(stepper)["inner.weight"],
        "inner.weight (optimizer state 0)": lambda: state_of(stepper, "inner.weight"),
    }[where]()
    tensor.data.view(-1).view(torch.int32)[3] ^= 1 << 20


def masters(stepper: Stepper) -> dict[str, torch.Tensor]:
    return stepper.named_masters()


def state_of(stepper: Stepper, name: str) -> torch.Tensor:
    return stepper.replicas()[f"{name} (optimizer state 0)"]


@pytest.mark.parametrize(
    "where",
    [
        "inner.weight (master)",
        pytest.param("norm.weight (weight)", marks=pytest.mark.slow),
        pytest.param("inner.weight (optimizer state 0)", marks=pytest.mark.slow),
    ],
)
def test_one_bit_on_one_rank_is_found_before_it_is_saved(tmp_path: Path, where) -> None:
    code = partial(flip_one_bit, where=where, passes=11, rank=1)
    ended = run(tmp_path / "run", ranks=3, user_code=code)
    assert ended.codes == [9, 9, 9], ended
    assert "rank(s) 1 differ from the others" in ended.outputs[0]
    assert where in ended.outputs[0]
    assert list(ended.checkpoints) == [5, 10]
    assert (ended.status["state"], ended.status["exit"]) == ("failed", 9)


# G23: hostile files execute nothing


@pytest.mark.sampled(every=4)
@pytest.mark.parametrize("name", [WEIGHTS, OPTIMIZER, STATE, MANIFEST])
def test_a_pickle_in_a_checkpoint_is_not_executed(again: Path, tmp_path: Path, name) -> None:
    """Under a valid manifest, as someone would who means harm; in place of the manifest it is damage."""
    pickled = pickle.dumps(Canary(tmp_path / "executed"))
    if name == MANIFEST:
        (step_dir(again, 12) / name).write_bytes(pickled)
    else:
        forge(step_dir(again, 12), name, pickled)
    ended = run(again)
    if name == MANIFEST:
        assert ended.codes == [0], ended
        assert "set aside: step-00000012 (manifest.json cannot be read" in ended.warnings[0]
    else:
        assert ended.codes == [8], ended
        assert str(step_dir(again, 12)) in ended.outputs[0]
        assert "Traceback" not in ended.outputs[0]
        assert names(again) == [f"step-{step:08d}" for step in (5, 10, 12)]
    assert not (tmp_path / "executed").exists()


# Wrong input


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"model.name": "resnet50"}, "model.name is resnet50 there and resnet18 here"),
        ({"tensor ballast": "[1]"}, "tensor ballast is [1] there and [20000] here"),
    ],
)
def test_a_checkpoint_of_another_run_is_refused_by_all_ranks(stopped, tmp_path: Path, change, text) -> None:
    taken = load(step_dir(stopped, 12))
    foreign = publish(tmp_path / "foreign", replace(taken, identity={**taken.identity, **change}))
    ended = run(tmp_path / "run", f"checkpoint.resume={foreign}", ranks=2)
    assert ended.codes == [2, 2], ended
    assert f"{foreign} belongs to another run: {text}" in ended.outputs[0]
    assert not (tmp_path / "run" / "checkpoints").exists()


@pytest.mark.slow
def test_a_finished_run_says_so_and_goes_on_for_more(tmp_path: Path, undisturbed) -> None:
    whole = undisturbed(ranks=2)
    shutil.copytree(whole.directory, tmp_path / "run")
    before = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    ended = run(tmp_path / "run", ranks=2)
    assert ended.codes == [0, 0], ended
    assert f"the run is done, after {3 * EPOCH} steps" in ended.outputs[0]
    assert "To train longer, raise train.epochs." in ended.outputs[0]
    limited = run(tmp_path / "run", "train.epochs=9", f"train.max_steps={3 * EPOCH}", ranks=2)
    assert "To train longer, raise train.max_steps." in limited.outputs[0]
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == before
    more = run(tmp_path / "run", "train.epochs=4", ranks=2)
    assert more.codes == [0, 0], more
    assert more.result["steps"] == 4 * EPOCH
    assert [event["step"] for event in more.events("step")] == list(range(1, 4 * EPOCH + 1))
    assert [event["event"] for event in more.events()].count("end") == 1


def test_a_run_that_is_in_use_is_left_alone(tmp_path: Path, undisturbed) -> None:
    with Started(tmp_path / "run", user_code=slowly) as first:
        first.until((tmp_path / "run" / "metrics.jsonl").exists)
        (tmp_path / "other").mkdir()
        (tmp_path / "other" / "run").symlink_to(tmp_path / "run")
        for directory in (tmp_path / "run", tmp_path / "other" / "run", tmp_path / "other" / ".." / "run"):
            second = run(directory, ranks=1)
            assert second.codes == [2], second
            assert "is in use by another process" in second.outputs[0]
        assert first.end().digest == undisturbed().digest


# Export


def load_into_bare_model(pipe: Connection, file: Path) -> None:
    """Nothing but torch, safetensors and the model."""
    model = Noisy()
    model.load_state_dict(load_file(file))
    pipe.send({key: comparable(value) for key, value in model.state_dict().items()})


@pytest.mark.slow
def test_exported_weights_fit_into_the_bare_model(tmp_path: Path, undisturbed) -> None:
    whole = undisturbed(ranks=2)
    done = launch_forked(tmp_path, ["export", str(whole.directory), "w", "--best"])
    assert done.returncode == 0, done.stderr
    assert str(whole.checkpoints[3 * EPOCH]) in done.stdout
    export(whole.directory, tmp_path / "half", "fp16")
    kept = load(whole.checkpoints[3 * EPOCH]).engine
    for file, dtype in (("w", torch.float32), ("half", torch.float16)):
        code, (said,) = outcome_of(load_into_bare_model, tmp_path / file)
        assert code == 0
        for name, tensor in (kept.weights | kept.buffers).items():
            rounded = tensor.to(dtype) if tensor.is_floating_point() else tensor
            assert said[name] == comparable(rounded.to(tensor.dtype)), name
