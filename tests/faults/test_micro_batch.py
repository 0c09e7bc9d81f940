"""data.micro_batch=auto: found before the first step, on all ranks alike, without a trace in the run."""

from __future__ import annotations

import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import yaml

from launcher.engine.optim.updater import Updater
from launcher.engine.wire.reducer import Reducer
from launcher.engine.wire.transports import Bucket
from launcher.report.run_record import RunRecord
from tests.faults.launching import Ended, run
from tests.faults.usercode import (
    both,
    hungry,
    lacking_memory,
    send_signal,
    stop_after,
)

pytestmark = pytest.mark.timeout(90)
AUTO = "data.micro_batch=auto"
SHORT = ("train.max_steps=4", "train.eval_every_steps=3")


def decisions(ended: Ended, topic: str) -> list[dict[str, Any]]:
    return [event for event in ended.events("decision") if event["topic"] == topic]


def written(ended: Ended) -> Any:
    """data.micro_batch of config.yaml."""
    return yaml.safe_load((ended.directory / "config.yaml").read_text())["data"]["micro_batch"]


RUNS = {
    "on two ranks, one of which has less": (2, (), (1,), [[8, False], [2, True], [3, True], [4, False]]),
    "in loader processes": (1, ("recipe.uses=noisy_indexed", "data.workers=1"), (0,), None),
    "from a stream": (1, ("recipe.uses=noisy_streamed", "data.workers=0"), (0,), None),
    "sharded": (2, ("wire.shard=true",), (0, 1), None),
}
SLOW = ("in loader processes", "from a stream", "sharded")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else []) for name in RUNS]
)
def test_the_run_ends_with_the_bits_of_one_with_the_number_given_by_hand(tmp_path: Path, name) -> None:
    ranks, words, small, tried = RUNS[name]
    found = run(tmp_path / "auto", *SHORT, *words, AUTO, ranks=ranks, user_code=lacking_memory(3, *small))
    size = found.result["micro_batch"]
    assert size == 3
    assert (
        found.digest == run(tmp_path / "hand", *SHORT, *words, f"data.micro_batch={size}", ranks=ranks).digest
    )
    (decision,) = decisions(found, "micro-batch")
    assert decision["micro_batch"] == written(found) == size
    assert decision["tried"] == tried if tried else len(decision["tried"]) <= 8
    assert "data.micro_batch=auto: 3 per rank" in found.outputs[0]


@pytest.mark.slow
def test_a_resume_takes_the_number_of_the_run_and_tries_nothing(tmp_path: Path) -> None:
    """It differs from what would be found now: everything fits in the second process."""
    words = ("train.max_steps=10", AUTO)
    whole = run(tmp_path / "whole", *words, user_code=lacking_memory(7, 0))
    small = both(lacking_memory(7, 0), stop_after(8, passes_per_step=3))
    assert run(tmp_path / "run", *words, user_code=small).codes == [75]
    resumed = run(tmp_path / "run", *words)
    assert resumed.digest == whole.digest
    assert resumed.result["micro_batch"] == whole.result["micro_batch"] == written(resumed) == 6
    assert decisions(resumed, "micro-batch")[-1]["text"] == "6 per rank, as in the run so far"
    by_hand = run(tmp_path / "run", "train.max_steps=11", "data.micro_batch=5")
    assert by_hand.result["micro_batch"] == 4, "16 in fewest pieces of at most 5"


def test_where_not_even_one_sample_fits_all_ranks_leave_with_exit_4(tmp_path: Path) -> None:
    """Rank 0 has room for one, from which its batch norm cannot compute a variance."""
    ended = run(tmp_path / "run", AUTO, ranks=2, user_code=lacking_memory(0, 1))
    assert ended.codes == [4, 4], ended
    assert (
        "not even 1 sample per rank and forward pass fits in memory: rank 0: the recipe" in ended.outputs[0]
    )
    assert "rank 1: GPU memory: no room for 1 samples. Choose a smaller model" in ended.outputs[0]
    assert ended.result["exit"] == 4


# train.on_oom


AVERAGED = "ema={decay: 0.9, every_steps: 2}"
HALVED: dict[str, tuple[int, tuple[str, ...], tuple[int, ...], int]] = {
    # ranks, words, which of them lack memory, and in which pass first
    "one of two, in mid-run": (2, (), (1,), 6),
    "both, in the first step": (2, ("wire.shard=true",), (0, 1), 0),
    "the leader, before an evaluation": (
        2,
        ("wire.shard=true", "train.eval_every_steps=7", AVERAGED),
        (0,),
        6,
    ),
    "alone, in loader processes": (1, ("recipe.uses=noisy_indexed", "data.workers=2"), (0,), 6),
    "alone, from a stream": (1, ("recipe.uses=noisy_streamed", "data.workers=1"), (0,), 6),
    "one of two, whose first steps draw less": (2, ("recipe.uses=noisy_later",), (1,), 6),
    "alone, in micro-batches already": (1, ("data.micro_batch=8", "precision=fp32"), (0,), 13),
}
IN_THE_DEFAULT_SET = "one of two, in mid-run"


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name == IN_THE_DEFAULT_SET else [pytest.mark.slow]) for name in HALVED],
)
def test_a_halved_run_ends_as_one_that_starts_halved_from_the_step_before(tmp_path: Path, name) -> None:
    ranks, words, lacking, first = HALVED[name]
    micro = 8 if "already" in name else 16 // ranks
    step = first // (16 // ranks // micro) + 1
    common = ("train.max_steps=12", f"checkpoint.every_steps={step - 1 or 100}", *words)
    # Once only: the rank that ran out has to abandon the next step, in which it would have room again.
    small = lacking_memory(micro // 2, *lacking, passes=range(first, 100), once="mid-run" in name)
    ended = run(tmp_path / "run", *common, ranks=ranks, user_code=small)
    assert ended.codes == [0] * ranks, ended
    assert ended.result["micro_batch"] == written(ended) == micro // 2
    assert RunRecord.read(ended.directory).config["data.micro_batch"] == (
        "8" if "already" in name else "null"
    )
    (event,) = ended.events("out_of_memory")
    assert (event["ranks"], event["dropped"], event["micro_batch"]) == (list(lacking), step, micro // 2)
    (warning,) = ended.warnings
    assert f"rank {lacking[0]} ran out of GPU memory: no room for {micro} samples" in warning
    steps = [each["step"] for each in ended.events("step")]
    assert steps == sorted(set(steps)) == [*range(1, 13)]
    assert ended.result["skipped_steps"] == 0

    from_there = () if step == 1 else (f"checkpoint.resume={ended.checkpoints[step - 1]}",)
    halved = (*common, f"data.micro_batch={micro // 2}", *from_there)
    from_the_start = run(tmp_path / "halved", *halved, ranks=ranks)
    assert from_the_start.digest == ended.digest
    assert from_the_start.result.get("ema_sha256") == ended.result.get("ema_sha256")
    assert ("ema_sha256" in ended.result) == (AVERAGED in words)


@pytest.mark.slow
def test_a_resume_after_it_uses_the_halved_micro_batch(tmp_path: Path) -> None:
    small = lacking_memory(8, 0, passes=range(4, 100))
    whole = run(tmp_path / "whole", "train.max_steps=12", user_code=small)
    stopped = run(tmp_path / "run", "train.max_steps=12", user_code=both(small, stop_after(14)))
    assert stopped.codes == [75], stopped
    resumed = run(tmp_path / "run", "train.max_steps=12", user_code=lacking_memory(8, 0))
    assert resumed.digest == whole.digest
    assert resumed.result["micro_batch"] == 8
    assert len(resumed.warnings) == 1, "of the first process: the second did not run out"
    assert decisions(resumed, "micro-batch")[-1]["text"] == "8 per rank, as in the run so far"


def test_a_second_shortage_ends_the_run_with_exit_4(tmp_path: Path) -> None:
    ended = run(tmp_path / "run", "train.max_steps=12", user_code=lacking_memory(4, 0, passes=range(3, 100)))
    assert ended.codes == [4], ended
    assert (
        "step 4. The micro-batch was halved from 16 to 8 in step 4, and that is done once" in ended.outputs[0]
    )
    assert "Set data.micro_batch=auto" in ended.outputs[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "above", "first", "text"),
    [
        (("train.on_oom=stop",), 4, 3, "Lower data.micro_batch"),
        (
            ("data.micro_batch=1",),
            0,
            0,
            "The micro-batch is 1 already, which cannot be halved. What helps",
        ),
    ],
)
def test_a_run_that_cannot_be_halved_or_may_not_ends_with_exit_4(
    tmp_path: Path, words, above, first, text
) -> None:
    ended = run(
        tmp_path / "run", *words, ranks=2, user_code=lacking_memory(above, 0, 1, passes=range(first, 100))
    )
    assert ended.codes == [4, 4], ended
    assert text in ended.outputs[0]
    assert ended.events("out_of_memory") == []


def no_room(*values: object, **options: object) -> None:
    raise torch.OutOfMemoryError("no room for 8 GiB")


def lack_memory_in_the_update() -> None:
    Updater.step = no_room  # type: ignore[method-assign]


def lack_memory_in_the_update_of_rank_1() -> None:
    step = Updater.step
    Updater.step = lambda *given: no_room() if dist.get_rank() else step(*given)  # type: ignore[method-assign]


def lack_memory_in_the_exchange() -> None:
    Reducer.flush = no_room  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("prepare", "ranks", "words", "text"),
    [
        (
            lack_memory_in_the_update,
            2,
            ("optim=adamw",),
            "in the update of step 1: no room for 8 GiB. What helps: wire.shard=true divides masters and "
            "optimizer states among the ranks; optim=sgd has fewer states than adamw; a smaller data.micro",
        ),
        (
            lack_memory_in_the_update_of_rank_1,
            2,
            (),
            "rank 1 ran out of GPU memory in the update of step 1: no room for 8 GiB.",
        ),
        pytest.param(
            lack_memory_in_the_exchange,
            1,
            (),
            "in the exchange of gradients of step 1: no room for 8 GiB. What helps: a smaller wire.bucket_mb",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_shortage_outside_the_passes_names_its_place_and_what_helps(
    tmp_path: Path, prepare, ranks, words, text
) -> None:
    ended = run(tmp_path / "run", "train.max_steps=2", *words, ranks=ranks, prepare=prepare)
    assert ended.codes == [4] * ranks, ended
    assert sum(output.count(text) for output in ended.outputs) == 1, ended
    assert text in ended.result["error"]


def lack_memory_once_for_the_last_bucket() -> None:
    launch, short = Reducer._launch, [True]

    def launching(self: Reducer, bucket: Bucket) -> None:
        if self._rank == 1 and bucket is self.buckets[-1] and short:
            short.clear()
            no_room()
        launch(self, bucket)

    Reducer._launch = launching  # type: ignore[method-assign]


def test_a_shortage_in_the_exchange_of_one_rank_halves_the_micro_batch(tmp_path: Path) -> None:
    ended = run(tmp_path / "run", "train.max_steps=3", ranks=2, prepare=lack_memory_once_for_the_last_bucket)
    assert ended.codes == [0, 0], ended
    (event,) = ended.events("out_of_memory")
    assert (event["ranks"], event["dropped"], event["micro_batch"]) == ([1], 1, 4)
    assert ended.result["skipped_steps"] == 0


@pytest.mark.slow
def test_a_request_to_save_in_a_dropped_step_is_kept(tmp_path: Path) -> None:
    """By the rank that is not short: its vote is in the dropped step."""
    save = partial(send_signal, number=signal.SIGUSR1, passes=2, rank=0)
    small = lacking_memory(4, 1, passes=range(3, 100))
    words = ("train.max_steps=12", "checkpoint.every_steps=null")
    ended = run(tmp_path / "run", *words, ranks=2, user_code=both(save, small))
    assert ended.codes == [0, 0], ended
    assert sorted(ended.checkpoints) == [5, 12]


@pytest.mark.slow
def test_an_evaluation_that_lacks_memory_begins_again_in_smaller_batches(tmp_path: Path) -> None:
    """On one rank of two: in the trial before the first step, and again in the first evaluation."""
    words = ("train.max_steps=6", "train.eval_every_steps=3")
    plain = run(tmp_path / "plain", *words, ranks=2)
    ended = run(tmp_path / "run", *words, ranks=2, user_code=lacking_memory(3, 1, training=False))
    assert ended.digest == plain.digest
    for expected, found in zip(plain.events("eval"), ended.events("eval"), strict=True):
        assert found["loss"] == pytest.approx(expected["loss"], rel=1e-6)
        assert found["samples"] == expected["samples"]
    assert "ran out of GPU memory: no room for 7 samples; batches of 4 from now on" in ended.log(1)
    assert ended.log(1).count("from now on") == 2, "the second evaluation starts with what fits"


@pytest.mark.slow
def test_an_allocator_that_is_refused_memory_is_a_shortage_too(tmp_path: Path) -> None:
    """RLIMIT_AS on one of two ranks: 8 samples do not fit, and 4 do."""
    ended = run(tmp_path / "run", "train.max_steps=6", ranks=2, user_code=hungry(1, from_pass=3))
    assert ended.codes == [0, 0], ended
    assert ended.result["micro_batch"] == 4
    assert "rank 1 ran out of memory: [enforce fail" in ended.warnings[0]
    assert "DefaultCPUAllocator: can't allocate memory" in ended.warnings[0]
    found = run(tmp_path / "auto", "train.max_steps=6", AUTO, ranks=2, user_code=hungry(1, from_pass=0))
    assert found.result["micro_batch"] == 4
    assert found.digest == run(tmp_path / "hand", "train.max_steps=6", "data.micro_batch=4", ranks=2).digest
