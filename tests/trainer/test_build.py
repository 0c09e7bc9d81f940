"""Switches of torch that a config names, and what is said about what was decided."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import ChainDataset, IterableDataset

from launcher.data import load_images
from launcher.data.batch_plan import BatchPlan
from launcher.data.iterable_loader import IterableData
from launcher.data.loader import LoaderConfig
from launcher.data.sources import batch_plan
from launcher.distributed.env import WorkerEnv
from launcher.engine import SGD, Policy, Stepper
from launcher.engine.precision.policy import choose_emulation
from launcher.errors import ConfigError, DataError, RecipeError
from launcher.recipe import Recipe, TensorData, cross_entropy
from launcher.recipe.checks import checked
from launcher.trainer.builders.build import build_model, lr_table, uses_channels_last
from launcher.trainer.builders.decisions import decisions
from launcher.trainer.device import set_backend_flags
from launcher.trainer.errors.recipe_errors import guarding, wrap_recipe
from tests.configs import composed
from tests.models import conv_net, mlp

DATA = TensorData({"image": torch.zeros(4, 8), "label": torch.zeros(4, dtype=torch.int64)})

CPU = torch.device("cpu")


@pytest.fixture
def switches(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[pytest.MonkeyPatch]:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")  # noted, so that it is as before afterwards
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    yield monkeypatch
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("wish", [True, False])
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # the compiler's own, at import
def test_deterministic_means_matrix_products_too(switches, wish) -> None:
    """torch refuses those on CUDA unless cuBLAS has a workspace of a fixed size."""
    set_backend_flags(composed(f"train.deterministic={str(wish).lower()}"), CPU)
    assert torch.are_deterministic_algorithms_enabled() is wish
    assert os.environ.get("CUBLAS_WORKSPACE_CONFIG") == (":4096:8" if wish else None)


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_a_workspace_of_the_users_own_is_kept(switches) -> None:
    switches.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    set_backend_flags(composed("train.deterministic=true"), CPU)
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"


@pytest.mark.parametrize(("given", "processes"), [(None, 1), ("3", 3)])
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_each_rank_compiles_in_one_process_unless_the_user_says_otherwise(switches, given, processes) -> None:
    from torch._inductor.config import decide_compile_threads

    switches.setenv("TORCHINDUCTOR_COMPILE_THREADS", given or "")  # noted, as above
    if given is None:
        switches.delenv("TORCHINDUCTOR_COMPILE_THREADS")
    set_backend_flags(composed(), CPU)
    assert decide_compile_threads() == processes


def test_a_batch_larger_than_the_data_and_slow_arithmetic_are_said() -> None:
    env = WorkerEnv(0, 1, 0, 1, torch.device("cpu"), None)
    stepper = Stepper(mlp(), SGD(0.1), policy=Policy.fp16(), emulate=False)
    recipe = Recipe(mlp, DATA, DATA, cross_entropy)
    plan = BatchPlan(12, 512, None, 1, 0, 0, False)
    lines = dict(decisions(composed(), env, ["CPU"], recipe, stepper, plan))
    assert "but the training set has 12 samples: each update is of these" in lines["batch"]
    if choose_emulation(Policy.fp16(), torch.device("cpu"), None).used:
        assert "though this CPU has no fp16 arithmetic: products take 50 to 100 times" in lines["precision"]


def test_a_micro_batch_above_the_share_of_a_rank_is_said() -> None:
    env = WorkerEnv(0, 1, 0, 1, torch.device("cpu"), None)
    recipe = Recipe(mlp, DATA, DATA, cross_entropy)
    plan = BatchPlan(64, 32, 20, 2, 0, 0, False)
    lines = dict(decisions(composed(), env, ["CPU"], recipe, Stepper(mlp(), SGD(0.1)), plan))
    assert "data.micro_batch_size=20 is above the 16 samples of a rank: nothing is split" in lines["batch"]


def test_the_start_says_the_micro_batches_as_they_are_cut() -> None:
    env = WorkerEnv(0, 1, 0, 1, torch.device("cpu"), None)
    recipe = Recipe(mlp, DATA, DATA, cross_entropy)
    plan = BatchPlan(64, 32, 5, 2, 0, 0, False)  # 16 samples of each rank
    assert max(map(len, plan.micro_positions(0))) == 4
    lines = dict(decisions(composed(), env, ["CPU"], recipe, Stepper(mlp(), SGD(0.1)), plan))
    assert lines["batch"] == "32 samples per update over 2 ranks, up to 4 micro-batches of at most 4 each"


def test_the_start_has_the_data_and_the_optimizer_with_all_options() -> None:
    env = WorkerEnv(0, 1, 0, 1, torch.device("cpu"), None)
    columns = {"x": torch.zeros(12, 3), "label": torch.arange(12) % 2}
    data = TensorData(columns)
    recipe = Recipe(mlp, data, {"near": data, "far": data}, cross_entropy, classes=("a", "b"))
    plan = BatchPlan(12, 8, None, 1, 0, 0, False)
    lines = dict(decisions(composed(), env, ["CPU"], recipe, Stepper(mlp(), SGD(0.1)), plan))
    assert lines["data"] == (
        "12 samples to train on, 12 samples to validate on (near), 12 samples to validate on (far); "
        "2 classes: a, b"
    )
    assert lines["optimizer"] == (
        "sgd: lr=0.1, momentum=0.9, nesterov=true, weight_decay=0.0005, clip_norm=null"
    )


def test_the_start_says_what_data_that_ships_is() -> None:
    env = WorkerEnv(0, 1, 0, 1, torch.device("cpu"), None)
    config = composed("recipe=resnet50")
    images = load_images(config.data)
    recipe = Recipe(mlp, images.train, images.validation, cross_entropy)
    plan = BatchPlan(64, 8, None, 1, 0, 0, False)
    found = dict(decisions(config, env, ["CPU"], recipe, Stepper(mlp(), SGD(0.1)), plan))["data"]
    num_images = len(images.train) + len(images.validation)
    assert found.startswith(
        f"digits: {num_images:,} images of 8 x 8, shipped for a first run (your own: data="
    )


@pytest.mark.sampled(every=2)
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # the compiler's own, at import
@pytest.mark.parametrize("compiled", [False, True])
def test_a_graph_of_the_whole_model_gives_its_gradients_at_its_end(compiled) -> None:
    """What that sentence says: else the last layer's gradient arrives before the first one's is computed."""
    model = mlp()
    order: list[str] = []
    forward = torch.compile(model, backend="aot_eager") if compiled else model
    model[2].weight.register_post_accumulate_grad_hook(lambda p: order.append("arrived"))
    model[0].weight.register_hook(lambda g: order.append("computed"))
    forward(torch.randn(4, 8)).sum().backward()
    assert order.index("arrived") == int(compiled)


def test_a_schedule_of_the_recipe_decides_on_the_whole_course() -> None:
    """In place of the config's and of its warm-up, which is said; at the same rates on every rank."""
    config = composed("optim.lr=0.2", "schedule.warmup_fraction=0.5", "train.max_steps=4")
    own = Recipe(mlp, DATA, DATA, cross_entropy, schedule=lambda step, total: (step + 1) / total)
    assert lr_table(config, own, 4) == [0.05, 0.1, pytest.approx(0.15), 0.2]
    assert lr_table(config, replace(own, schedule=None), 4)[:2] == [0.1, 0.2]
    env = WorkerEnv(0, 1, 0, 1, torch.device("cpu"), None)
    plan = BatchPlan(64, 8, None, 1, 0, 0, False)
    lines = dict(decisions(config, env, ["CPU"], own, Stepper(mlp(), SGD(0.1)), plan))
    assert lines["schedule"] == (
        "the recipe's schedule: lr 0.05 at first, 0.2 at most (in step 4), 0.2 in the last step, 4; "
        "schedule.warmup_fraction is not applied to it"
    )


def test_a_schedule_that_ends_at_its_peak_is_not_called_constant() -> None:
    own = Recipe(mlp, DATA, DATA, cross_entropy, schedule=lambda step, total: 0.1 if 0 < step < 3 else 1.0)
    env = WorkerEnv(0, 1, 0, 1, torch.device("cpu"), None)
    plan = BatchPlan(64, 8, None, 1, 0, 0, False)
    config = composed("optim.lr=0.2", "train.max_steps=4")
    found = dict(decisions(config, env, ["CPU"], own, Stepper(mlp(), SGD(0.1)), plan))["schedule"]
    assert found.startswith(
        "the recipe's schedule: lr 0.2 at first, 0.2 at most (in step 1), 0.2 in the last"
    )


def test_a_stream_of_streams_has_no_size() -> None:
    """torch's ChainDataset has a __len__, which raises TypeError where its parts have none."""

    class Stream(IterableDataset):
        def __iter__(self):
            return iter(())

    env = WorkerEnv(0, 1, 0, 1, torch.device("cpu"), None)
    plan = BatchPlan(64, 8, None, 1, 0, 0, False)
    own = Recipe(mlp, ChainDataset([Stream(), Stream()]), DATA, cross_entropy)
    found = dict(decisions(composed(), env, ["CPU"], own, Stepper(mlp(), SGD(0.1)), plan))["data"]
    assert found.startswith("a stream to train on")
    checked(replace(own, validation={"test": own.train}), may_lack=True)


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["schedule=constant"], "constant: lr 0.2 in all steps"),
        (
            ["schedule=constant", "schedule.warmup_fraction=0.5"],
            "constant: lr 0.1 at first, 0.2 at most (in step 2), 0.2 in the last step, 4",
        ),
        (
            ["schedule=linear", "schedule.warmup_fraction=0.5"],
            "linear: lr 0.1 at first, 0.2 at most (in step 2), 0.1 in the last step, 4",
        ),
        (
            ["schedule=cosine", "schedule.warmup_fraction=0"],
            "cosine: lr 0.2 at first, 0.2 at most (in step 1), 0.0293 in the last step, 4",
        ),
    ],
)
def test_the_start_says_the_schedule(words: list[str], sentence: str) -> None:
    config = composed("optim.lr=0.2", "train.max_steps=4", *words)
    env = WorkerEnv(0, 1, 0, 1, torch.device("cpu"), None)
    plan = BatchPlan(64, 8, None, 1, 0, 0, False)
    recipe = Recipe(mlp, DATA, DATA, cross_entropy)
    assert (
        dict(decisions(config, env, ["CPU"], recipe, Stepper(mlp(), SGD(0.1)), plan))["schedule"] == sentence
    )


def test_a_schedule_that_raises_is_the_recipes_error(tmp_path: Path) -> None:
    own = wrap_recipe(
        Recipe(mlp, DATA, DATA, cross_entropy, schedule=lambda step, total: 1 / step), "rank0.log"
    )
    with pytest.raises(RecipeError, match=r"the recipe's schedule failed at .*ZeroDivisionError"):
        lr_table(composed(), own, 4)


@pytest.mark.parametrize(
    ("lengths", "text"),
    [
        ([1, 2, 3], r"has shape \[3\]: it must have one entry for each of the 64 training samples"),
        (torch.ones(64, 2), r"has shape \[64, 2\]: it must have one entry"),
    ],
    ids=["too few", "two dimensions"],
)
def test_lengths_that_do_not_fit_the_training_set_are_refused(lengths, text) -> None:
    recipe = Recipe(mlp, DATA, DATA, cross_entropy, lengths=lengths)
    env = WorkerEnv(0, 1, 0, 1, torch.device("cpu"), None)
    data = TensorData({"x": torch.ones(64)})
    with pytest.raises(DataError, match=f"Recipe.lengths.* {text}"):
        batch_plan(composed(), env, data, recipe.lengths)
    good = replace(recipe, lengths=np.arange(64))
    assert batch_plan(composed(), env, data, good.lengths).lengths.tolist() == list(range(64))


def test_lengths_of_a_stream_are_refused() -> None:
    """Its order is the stream's own."""
    recipe = Recipe(mlp, DATA, DATA, cross_entropy, lengths=[1, 2])
    env = WorkerEnv(0, 1, 0, 1, torch.device("cpu"), None)
    stream = IterableData([], None, LoaderConfig(0, torch.device("cpu"), 0), "training")
    with pytest.raises(DataError, match=r"Recipe.lengths is given, but the training set is a stream"):
        batch_plan(composed("train.max_steps=2"), env, stream, recipe.lengths)


@pytest.mark.parametrize(
    ("wish", "device", "build", "chosen"),
    [
        ("auto", "cuda", conv_net, True),
        ("auto", "cuda", mlp, False),
        ("auto", "cpu", conv_net, False),
        ("true", "cpu", conv_net, True),
        ("false", "cuda", conv_net, False),
    ],
)
def test_convolutions_are_in_channels_last_on_cuda_or_where_asked_for(wish, device, build, chosen) -> None:
    env = WorkerEnv(0, 1, 0, 1, torch.device(device), None)
    assert uses_channels_last(composed(f"train.channels_last={wish}"), env, build()) is chosen


def test_a_view_that_channels_last_does_not_bear_comes_with_the_key() -> None:
    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.convolution = torch.nn.Conv2d(3, 4, 3)

        def forward(self, image: torch.Tensor) -> torch.Tensor:
            return self.convolution(image).view(len(image), -1)

    env = WorkerEnv(0, 1, 0, 1, torch.device("cpu"), None)
    recipe, plan = Recipe(Net, DATA, DATA, cross_entropy), BatchPlan(64, 8, None, 1, 0, 0, False)
    image = torch.randn(2, 3, 8, 8)
    build_model(composed("train.channels_last=false"), recipe, env, plan)(image)
    model = build_model(composed("train.channels_last=true"), recipe, env, plan)
    found = r"reshape.* instead. .*train.channels_last=false. The full"
    with pytest.raises(ConfigError, match=found), guarding("the recipe's loss", "logs/rank0.log"):
        model(image)


@pytest.mark.parametrize(("built", "said"), [(None, "None"), (3, "3")])
def test_a_model_that_is_no_module_is_refused(built, said) -> None:
    recipe = Recipe(lambda: built, DATA, DATA, cross_entropy)
    env = WorkerEnv(0, 1, 0, 1, torch.device("cpu"), None)
    with pytest.raises(ConfigError, match=f"build_model returned {said}: it must return an nn.Module"):
        build_model(composed(), recipe, env, BatchPlan(64, 8, None, 1, 0, 0, False))
