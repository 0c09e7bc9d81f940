"""data.micro_batch_size=auto: found before the first step, on all ranks alike, without a trace in the run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import yaml

from launcher.engine.grads.reducer import Reducer
from launcher.engine.optim.update import Updater
from tests.faults import parent
from tests.faults.launching import Ended, run
from tests.faults.usercode import (
    both,
    lacking_memory,
    stop_after,
)

pytestmark = pytest.mark.timeout(90)
AUTO = "data.micro_batch_size=auto"
SHORT = ("train.max_steps=4", "train.eval_every_steps=3")


def decisions(ended: Ended, topic: str) -> list[dict[str, Any]]:
    return [event for event in ended.events("decision") if event["topic"] == topic]


def written(ended: Ended) -> Any:
    """data.micro_batch_size of config.yaml."""
    return yaml.safe_load((ended.directory / "config.yaml").read_text())["data"]["micro_batch_size"]


RUNS = {
    "on two ranks, one of which has less": (2, (), (1,), [[8, False], [4, False], [2, True]]),
    "in loader processes": (1, ("recipe.uses=noisy_indexed", "data.num_workers=1"), (0,), None),
    "from a stream": (1, ("recipe.uses=noisy_streamed", "data.num_workers=0"), (0,), None),
    "sharded": (2, ("ddp.shard_optimizer=true",), (0, 1), None),
}
SLOW = ("in loader processes", "from a stream", "sharded")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else []) for name in RUNS]
)
def test_the_run_ends_with_the_bits_of_one_with_the_number_given_by_hand(tmp_path: Path, name) -> None:
    ranks, words, small, tried = RUNS[name]
    found = run(tmp_path / "auto", *SHORT, *words, AUTO, ranks=ranks, user_code=lacking_memory(3, *small))
    size = found.result["micro_batch"]
    assert size == 2
    assert (
        found.digest
        == run(tmp_path / "hand", *SHORT, *words, f"data.micro_batch_size={size}", ranks=ranks).digest
    )
    (decision,) = decisions(found, "micro-batch")
    assert decision["micro_batch"] == written(found) == size
    assert decision["tried"] == tried if tried else decision["tried"][-1] == [2, True]
    assert "data.micro_batch_size=auto: 2 per rank" in found.outputs[0]


@pytest.mark.slow
def test_a_resume_takes_the_number_of_the_run_and_tries_nothing(tmp_path: Path) -> None:
    """It differs from what would be found now: everything fits in the second process."""
    words = ("train.max_steps=10", AUTO)
    whole = run(tmp_path / "whole", *words, user_code=lacking_memory(7, 0))
    small = both(lacking_memory(7, 0), stop_after(8, passes_per_step=4))
    assert run(tmp_path / "run", *words, user_code=small).codes == [75]
    resumed = run(tmp_path / "run", *words)
    assert resumed.digest == whole.digest
    assert resumed.result["micro_batch"] == whole.result["micro_batch"] == written(resumed) == 4
    assert decisions(resumed, "micro-batch")[-1]["text"] == "4 per rank, as in the run so far"
    by_hand = run(tmp_path / "run", "train.max_steps=11", "data.micro_batch_size=5")
    assert by_hand.result["micro_batch"] == 4, "16 in fewest pieces of at most 5"


@pytest.mark.slow
def test_where_not_even_one_sample_fits_all_ranks_leave_with_exit_4(tmp_path: Path) -> None:
    """Rank 0 has room for one, from which its batch norm cannot compute a variance."""
    ended = run(tmp_path / "run", AUTO, ranks=2, user_code=lacking_memory(0, 1))
    assert ended.codes == [4, 4], ended
    assert (
        "not even 1 sample per rank and forward pass fits in memory: rank 0: the recipe" in ended.outputs[0]
    )
    assert "rank 1: GPU memory: no room for 1 samples. Choose a smaller model" in ended.outputs[0]
    assert ended.result["exit"] == 4


# train.on_oom, under torchrun: no parent restarts the run.


def test_a_shortage_in_the_pass_of_one_rank_ends_all_ranks_after_the_same_step(tmp_path: Path) -> None:
    """Over NCCL a rank that raised alone would leave the others waiting in the exchange of gradients."""
    small = lacking_memory(4, 1, passes=range(6, 100))
    ended = run(tmp_path / "run", "train.max_steps=12", ranks=2, user_code=small)
    assert ended.codes == [4, 4], ended
    error = ended.result["error"]
    assert error.startswith("rank 1 ran out of GPU memory: no room for 8 samples, in the forward or backward")
    assert (
        "of step 7. The micro-batch is 8 per rank and forward pass; data.micro_batch_size=4 needs less"
        in error
    )
    assert error.endswith(
        f"To resume: the same command with run.dir={ended.directory} data.micro_batch_size=4"
    )
    assert (ended.status["exit"], ended.result["exit"]) == (4, 4)
    assert [sorted(ended.checkpoints), ended.events("restart")] == [[5], []]
    assert all("ended by another" not in output for output in ended.outputs)


def test_an_evaluation_whose_larger_batches_do_not_fit_takes_those_of_training(tmp_path: Path) -> None:
    """A set in memory is evaluated in four times the micro-batch, 32 samples, where memory allows."""
    words = ("train.max_steps=3", "train.eval_every_steps=3")
    small = run(tmp_path / "small", *words, ranks=2, user_code=lacking_memory(8, 1, training=False))
    whole = run(tmp_path / "whole", *words, ranks=2)
    assert small.digest == whole.digest
    (found, expected) = ([event["val_loss"] for event in ended.events("eval")] for ended in (small, whole))
    assert found == pytest.approx(expected, rel=1e-6)


ENDED: dict[str, tuple[int, tuple[str, ...], tuple[int, ...], int, str]] = {
    # ranks, words, which of them lack memory, for more samples than that, and what is said
    "both, in the first step": (
        2,
        ("ddp.shard_optimizer=true",),
        (0, 1),
        4,
        "rank 1 ran out of GPU memory: no room",
    ),
    "alone, in loader processes": (
        1,
        ("recipe.uses=noisy_indexed", "data.num_workers=2"),
        (0,),
        8,
        "=8 needs",
    ),
    "alone, from a stream": (1, ("recipe.uses=noisy_streamed", "train.max_steps=6"), (0,), 8, "=8 needs"),
    "in a last step": (2, ("train.max_steps=1",), (1,), 4, "data.micro_batch_size=4 needs less memory"),
    "before an evaluation": (2, ("train.eval_every_steps=1",), (1,), 4, "data.micro_batch_size=4 needs less"),
    "as a stop": (2, ("train.on_oom=stop",), (1,), 4, "=4 needs less memory for the same update."),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ENDED)
def test_a_run_without_a_parent_ends_with_exit_4(tmp_path: Path, name) -> None:
    ranks, words, lacking, above, text = ENDED[name]
    ended = run(tmp_path / "run", *words, ranks=ranks, user_code=lacking_memory(above, *lacking))
    assert ended.codes == [4] * ranks, ended
    assert text in ended.result["error"], ended
    said = "No parent process restarts this run" in ended.result["error"]
    assert said == (name != "as a stop")


def no_room(*values: object, **options: object) -> None:
    raise torch.OutOfMemoryError("no room for 8 GiB")


def lack_memory_in_the_update() -> None:
    Updater.step = no_room  # type: ignore[method-assign]


def lack_memory_in_the_update_of_rank_1() -> None:
    step = Updater.step
    Updater.step = lambda *given: no_room() if dist.get_rank() else step(*given)  # type: ignore[method-assign]


def lack_memory_in_the_exchange() -> None:
    Reducer.start_grad_sync = no_room  # type: ignore[method-assign]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("prepare", "ranks", "words", "text"),
    [
        (
            lack_memory_in_the_update,
            2,
            ("optim=adamw",),
            "in update of step 1: no room for 8 GiB.",
        ),
        (
            lack_memory_in_the_update_of_rank_1,
            2,
            (),
            "rank 1 ran out of GPU memory in update of step 1: no room for 8 GiB.",
        ),
        pytest.param(
            lack_memory_in_the_exchange,
            1,
            (),
            "in communication of step 1: no room for 8 GiB.",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_shortage_outside_the_passes_names_its_place(tmp_path: Path, prepare, ranks, words, text) -> None:
    ended = run(tmp_path / "run", "train.max_steps=2", *words, ranks=ranks, prepare=prepare)
    assert ended.codes == [4] * ranks, ended
    assert sum(output.count(text) for output in ended.outputs) == 1, ended
    assert text in ended.result["error"]


# train.on_oom=halve, in parent mode.

# Rank 1 has room for three samples in a step, and is given four: what is allocated for them is refused.
FORWARD = """
if RANK == 1 and step > 5:
    import resource
    from pathlib import Path
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + 7 * 2**26
    resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))
    torch.empty(len(batch["image"]) * 2**27, dtype=torch.uint8)
    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY,) * 2)
"""
BACKWARD = """
if RANK == 1 and step > 5 and len(batch["image"]) > 3:
    def no_room(grad):
        raise torch.OutOfMemoryError("no room for 8 GiB")
    network.weight.register_hook(no_room)
"""
UPDATE = """
if RANK == 1 and step > 5 and len(batch["image"]) > 3:
    def no_room(*given):
        raise torch.OutOfMemoryError("no room for 8 GiB")
    from launcher.engine.optim.update import Updater
    Updater.step = no_room
"""
OF_PARENT = (
    "checkpoint.every_steps=2",
    "checkpoint.keep=100",
    "train.max_steps=12",
    "train.log_every_steps=1",
)


@pytest.mark.parametrize(
    ("in_step", "place"),
    [
        (FORWARD, "in the forward or backward pass of step 6"),
        pytest.param(BACKWARD, "in the forward or backward pass of step 6", marks=pytest.mark.slow),
        pytest.param(UPDATE, "in update of step 6", marks=pytest.mark.slow),
    ],
    ids=["forward", "backward", "update"],
)
def test_the_parent_restarts_a_run_with_half_the_micro_batch(tmp_path: Path, in_step, place) -> None:
    parent.write_recipe(tmp_path, in_step)
    with parent.Parent(tmp_path, *OF_PARENT, "launch.max_restarts=3", "run.dir=run") as started:
        assert started.end() == 0, started.stderr
        stderr = started.stderr
    assert "restart 1 of 3: rank 1 ran out of" in stderr
    assert place in stderr
    ended = Ended(tmp_path / "run", [0], [], 0.0)
    (restart,) = ended.events("restart")
    assert (restart["micro_batch"], restart["attempt"]) == (2, 1)
    assert restart["step"] in (2, 4), "the newest checkpoint"
    assert f"resuming from step {restart['step']} (checkpoint) with data.micro_batch_size=2" in stderr
    assert ended.result["micro_batch"] == written(ended) == 2
    assert ended.result["steps"] == 12

    by_hand = (f"checkpoint.resume={restart['path']}", "data.micro_batch_size=2", "run.dir=hand")
    parent.write_recipe(tmp_path)
    with parent.Parent(tmp_path, *OF_PARENT, *by_hand, name="hand") as started:
        assert started.end() == 0, started.stderr
    assert Ended(tmp_path / "hand", [0], [], 0.0).digest == ended.digest


@pytest.mark.slow
def test_a_resume_after_a_restart_uses_the_halved_micro_batch(tmp_path: Path) -> None:
    parent.write_recipe(tmp_path, BACKWARD)
    words = (*OF_PARENT, "run.dir=run")
    with parent.Parent(tmp_path, *words, "launch.max_restarts=1") as started:
        assert started.end() == 0, started.stderr
    with parent.Parent(tmp_path, *words, "train.max_steps=14", name="again") as started:
        assert started.end() == 0, started.stderr
    ended = Ended(tmp_path / "run", [0], [], 0.0)
    assert ended.result["micro_batch"] == 2
    assert decisions(ended, "micro-batch")[-1]["text"] == "2 per rank, as in the run so far"
