"""Whatever ends a run, the same command resumes it and ends with the bits of the undisturbed run."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from launcher.checkpoint.run_state import RunExtras, Snapshot
from launcher.checkpoint.storage import load, publish
from tests.faults.launching import EPOCH, Ended, nothing, run
from tests.faults.noisy import SAMPLES
from tests.faults.usercode import kill, record, stop_after
from tests.limits import at_most
from tests.snapshots import comparable

pytestmark = pytest.mark.timeout(90)


def assert_same_course(ended: Ended, whole: Ended) -> None:
    """Each checkpoint that both have holds the same bits, counters and position included."""
    common = ended.checkpoints.keys() & whole.checkpoints.keys()
    assert common
    for step in sorted(common):
        mine, theirs = (load(each.checkpoints[step]) for each in (ended, whole))
        for part in ("engine", "rank_buffers", "progress", "metric"):
            assert comparable(getattr(mine, part)) == comparable(getattr(theirs, part)), (step, part)


def assert_each_step_once(ended: Ended) -> None:
    steps = [event["step"] for event in ended.events("step")]
    assert steps == list(range(1, 3 * EPOCH + 1))
    assert [event["step"] for event in ended.events("eval")] == [EPOCH, 2 * EPOCH, 3 * EPOCH]
    assert [event["event"] for event in ended.events()].count("end") == 1
    assert ended.events()[-1]["event"] == "end"


# G2: killed at any moment


def kill_before_the_result() -> None:
    from launcher.trainer import results

    results.result_of = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[assignment, return-value]


def kill_in_the_middle_of_a_save() -> None:
    """Before the third file of the checkpoint of step 20 has its last byte on the disk."""
    synced = os.fsync

    def fsync(descriptor: int) -> None:
        if "step-00000020" in (name := os.readlink(f"/proc/self/fd/{descriptor}")) and name.endswith(
            "state.json"
        ):
            os.kill(os.getpid(), signal.SIGKILL)
        synced(descriptor)

    os.fsync = fsync


@pytest.mark.slow
def test_killed_again_and_again_it_ends_as_if_nothing_had_happened(tmp_path: Path, undisturbed) -> None:
    whole = undisturbed(ranks=2)
    assert_each_step_once(whole)
    assert whole.warnings == []
    started_after = []
    for options in (
        {"user_code": kill(None, 0)},  # before there is anything
        {"user_code": kill(3, 1)},  # before the first checkpoint
        {"user_code": kill(8, 0)},
        {"user_code": kill(EPOCH, 1, training=False)},  # in an evaluation
        {"user_code": kill(EPOCH, 0)},  # in the first step after it
        {"prepare": kill_in_the_middle_of_a_save},
        {"user_code": kill(33, 1)},
        {"prepare": kill_before_the_result},
    ):
        ended = run(tmp_path / "run", ranks=2, **options)
        assert -signal.SIGKILL in ended.codes, ended
        assert 0 not in ended.codes, ended
        assert ended.seconds < at_most(15), "the others waited for the dead rank"
        started_after += [event["step"] for event in ended.events("start")][-1:]
        if ended.checkpoints:
            assert_same_course(ended, whole)
    last = run(tmp_path / "run", ranks=2)
    assert last.digest == whole.digest
    assert_same_course(last, whole)
    assert_each_step_once(last)
    # The newest may still have been on its way to the disk.
    assert started_after == sorted(started_after)
    assert len(set(started_after)) > 3
    assert last.events("start")[-1]["step"] == 3 * EPOCH
    assert not list((tmp_path / "run" / "checkpoints").glob(".*"))


# G4: stopped anywhere

VARIANTS: dict[str, tuple[int, tuple[str, ...], tuple[int, ...]]] = {
    # ranks, words, and after which steps it is stopped: the first, in mid-epoch, an evaluation owed
    "fp16 on two ranks": (2, (), (1, 8, EPOCH, 2 * EPOCH)),
    "fp32 in micro-batches": (1, ("precision=fp32", "data.micro_batch_size=6"), (7,)),
    "sharded, adamw, clipped, in groups": (
        2,
        (
            "ddp.shard_optimizer=true",
            "optim=adamw",
            "optim.clip_norm=0.5",
            'optim.groups=[{match:"outer.*",lr_scale:2}]',
            "optim.decay_norm_and_bias=false",
        ),
        (8,),
    ),
    "fp32 sums, overflows after the stop": (
        2,
        (
            "ddp.shard_optimizer=true",
            "precision.loss_scale.init_scale=16777216",
            "precision.loss_scale.growth_interval=2",
        ),
        (8, 18),
    ),
}


SLOW = ("fp16 on two ranks", "fp32 sums, overflows after the stop")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else []) for name in VARIANTS]
)
def test_stopped_anywhere_it_ends_as_if_nothing_had_happened(tmp_path: Path, undisturbed, name) -> None:
    ranks, words, stops = VARIANTS[name]
    whole = undisturbed(*words, ranks=ranks)
    for number, step in enumerate(stops):
        stop = stop_after(step, rank=number % ranks, passes_per_step=3 if "micro" in name else 1)
        ended = run(tmp_path / "run", *words, ranks=ranks, user_code=stop)
        assert ended.codes == [75] * ranks, ended
        assert ended.status["step"] == max(ended.checkpoints)
        if "overflows" not in name:
            assert ended.status["step"] == step
    last = run(tmp_path / "run", *words, ranks=ranks)
    assert last.digest == whole.digest
    assert last.warnings == []
    assert_same_course(last, whole)
    assert_each_step_once(last)
    keys = ("applied_steps", "skipped_steps", "scale", "metrics")
    assert {key: last.result[key] for key in keys} == {key: whole.result[key] for key in keys}
    if "overflows" in name:
        skipped = {event["step"] for event in last.events("overflow")}
        assert min(skipped) <= 8, "no overflow before the stop"
        assert max(skipped) > 20, "no overflow after it"


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("source", ["indexed", "streamed"])
def test_augmentation_and_dropout_are_the_same_with_any_number_of_loader_processes(
    tmp_path: Path, source
) -> None:
    """And after a stop in mid-epoch. The data, the transform and the model draw from all generators."""
    words = (f"recipe.uses=noisy_{source}", "train.max_steps=20", "data.micro_batch_size=6")
    whole = run(tmp_path / "whole", *words, "data.num_workers=0")
    for workers in (0, 2):
        directory = tmp_path / f"{workers}"
        stop = stop_after(8, passes_per_step=3)
        assert run(directory, *words, f"data.num_workers={workers}", user_code=stop).codes == [75]
        ended = run(directory, *words, f"data.num_workers={workers}")
        assert ended.digest == whole.digest
        assert_same_course(ended, whole)
        assert ended.result["metrics"] == whole.result["metrics"]


# G4: nothing that is saved is superfluous


def without_rank_buffers(taken: Snapshot) -> Snapshot:
    return replace(taken, rank_buffers={})


def without_one_of(part: str) -> Callable[[Snapshot], Snapshot]:
    """With zeros in place of the last tensor of a part."""

    def change(taken: Snapshot) -> Snapshot:
        tensors = dict(getattr(taken.engine, part))
        name = max(tensors)
        tensors[name] = torch.zeros_like(tensors[name])
        return replace(taken, engine=replace(taken.engine, **{part: tensors}))

    return change


def a_step_behind(taken: Snapshot) -> Snapshot:
    return replace(taken, progress=replace(taken.progress, step=taken.progress.step - 1))


def without_extra(taken: Snapshot) -> Snapshot:
    return replace(taken, extra=RunExtras())


LEFT_OUT: dict[str, Callable[[Snapshot], Snapshot]] = {
    "nothing": lambda taken: taken,
    "each rank's buffers": without_rank_buffers,
    "a weight": without_one_of("weights"),
    "an optimizer state": without_one_of("optimizer"),
    "the position": a_step_behind,
    "the best so far, and the time": without_extra,
}


@pytest.mark.slow
@pytest.mark.parametrize("part", LEFT_OUT)
def test_leaving_anything_out_is_noticed(tmp_path: Path, undisturbed, part) -> None:
    """The state of step 30 with that part left out, under a valid manifest: the run ends elsewhere."""
    whole = undisturbed(ranks=2)
    shutil.copytree(whole.directory, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    (tmp_path / "run" / "result.json").unlink()
    publish(tmp_path / "run" / "checkpoints", LEFT_OUT[part](load(whole.checkpoints[30])))
    ended = run(tmp_path / "run", ranks=2)
    assert ended.codes == [0, 0], ended
    saved = load(whole.checkpoints[30])
    assert (what_counts(ended, saved) == what_counts(whole, saved)) == (part == "nothing")


def seconds_of(saved: Snapshot) -> float:
    return float(saved.extra.callbacks["throughput_totals"]["seconds"])


def what_counts(ended: Ended, earlier: Snapshot) -> tuple[Any, ...]:
    last = load(ended.checkpoints[3 * EPOCH])
    has_the_time_before = seconds_of(last) > seconds_of(earlier)
    return ended.digest, last.progress, last.extra.best, has_the_time_before


# G20: another number of ranks


def global_batches(directory: Path, ranks: int) -> list[list[int]]:
    """The samples of each step, from what the ranks have written down."""
    parts = [(directory / f"rank{rank}").read_text().splitlines() for rank in range(ranks)]
    steps = [[line.split(": ") for line in lines] for lines in zip(*parts, strict=True)]
    assert all(len({passes for passes, _ in lines}) == 1 for lines in steps)
    return [[int(number) for _, numbers in lines for number in numbers.split()] for lines in steps]


def test_other_numbers_of_ranks_go_through_the_same_batches(tmp_path: Path) -> None:
    """Two ranks until step 8, three until step 20, then one."""
    seen = []
    for leg, (ranks, then) in enumerate(
        [(2, stop_after(8, rank=1)), (3, stop_after(20, rank=2)), (1, nothing)]
    ):
        (directory := tmp_path / f"leg{leg}").mkdir()
        ended = run(
            tmp_path / "run",
            "precision=fp32",
            ranks=ranks,
            user_code=partial(record, directory=directory, then=then),
        )
        assert ended.codes == [75 if leg < 2 else 0] * ranks, ended
        assert ended.warnings == []
        seen += global_batches(directory, ranks)
    (tmp_path / "alone").mkdir()
    whole = run(
        tmp_path / "whole",
        "precision=fp32",
        user_code=partial(record, directory=tmp_path / "alone", then=nothing),
    )
    assert seen == global_batches(tmp_path / "alone", 1)
    for start in range(0, 3 * EPOCH, EPOCH):
        epoch = [number for batch in seen[start : start + EPOCH] for number in batch]
        assert sorted(epoch) == list(range(SAMPLES))
    assert_each_step_once(ended)
    assert ended.result["metrics"]["val_loss"] == pytest.approx(whole.result["metrics"]["val_loss"], rel=0.2)
    assert load(ended.checkpoints[3 * EPOCH]).progress.samples == 3 * SAMPLES


# G25: the tracker knows it as one run


@pytest.mark.slow
def test_the_tracker_sees_one_run(tmp_path: Path) -> None:
    for user_code in (stop_after(8), nothing):
        ended = run(tmp_path / "run", "tracker=wandb", "tracker.mode=offline", user_code=user_code)
    assert ended.codes == [0], ended
    assert_each_step_once(ended)
    (run_id,) = {event["run_id"] for event in ended.events("decision") if event.get("run_id")}
    parts = list((tmp_path / "run" / "wandb").glob("offline-run-*"))
    assert len(parts) == 2
    assert {part.name.split("-")[-1] for part in parts} == {run_id}
