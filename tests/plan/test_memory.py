"""What a step takes, counted on tensors without values, against what torch's allocator gives a real step."""

from __future__ import annotations

from itertools import accumulate
from pathlib import Path

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from launcher.config.composition import Request
from launcher.config.resolve import compose_jobs
from launcher.config.schema import Config
from launcher.plan.estimate import fitting
from launcher.plan.memory import PlannedTask, StepMemory, rank_on
from launcher.plan.meta import META, AllocationTracker
from tests.configs import composed

CPU = torch.device("cpu")
EXAMPLES = Path(__file__).parents[2] / "recipes" / "examples"
SLACK = 1 << 17  # bytes that are allowed beside the 5 %, for the model whose step takes only 1.2 MB
SMALL = ("data=synthetic", "data.num_samples=64")
TEXT = "The quick brown fox jumps over the lazy dog. " * 400
PAIRS = "A man eats.\tA man sleeps.\tneutral\nA man eats.\tHe eats.\tentailment\n"


def config_of(words: tuple[str, ...]) -> Config:
    (config,) = compose_jobs(Request(words))
    return config


def predicted_bytes(config: Config) -> int:
    """At the peak of the second step, without the data."""
    task = PlannedTask.of(config, 1)
    with rank_on(META, task) as rank:
        for _ in range(2):
            step = rank.step(task.plan.largest_micro_batch, of_gpu=False)
        return sum(rank.held.values()) - rank.held["data"] + step.passes


def allocated_bytes(config: Config) -> int:
    """What the CPU's allocator has given at the peak of the third step, beside the data."""
    task = PlannedTask.of(config, 1)
    size = task.plan.largest_micro_batch
    with rank_on(CPU, task) as rank:
        rank.step(size, of_gpu=False)  # makes the states of an optimizer of torch
        held = sum(rank.held.values()) - rank.held["data"]
    with rank_on(CPU, task, counting=False) as rank:
        for _ in range(2):
            rank.step(size, of_gpu=False)
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
            rank.step(size, of_gpu=False)
    # All of the allocator's; those of `profiled.events()` are only what no operation has asked for.
    events = [each for each in profiled.profiler.kineto_results.events() if each.name() == "[memory]"]
    events.sort(key=lambda event: event.start_ns())
    return held + max(accumulate(event.nbytes() for event in events))


RECOMPUTING = "train.activation_checkpointing=true"
# Not networks of few small tensors: the copies that a CPU makes for convolutions are not counted.
RECIPES = [
    ("recipe=resnet18",),
    ("recipe=resnet18", "data.batch_size=16", "precision=amp_fp16", *SMALL),
    ("recipe=resnet18", "optim=adamw", "precision=fp32"),
    ("recipe=resnet18", "optim=adamw", "data.micro_batch_size=16"),
    ("recipe=resnet50", "data.batch_size=8", *SMALL),
    (f"recipe={EXAMPLES}/recurrent.py", "optim=adamw", "data.batch_size=32"),
    ("recipe=gpt", "data.path={text}"),
    ("recipe=bert", "data.path={pairs}"),
    ("recipe=gpt", "data.path={text}", RECOMPUTING),
    ("recipe=bert", "data.path={pairs}", RECOMPUTING),
    ("recipe=resnet50", "data.batch_size=8", RECOMPUTING, *SMALL),
]


@pytest.mark.slow
@pytest.mark.parametrize("words", RECIPES, ids=lambda words: " ".join(words).replace(f"{EXAMPLES}/", ""))
def test_predicted_bytes_are_those_of_the_allocator_in_a_real_step_within_five_percent(
    words, tmp_path
) -> None:
    (tmp_path / "text.txt").write_text(TEXT)
    (tmp_path / "pairs").mkdir()
    for name in ("train.tsv", "test.tsv"):
        (tmp_path / "pairs" / name).write_text("sentence1\tsentence2\tgold_label\n" + PAIRS * 32)
    places = {"text": tmp_path / "text.txt", "pairs": tmp_path / "pairs"}
    config = config_of(tuple(word.format_map(places) for word in words))
    assert predicted_bytes(config) == pytest.approx(allocated_bytes(config), rel=0.05, abs=SLACK)


def test_weights_masters_gradients_and_states_are_as_large_as_the_policy_says() -> None:
    """Half weights and wire gradients of 2 bytes, fp32 masters and two states of 4, and little padding."""
    config = composed("recipe=cnn", "data=digits")
    task = PlannedTask.of(config, 2)
    with rank_on(META, task) as rank:
        held, numel = rank.held, rank.stepper.flat_numel
        sizes = {"weights": 2, "masters": 4, "gradients": 2, "states": 8}
        for kind, size in sizes.items():
            assert held[kind] == pytest.approx(size * numel, rel=0.1), kind
        gpu = rank.step(task.plan.largest_micro_batch, of_gpu=True)
        cpu = rank.step(task.plan.largest_micro_batch, of_gpu=False)
        assert 0 < gpu.activations < cpu.activations  # a CPU widens halves to compute with them


@pytest.mark.parametrize("of_gpu", [False, True])
def test_recomputed_activations_are_not_kept(of_gpu: bool) -> None:
    kept = []
    for words in ((), (RECOMPUTING,)):
        config = composed("recipe=resnet18", "data.batch_size=16", *SMALL, *words)
        task = PlannedTask.of(config, 2)
        with rank_on(META, task) as rank:
            kept.append(rank.step(task.plan.largest_micro_batch, of_gpu))
    assert kept[1].activations < kept[0].activations / 2
    assert kept[1].passes < kept[0].passes


@pytest.mark.slow
def test_a_sharded_optimizer_has_its_part_of_masters_and_states() -> None:
    held = []
    for shard in ("false", "true"):
        config = composed("recipe=cnn", "data=digits", f"ddp.shard_optimizer={shard}")
        task = PlannedTask.of(config, 4)
        with rank_on(META, task) as rank:
            held.append(rank.held)
    assert held[1]["states"] == pytest.approx(held[0]["states"] / 4, rel=0.1)
    assert held[1]["weights"] == held[0]["weights"]


@pytest.mark.parametrize(
    ("room", "fits"),
    [
        (1000 + 10 * 64 + 40, 64),  # the whole share, without sums
        (1000 + 10 * 32 + 40 + 200, 32),
        (1000 + 10 * 100 + 40, 100),
        (1240, 0),
        (900, 0),
    ],
)
def test_the_batch_that_fits_is_on_the_line_through_two(room, fits) -> None:
    counted = [StepMemory(size, 5 * size, 40 + 10 * size, 100) for size in (16, 32)]
    assert fitting(room, held=1000, sums=200, counted=counted, share=64) == fits


@pytest.mark.gpu
def test_the_peak_of_a_step_on_a_gpu_is_within_a_tenth_of_what_was_counted() -> None:
    """The band until it has been measured: kernels of cuDNN take scratch, and the allocator rounds up."""
    config = composed("recipe=resnet18", "data.batch_size=128", *SMALL)
    task, device = PlannedTask.of(config, 1), torch.device("cuda")
    with rank_on(META, task) as rank:
        step = rank.step(task.plan.largest_micro_batch, of_gpu=True)
        predicted = sum(rank.held.values()) + max(step.passes, step.update)
    with rank_on(device, task, counting=False) as rank:
        rank.step(task.plan.largest_micro_batch, of_gpu=True)
        torch.cuda.reset_peak_memory_stats()
        rank.step(task.plan.largest_micro_batch, of_gpu=True)
        assert torch.cuda.max_memory_allocated() == pytest.approx(predicted, rel=0.1)


def test_tensors_in_nested_results_are_counted():
    with torch.library._scoped_library("launcher_test", "DEF") as library:
        library.define("nested(Tensor x) -> (Tensor, Tensor[])")
        library.impl("nested", lambda x: (x + 1, [x + 2, x + 3]), "CompositeExplicitAutograd")
        x = torch.zeros(1000)
        with AllocationTracker() as tracker:
            kept = torch.ops.launcher_test.nested(x)
        assert tracker.bytes[CPU] == 3 * 4000, kept
