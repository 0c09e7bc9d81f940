"""Checkpoints: what is written is read back bit for bit; everything else is refused with its reason."""

from __future__ import annotations

import ast
import hashlib
import json
import os
import pickle
import threading
import time
from contextlib import closing
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save
from torch import nn

from launcher.checkpoint.async_writer import SaveSchedule, write_checkpoint
from launcher.checkpoint.catalog import apply_retention, best_intact, newest_intact, resume
from launcher.checkpoint.checkpointer import Checkpointer
from launcher.checkpoint.manifest import MANIFEST, OPTIMIZER, STATE, WEIGHTS, manifest_text, verify
from launcher.checkpoint.run_state import (
    BestEvaluation,
    RunExtras,
    Snapshot,
    TrainProgress,
    identity_of,
    restore,
    take_snapshot,
)
from launcher.checkpoint.storage import load, publish
from launcher.checkpoint.tensors import Pause, write_tensors
from launcher.data.seeding import seed_compute
from launcher.distributed.env import WorkerEnv
from launcher.engine import SGD, AdamW, Policy, Stepper, TorchOptimizer
from launcher.errors import ConfigError, StorageError
from launcher.run_dir.discarding import has_discarded
from launcher.trainer.replica_consistency import weights_sha256
from tests.configs import composed
from tests.engine.observe import state_digest, train
from tests.models import Odd, conv_net, features
from tests.snapshots import IDENTITY, forge, publish_steps, same, snapshot

ALONE = WorkerEnv(0, 1, 0, 1, torch.device("cpu"), None)
ROOT = Path(__file__).parents[2]


def taken(stepper: Stepper, step: int) -> Snapshot:
    identity = identity_of(composed(), stepper.model, 100)
    found = take_snapshot(stepper, ALONE, identity, TrainProgress(0, step, 4 * step))
    assert found is not None
    return found


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # by the compiler's first import
def test_a_snapshot_of_compiled_modules_has_the_names_of_plain_ones() -> None:
    plain, compiled = conv_net(), conv_net()
    compiled[1] = torch.compile(compiled[1], backend="eager")
    steppers = [Stepper(model, SGD(0.1)) for model in (plain, compiled)]
    assert same(*(taken(stepper, 1) for stepper in steppers))
    assert len({weights_sha256(stepper, ALONE) for stepper in steppers}) == 1


# What is written is read back


def test_every_field_of_a_snapshot_survives(tmp_path: Path) -> None:
    written = snapshot(metric=0.5)
    for part in (written, written.engine):
        for field in fields(part):
            assert getattr(part, field.name), f"{field.name} is empty here, so its loss would go unnoticed"
    found = load(publish(tmp_path, written))
    assert same(found, written)


@pytest.mark.parametrize("text", ["nan", "inf", "-inf"])
def test_a_setting_whose_text_reads_as_a_number_that_json_lacks(tmp_path: Path, text: str) -> None:
    texts = {"recipe.options.fill": text}
    written = replace(snapshot(1), extra=RunExtras(settings=texts, data=texts, stream=[text]))
    assert load(publish(tmp_path, written)).extra == written.extra


def test_the_files_of_this_format_are_read_and_written(tmp_path: Path) -> None:
    """Spelt out here and not by our writer, because the runs of others hold such files.

    Whoever changes a name, a key or an encoding gives the new format another number.
    """
    made = snapshot(7, metric=0.5, average=None, average_buffers={})
    engine, counts = made.engine, made.rank_buffers["norm.count"]
    contents = {
        "weights.safetensors": save(engine.weights | engine.buffers),
        "optimizer.safetensors": save(
            {f"optimizer/{name}": state for name, state in engine.optimizer.items()}
            | {"buffer_by_rank/norm.count": counts}
        ),
        "state.json": json.dumps(
            {
                "engine": {
                    "weights": {},
                    "optimizer": {},
                    "buffers": {},
                    "counters": {
                        "exponent": 16,
                        "growth_tracker": 7,
                        "hysteresis_tracker": 1,
                        "applied_steps": 7,
                        "skipped_steps": 2,
                    },
                    "scale_mode": "dynamic",
                    "outliers": {"loss": [0.5, 7 / 3]},
                    "reference_count": 4,
                },
                "progress": {"epoch": 0, "step": 7, "samples": 70},
                "metric": {"name": "accuracy", "value": 0.5, "lower_is_better": False},
                "identity": IDENTITY,
                "world_size": 2,
                "names": {"fc.weight": "fc.weight", "fc.bias": "fc.bias", "norm.count": "norm.count"},
                "extra": {
                    "callbacks": {"evaluation": {"best": float("inf")}},
                    "evaluated": True,
                    "data": {},
                    "settings": {"seed": "0"},
                },
                "weights": ["fc.weight", "fc.bias"],
                "buffers": ["norm.count"],
                "rank_buffers": {},
                "average_buffers": {},
            }
        ).encode(),
    }
    path = tmp_path / "by hand" / "step-00000007"
    path.mkdir(parents=True)
    files = {}
    for name, content in contents.items():
        (path / name).write_bytes(content)
        files[name] = {"sha256": hashlib.sha256(content).hexdigest(), "size_bytes": len(content)}
    text = json.dumps({"files": files, "format": 6, "step": 7}, sort_keys=True)
    digest = hashlib.sha256(text.encode()).hexdigest()
    (path / "manifest.json").write_text(f'{{"content": {text}, "sha256": "{digest}"}}\n')
    assert same(load(path), made)

    ours = publish(tmp_path / "ours", made)
    assert ours.name == path.name
    assert {file.name for file in ours.iterdir()} == {*contents, "manifest.json"}
    state, expected = (json.loads((folder / "state.json").read_bytes()) for folder in (ours, path))
    assert expected == state
    for name in ("weights.safetensors", "optimizer.safetensors"):
        found, wanted = load_file(ours / name), load_file(path / name)
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[key], wanted[key]) for key in wanted)
    manifest = json.loads((ours / "manifest.json").read_bytes())
    assert manifest["content"].keys() == {"files", "format", "step"}
    assert manifest["sha256"] == hashlib.sha256(json.dumps(manifest["content"]).encode()).hexdigest()


@pytest.mark.parametrize("metric", [None, float("inf"), -1.5])
def test_metrics_that_json_has_no_word_for(tmp_path: Path, metric) -> None:
    written = snapshot(metric=metric, lower_is_better=True)
    assert load(publish(tmp_path, written)).metric == written.metric


DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.int64]
DTYPES += [torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool]


def test_the_library_reads_what_we_write(tmp_path: Path) -> None:
    shapes = [(), (0,), (3,), (2, 0), (3, 5)]  # odd numbers of bytes, after which the next one is aligned
    tensors = {f"{dtype} {shape}": torch.randint(2, shape).to(dtype) for dtype in DTYPES for shape in shapes}
    written = write_tensors(tmp_path / "file", tensors, {"format": "pt"})
    found = load_file(tmp_path / "file")
    assert found.keys() == tensors.keys()
    assert all(found[n].dtype == t.dtype and torch.equal(found[n], t) for n, t in tensors.items())
    assert written.size_bytes == (tmp_path / "file").stat().st_size
    assert all(tensor.data_ptr() % tensor.element_size() == 0 for tensor in found.values())


def test_a_dtype_without_a_word_is_named_and_leaves_nothing_behind(tmp_path: Path) -> None:
    odd = replace(snapshot().engine, buffers={"wave": torch.zeros(2, dtype=torch.complex128)})
    with pytest.raises(StorageError, match=r"wave is torch\.complex128"):
        publish(tmp_path, replace(snapshot(), engine=odd))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("optimizer", [SGD(0.1, 0.9), AdamW(0.01), TorchOptimizer(torch.optim.Adam, 0.01)])
@pytest.mark.parametrize("policy", [Policy.fp16(), Policy.fp32()], ids=lambda policy: policy.name)
def test_a_run_goes_on_from_files_bit_for_bit(tmp_path: Path, optimizer, policy) -> None:
    """With dropout, seeded by the step as in a run, and from another process's random state."""

    def stepper_of() -> Stepper:
        return Stepper(nn.Sequential(conv_net(), nn.Dropout(0.5)), optimizer, policy, reference_count=4)

    def run(stepper: Stepper, steps: range) -> None:
        for step in steps:
            seed_compute(0, step, 0, 0, ALONE.device)
            train(stepper, *features(4, step, (3, 8, 8)))

    torch.manual_seed(1)
    whole = stepper_of()
    run(whole, range(3))
    path = publish(tmp_path, taken(whole, 3))
    run(whole, range(3, 6))

    second = stepper_of()
    torch.manual_seed(99)
    identity = identity_of(composed(), second.model, 100)
    resumption = resume(ALONE, tmp_path, "auto", identity)
    assert resumption.path == path
    assert resumption.snapshot is not None
    restore(second, resumption.snapshot, ALONE)
    run(second, range(3, 6))
    assert state_digest(second, counters=True) == state_digest(whole, counters=True)


@pytest.mark.parametrize("part", ["weights", "optimizer", "buffers", "counters"])
def test_leaving_any_part_out_of_the_file_is_noticed(tmp_path: Path, part) -> None:
    """With that part as in a fresh run, the resumed one ends elsewhere."""

    def stepper_of() -> Stepper:
        return Stepper(conv_net(), AdamW(0.01), learning_rates=[0.1 / (1 + step) for step in range(6)])

    torch.manual_seed(2)
    first = stepper_of()
    for step in range(3):
        train(first, *features(4, step, (3, 8, 8)))
    whole = load(publish(tmp_path, taken(first, 3)))
    torch.manual_seed(99)
    fresh = taken(stepper_of(), 0)
    lacking = replace(whole, engine=replace(whole.engine, **{part: getattr(fresh.engine, part)}))
    digests = []
    for made in (whole, lacking):
        second = stepper_of()
        restore(second, made, ALONE)
        for step in range(3, 6):
            train(second, *features(4, step, (3, 8, 8)))
        digests.append(state_digest(second))
    assert digests[0] != digests[1]


def test_a_snapshot_is_a_copy() -> None:
    model = conv_net().to(memory_format=torch.channels_last)
    stepper = Stepper(model, AdamW(0.01), reference_count=4)
    before = taken(stepper, 0)
    kept = {name: tensor.clone() for name, tensor in before.engine.weights.items()}
    train(stepper, *features(4, 0, (3, 8, 8)))
    assert all(torch.equal(kept[name], tensor) for name, tensor in before.engine.weights.items())


def test_tied_weights_are_kept_once_and_named_twice(tmp_path: Path) -> None:
    stepper = Stepper(Odd(), AdamW(0.01))
    made = taken(stepper, 0)
    assert made.names["tied.weight"] == made.names["first.weight"] == "first.weight"
    assert "tied.weight" not in made.engine.weights
    assert set(made.names) == set(stepper.model.state_dict())
    assert same(load(publish(tmp_path, made)), made)


def averaged(made: Snapshot, **changes: Any) -> Snapshot:
    """As an evaluation leaves it: the ranks' buffers are those of all."""
    buffers = {"norm.count": torch.tensor(9)}
    return replace(made, engine=replace(made.engine, buffers=buffers), rank_buffers={}, **changes)


@pytest.mark.parametrize("can_exchange", [True, False])
def test_an_evaluation_that_was_owed_is_added(tmp_path: Path, monkeypatch, can_exchange) -> None:
    """A run that stopped before its evaluation resumes with it, and saves the same weights as the best."""
    if not can_exchange:
        monkeypatch.setattr("launcher.checkpoint.storage.RENAME_EXCHANGE", 1 << 20)
    path = publish(tmp_path, snapshot(7))
    evaluated = averaged(snapshot(7, metric=0.9))
    assert publish(tmp_path, evaluated) == path
    assert same(load(path), evaluated)
    assert [entry.name for entry in tmp_path.iterdir()] == ["step-00000007"]


# Order, choice, retention


def test_the_newest_is_that_of_the_highest_step_whatever_the_clock_says(tmp_path: Path) -> None:
    for age, path in enumerate(publish_steps(tmp_path, 9, 10, 99_999_999, 100_000_000)):
        os.utime(path, (1e9 - age, 1e9 - age))
    newest = newest_intact(tmp_path).path
    assert newest is not None
    assert newest.name == "step-100000000"


def with_best(step: int, best: int | None) -> Snapshot:
    """The state after `step` of a run whose best evaluation was after `best`."""
    found = None if best is None else BestEvaluation("accuracy", 0.9, step=best)
    return replace(snapshot(step), extra=RunExtras(best=found))


def test_the_best_is_that_which_the_run_names_and_is_kept(tmp_path: Path) -> None:
    bests = {1: None, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4}
    for step, best in bests.items():
        write_checkpoint(tmp_path, 1, with_best(step, best), threading.Event())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000004", "step-00000006"]
    assert best_intact(tmp_path) == tmp_path / "step-00000004"


def test_a_best_that_is_damaged_or_was_never_saved_is_none(tmp_path: Path) -> None:
    damaged, _ = (publish(tmp_path, with_best(step, 1)) for step in (1, 2))
    (damaged / WEIGHTS).write_bytes(b"")
    assert best_intact(tmp_path) is None
    publish(tmp_path, with_best(4, 3))
    assert best_intact(tmp_path) is None


@pytest.mark.parametrize(("best", "kept"), [(None, [4, 5]), (2, [2, 4, 5]), (4, [4, 5])])
def test_retention_keeps_the_newest_and_the_best(tmp_path: Path, best, kept) -> None:
    paths = publish_steps(tmp_path, 1, 2, 3, 4, 5)
    (tmp_path / ".unfinished-step-00000006-ab").mkdir()
    apply_retention(tmp_path, 2, None if best is None else paths[best - 1])
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"step-0000000{step}" for step in kept]


def test_resuming_an_earlier_checkpoint_renames_the_later_ones(tmp_path: Path) -> None:
    directory = tmp_path / "checkpoints"
    publish_steps(directory, 1, 2, 3)
    resumption = resume(ALONE, directory, str(directory / "step-00000002"), IDENTITY)
    assert resumption.snapshot is not None
    assert resumption.snapshot.progress.step == 2
    names = sorted(path.name for path in directory.iterdir())
    assert names == ["replaced-step-00000003", "step-00000001", "step-00000002"]
    publish_steps(directory, 3, 4)
    back = resume(ALONE, directory, str(directory / "replaced-step-00000003"), IDENTITY)
    assert same(back.snapshot, snapshot(3))
    assert newest_intact(directory).path == directory / "step-00000003", "what a restart resumes"
    assert sorted(path.name for path in directory.iterdir())[:2] == [
        "replaced-step-00000003-2",
        "replaced-step-00000004",
    ], "also that of the same step"
    assert resume(ALONE, directory, "never", IDENTITY).snapshot is None
    assert newest_intact(directory).path is None


def test_a_chosen_checkpoint_of_any_name_is_resumed_and_the_later_ones_are_renamed(tmp_path: Path) -> None:
    directory = tmp_path / "checkpoints"
    publish_steps(directory, 1, 2)
    (directory / "step-00000001").rename(directory / "good")
    found = resume(ALONE, directory, str(directory / "good"), IDENTITY)
    assert same(found.snapshot, snapshot(1))
    assert found.path == directory / "step-00000001", "where it is now"
    assert sorted(path.name for path in directory.iterdir()) == ["replaced-step-00000002", "step-00000001"]


def test_a_copy_beside_the_checkpoints_is_as_that_of_another_run(tmp_path: Path) -> None:
    """Its steps come before those that the run has saved, which it goes on from."""
    directory, kept = tmp_path / "checkpoints", tmp_path / "kept"
    publish_steps(kept, 1)
    publish_steps(directory, 2)
    found = resume(ALONE, directory, str(kept / "step-00000001"), IDENTITY)
    assert found.path == directory / "step-00000002"


@pytest.mark.parametrize(("wish", "discards"), [("auto", False), ("never", True), ("step-00000001", True)])
def test_it_is_recorded_that_later_checkpoints_are_set_aside(tmp_path: Path, wish, discards) -> None:
    """So that a restart of the same command resumes what it has trained since then."""
    checkpoints = tmp_path / "checkpoints"
    publish_steps(checkpoints, 1, 2)
    assert not has_discarded(tmp_path)
    resume(ALONE, checkpoints, str(checkpoints / wish) if "-" in wish else wish, IDENTITY)
    assert has_discarded(tmp_path) is discards


def test_a_run_begins_from_anothers_checkpoint_and_goes_on_from_its_own(tmp_path: Path) -> None:
    old, new = tmp_path / "old" / "checkpoints", tmp_path / "new" / "checkpoints"
    publish_steps(old, 1, 2)
    for wish in (old.parent, old, old / "step-00000002"):
        assert same(resume(ALONE, new, str(wish), IDENTITY).snapshot, snapshot(2))
    publish_steps(new, 3)
    assert resume(ALONE, new, str(old), IDENTITY).path == new / "step-00000003"
    (new / "step-00000003" / WEIGHTS).unlink()
    again = resume(ALONE, new, str(old), IDENTITY)
    assert again.path == old / "step-00000002"
    assert list(again.damaged) == ["step-00000003"], "it is said why its own one is not taken"
    assert [path.name for path in new.iterdir()] == ["damaged-step-00000003"]
    assert len(list(old.iterdir())) == 2


# Writing behind the training


def checkpointer_of(directory: Path, model: nn.Module) -> Checkpointer:
    return Checkpointer(directory, 2, ALONE, Stepper(model, SGD(0.1)), None, IDENTITY)


def begin_to_save(checkpointer: Checkpointer, step: int) -> None:
    assert checkpointer.save(TrainProgress(0, step, 4 * step), None, RunExtras()) is None


def test_a_write_pauses_until_it_is_awaited(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("launcher.checkpoint.async_writer.SHARE", 1e-9)
    monkeypatch.setattr("launcher.checkpoint.async_writer.LONGEST_S", 3600.0)
    model = nn.Linear(1000, 1000)  # 4 MB: the first pause takes minutes
    with closing(checkpointer_of(tmp_path, model)) as checkpointer:
        begin_to_save(checkpointer, 1)
        while not any(file.stat().st_size for file in tmp_path.glob("*/weights.safetensors")):
            time.sleep(0.001)
        assert checkpointer.poll() is None
        report = checkpointer.wait()
    assert report is not None
    weights = load(tmp_path / "step-00000001").engine.weights
    assert torch.equal(weights["weight"].half(), model.weight)


def test_a_write_may_pause_after_each_megabyte_whatever_its_tensors(tmp_path: Path) -> None:
    tensors = {f"{index}": torch.full((1000,), index, dtype=torch.float32) for index in range(300)}
    tensors["large"] = torch.rand(700_000)
    pauses: list[None] = []
    written = write_tensors(tmp_path / "file", tensors, {}, lambda: pauses.append(None))
    assert written == write_tensors(tmp_path / "directly", tensors, {})
    assert written.size_bytes // 2**21 <= len(pauses) <= written.size_bytes // 2**20
    assert written.size_bytes == (tmp_path / "file").stat().st_size
    assert hashlib.sha256((tmp_path / "file").read_bytes()).hexdigest() == written.sha256


def test_at_most_one_is_on_its_way_and_each_is_reported_once(tmp_path: Path, monkeypatch) -> None:
    started, may_finish = threading.Event(), threading.Event()

    def slow(directory: Path, taken: Snapshot, pause: Pause) -> Path:
        started.set()
        assert may_finish.wait(10)
        return publish(directory, taken, pause)

    monkeypatch.setattr("launcher.checkpoint.async_writer.publish", slow)
    with closing(checkpointer_of(tmp_path, conv_net())) as checkpointer:
        begin_to_save(checkpointer, 1)
        assert started.wait(10)
        assert checkpointer.poll() is None  # the training continues meanwhile
        assert not list(tmp_path.iterdir())
        threading.Timer(0.05, may_finish.set).start()
        first = checkpointer.save(TrainProgress(0, 2, 8), None, RunExtras())
        assert first is not None
        assert (tmp_path / "step-00000001").exists()
        assert (first.step, first.error) == (1, None)
        second = checkpointer.wait()
        assert second is not None
        assert second.step == 2
        assert second.size_bytes == sum(file.stat().st_size for file in second.path.iterdir())
        assert checkpointer.wait() is checkpointer.poll() is None
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("checkpoint")]


def test_closing_waits_for_the_last_one(tmp_path: Path) -> None:
    with closing(checkpointer_of(tmp_path, conv_net())) as checkpointer:
        begin_to_save(checkpointer, 1)
    assert load(tmp_path / "step-00000001").progress.step == 1


def test_when_one_is_due(monkeypatch) -> None:
    now = 1000.0
    monkeypatch.setattr("launcher.checkpoint.async_writer.time.monotonic", lambda: now)
    due = SaveSchedule(every_steps=3, every_s=60)
    assert [step for step in range(1, 8) if due.after_step(step)] == [3, 6]
    assert not due.by_clock()
    now += 60
    assert due.by_clock()
    due.mark_started()
    assert not due.by_clock()
    never = SaveSchedule(None, None)
    now += 1e9
    assert not never.by_clock()
    assert not never.after_step(1)


@pytest.mark.parametrize("every_s", [600, None])
def test_a_write_that_failed_is_tried_again_within_a_minute(monkeypatch, every_s) -> None:
    now = 1000.0
    monkeypatch.setattr("launcher.checkpoint.async_writer.time.monotonic", lambda: now)
    due = SaveSchedule(None, every_s)
    due.mark_failed()
    assert not due.by_clock()
    now += 60
    assert due.by_clock()
    due.mark_started()
    assert not due.by_clock()


# Refusals


def other(**changes: str) -> dict[str, str]:
    """That of another run; a key's dot is written as two underscores."""
    return IDENTITY | {key.replace("__", "."): value for key, value in changes.items()}


@pytest.mark.parametrize(
    ("identity", "text"),
    [
        (other(recipe__name="bert"), r"recipe\.name is cnn there and bert here"),
        (other(seed="1"), "seed is 0 there and 1 here"),
        (other(num_samples="90"), "num_samples is 100 there and 90 here"),
        (IDENTITY | {"tensor fc.bias": "[5]"}, r"tensor fc\.bias is \[3\] there and \[5\] here"),
        (IDENTITY | {"tensor new": "[5]"}, r"tensor new is missing there and \[5\] here"),
        (
            other(seed="1", recipe__name="bert", model__name="large"),
            r"small there and large here\. A run",
        ),
        (
            other(seed="1", recipe__name="bert", model__name="large", optim__name="sgd"),
            "small there and large here and 1 more",
        ),
    ],
)
def test_another_runs_checkpoint_is_refused(tmp_path: Path, identity, text) -> None:
    (path,) = publish_steps(tmp_path, 1)
    with pytest.raises(ConfigError, match=f"^{path} belongs to another run: .*{text}"):
        resume(ALONE, tmp_path, "auto", identity)
    assert resume(ALONE, tmp_path, "auto", IDENTITY).snapshot is not None


def test_a_run_may_start_from_another_runs_checkpoint_of_another_precision(tmp_path: Path) -> None:
    """Of the run that began there, in its own directory, it must be the same."""
    (there,) = publish_steps(tmp_path / "there" / "checkpoints", 1)
    own, identity = tmp_path / "own" / "checkpoints", other(precision__name="fp32")
    assert resume(ALONE, own, str(there), identity).snapshot is not None
    with pytest.raises(ConfigError, match=r"precision\.name is fp16 there and fp32 here"):
        resume(ALONE, there.parent, str(there), identity)
    with pytest.raises(ConfigError, match="seed is 0 there and 1 here"):
        resume(ALONE, own, str(there), other(precision__name="fp32", seed="1"))


def test_the_identity_of_a_run_comes_from_its_config_and_model() -> None:
    model = conv_net()
    identity = identity_of(composed(), model, 1437)
    assert identity["recipe.name"] == "resnet18"
    assert identity["num_samples"] == "1437"
    assert identity["tensor 0.weight"] == "[8, 3, 3, 3]"
    assert identity["tensor 1.running_mean"] == "[8]"
    assert identity == identity_of(composed("train.epochs=99", "optim.lr=0.5"), model, 1437)
    assert identity | {"seed": "1"} == identity_of(composed("seed=1"), model, 1437)


@pytest.mark.parametrize("number", [3, 7])
def test_another_format_is_refused_and_left_alone(tmp_path: Path, number) -> None:
    publish_steps(tmp_path, 1, 2)
    manifest = tmp_path / "step-00000002" / MANIFEST
    content = json.loads(manifest.read_bytes())["content"]
    changed = {**content, "format": number, "files": {"shards": "of another kind"}}
    manifest.write_bytes(manifest_text(changed))
    with pytest.raises(ConfigError, match=f"format {number}; this version reads format 6"):
        resume(ALONE, tmp_path, "auto", IDENTITY)
    assert (tmp_path / "step-00000002").exists()


class Canary:
    """Unpickling it creates a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return (open, (str(self.path), "w"))


@pytest.mark.parametrize("name", [WEIGHTS, OPTIMIZER, STATE, MANIFEST])
@pytest.mark.parametrize("demanded", [False, True])
def test_a_pickle_in_place_of_a_file_is_refused_and_not_executed(tmp_path: Path, name, demanded) -> None:
    (path,) = publish_steps(tmp_path / "checkpoints", 1)
    pickled = pickle.dumps(Canary(tmp_path / "executed"))
    if name == MANIFEST:
        (path / name).write_bytes(pickled)
    else:
        forge(path, name, pickled)
    if name == MANIFEST and not demanded:
        assert "manifest.json" in str(resume(ALONE, tmp_path / "checkpoints", "auto", IDENTITY).damaged)
    else:
        wish = str(path) if demanded else "auto"
        with pytest.raises(StorageError, match=str(path)):
            resume(ALONE, tmp_path / "checkpoints", wish, IDENTITY)
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize("name", [WEIGHTS, STATE])
def test_nonsense_with_a_valid_manifest_is_refused(tmp_path: Path, name) -> None:
    (path,) = publish_steps(tmp_path, 1)
    forge(path, name, b"\xff\xfe")
    with pytest.raises(StorageError, match="Only safetensors and JSON are read"):
        load(path)


def test_a_manifest_cannot_name_files_elsewhere(tmp_path: Path) -> None:
    (path,) = publish_steps(tmp_path, 1)
    content = json.loads((path / MANIFEST).read_bytes())["content"]
    content["files"]["../../secret"] = content["files"].pop(STATE)
    (path / MANIFEST).write_bytes(manifest_text(content))
    assert "it lists ../../secret" in verify(path)[0]


def test_only_a_directory_is_a_checkpoint(tmp_path: Path) -> None:
    (path,) = publish_steps(tmp_path, 1)
    link, file = tmp_path / "step-00000002", tmp_path / "step-00000003"
    link.symlink_to(path)
    file.touch()
    assert verify(link) == ["step-00000002 is a symbolic link"]
    assert verify(file) == ["step-00000003 is not a directory"]


def test_a_link_to_a_checkpoint_is_refused_and_left_alone(tmp_path: Path) -> None:
    outside, inside = tmp_path / "outside", tmp_path / "run" / "checkpoints"
    publish_steps(outside, 1)
    inside.mkdir(parents=True)
    (inside / "step-00000001").symlink_to(outside / "step-00000001")
    with pytest.raises(ConfigError, match=r"is a symbolic link to .* remove the link"):
        resume(ALONE, inside, "auto", IDENTITY)
    assert (inside / "step-00000001").is_symlink()


@pytest.mark.parametrize(
    ("wish", "kind", "text"),
    [
        ("nowhere", ConfigError, "there is no such directory"),
        ("empty", StorageError, "there is no intact checkpoint"),
        ("damaged", StorageError, r"there is no intact checkpoint\. Damaged: step-00000003"),
        ("damaged/checkpoints/step-00000003", StorageError, r"Damaged: step-00000003 \(weights"),
    ],
)
def test_a_demanded_resume_without_an_intact_checkpoint(tmp_path: Path, wish, kind, text) -> None:
    (tmp_path / "empty").mkdir()
    (path,) = publish_steps(tmp_path / "damaged" / "checkpoints", 3)
    (path / WEIGHTS).write_bytes(b"")
    with pytest.raises(kind, match=text):
        resume(ALONE, tmp_path / "mine", str(tmp_path / wish), IDENTITY)
    assert path.exists()  # it is another run's: nothing is renamed there


def test_a_state_for_another_optimizer_is_a_config_error() -> None:
    made = taken(Stepper(conv_net(), SGD(0.1, 0.9)), 0)
    with pytest.raises(ConfigError, match="of the optimizer states"):
        restore(Stepper(conv_net(), AdamW(0.1)), made, ALONE)


# No pickle

UNPICKLING = {
    "pickle",
    "cPickle",
    "_pickle",
    "dill",
    "cloudpickle",
    "joblib",
    "shelve",
    "marshal",
    "torch.package",
}
FORBIDDEN = {
    "torch.load",
    "torch.save",
    "dist.broadcast_object_list",
    "dist.all_gather_object",
    "dist.gather_object",
    "dist.scatter_object_list",
    "dist.send_object_list",
    "dist.recv_object_list",
}


# Between the ranks of a job, with weights_only=True: tests/evaluation/test_transport.py.
# The python batches of CIFAR-10, by known names alone: tests/data/images/test_cifar_batches.py.
# A loop of one's own saves as torch does, and loads with weights_only=True, which admits no code.
EXCEPTION = {
    ROOT / "recipes/examples/flat_loop.py": {"torch.load", "torch.save", "weights_only"},
    ROOT / "launcher/evaluation/transport.py": {"pickle", "torch.load", "torch.save", "weights_only"},
    ROOT / "launcher/data/images/cifar_batches.py": {"pickle"},
}


def unpicklers(source: str) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names} & UNPICKLING
        elif isinstance(node, ast.ImportFrom):
            found |= {node.module or ""} & UNPICKLING
            found |= {f"{node.module}.{alias.name}" for alias in node.names} & FORBIDDEN
        elif isinstance(node, ast.Attribute):
            found |= {ast.unparse(node), ast.unparse(node).replace("torch.distributed.", "dist.")} & FORBIDDEN
        elif isinstance(node, ast.keyword) and node.arg in ("allow_pickle", "weights_only"):
            found.add(node.arg)
    return found


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from pickle import loads",
        "import torch\ntorch.load(path)",
        "from torch import save",
        "dist.all_gather_object(a, b)",
        "np.load(f, allow_pickle=True)",
    ],
)
def test_the_search_for_pickle_can_find(source) -> None:
    assert unpicklers(source)


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize(
    "folder", [ROOT / "launcher", ROOT / "recipes", ROOT / "scripts"], ids=lambda folder: folder.name
)
def test_nothing_can_unpickle(folder: Path) -> None:
    files = list(folder.rglob("*.py"))
    assert files
    found = {file: unpicklers(file.read_text()) - EXCEPTION.get(file, set()) for file in files}
    assert {str(file): names for file, names in found.items() if names} == {}
