"""Ranks with different data end before the first step; their random draws are the same."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from launcher.data.loader import LoaderConfig
from launcher.data.sources import wrap_dataset
from launcher.data.tensors import TensorData
from launcher.errors import ConfigError, DataError
from launcher.evaluation.evaluate import EvalLoop, evaluate
from launcher.recipe import Recipe, cross_entropy
from launcher.trainer.builders.data_check import compare_data
from launcher.trainer.builders.data_check import data_fingerprint as fingerprint_of
from tests.faults.parent import Parent, write_recipe
from tests.ranks.harness import run_ranks
from tests.test_end_to_end import launch

pytestmark = pytest.mark.timeout(90)
NUM_SAMPLES = 1000


def recipe_of(**columns: torch.Tensor) -> Recipe:
    x = torch.arange(NUM_SAMPLES * 3, dtype=torch.float32).reshape(NUM_SAMPLES, 3)
    data = TensorData({"x": x, "label": torch.arange(NUM_SAMPLES) % 2, **columns})
    return Recipe(lambda: torch.nn.Linear(3, 2), data, data, cross_entropy, classes=("a", "b"))


def fingerprint(recipe: Recipe) -> dict[str, str]:
    return fingerprint_of(recipe, recipe.train, recipe.validation_sets)


class Empty:
    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        return iter(())


def test_an_empty_stream_is_refused() -> None:
    stream = wrap_dataset(Empty(), None, LoaderConfig(0, torch.device("cpu"), seed=0), "training")
    with pytest.raises(DataError, match="the training stream is empty: its __iter__ ended before its first"):
        fingerprint_of(recipe_of(), stream, {})


def hold_other_data(env: Any) -> str:
    recipe = recipe_of(extra=torch.full((NUM_SAMPLES,), env.rank == 2))
    try:
        compare_data(fingerprint(recipe), env)
    except DataError as error:
        return str(error)
    return ""


def test_all_ranks_are_told_the_same() -> None:
    told = run_ranks(3, hold_other_data)
    assert told[0].startswith(
        "the ranks do not hold the same data. Rank 2 differs in: training column extra ("
    )
    assert set(told) == {told[0]}


def evaluate_other_labels(env: Any) -> dict[str, float]:
    """Rank 1 has another label where no fingerprint looks."""
    x = torch.ones(NUM_SAMPLES, 3)
    label = torch.arange(NUM_SAMPLES) % 2
    label[1] = env.rank
    data = TensorData({"image": x, "label": label})
    recipe = replace(recipe_of(), validation=data)
    found = evaluate(EvalLoop(recipe, torch.nn.Linear(3, 2), nullcontext, env), data, 100)
    return found.metrics


def test_all_ranks_come_to_the_same_metrics_all_the_same() -> None:
    """Or they would not agree on whether an evaluation is the best, and one would wait for the others."""
    first, second = run_ranks(2, evaluate_other_labels)
    assert first == second


# The same through the whole program


def test_an_unseeded_generator_is_refused_before_the_first_step(tmp_path: Path) -> None:
    write_recipe(tmp_path, in_build="pass")
    file = tmp_path / "tiny.py"
    text = file.read_text().replace(
        "torch.randn(32, 4, generator=torch.Generator().manual_seed(0))",
        "torch.tensor(__import__('numpy').random.default_rng().normal(size=(32, 4))).float()",
    )
    file.write_text(text)
    with Parent(tmp_path, "launch.max_restarts=2") as parent:
        assert parent.end() == 7
        assert (
            "the ranks do not hold the same data. Rank 1 differs in: training column image" in parent.stderr
        )
        assert "restart" not in parent.stderr


IN_THE_ORDER_OF_A_SET = """
import torch
from torch import nn
from launcher.recipe import Recipe, TensorData, cross_entropy, recipe

@recipe("unsorted")
def unsorted(config):
    words = list({f"word {number}" for number in range(64)})
    x = torch.tensor([[float(word.split()[1])] for word in words])
    data = TensorData({"image": x, "label": torch.zeros(64, dtype=torch.int64)})
    return Recipe(lambda: nn.Linear(1, 2), data, data, cross_entropy, classes=("a", "b"))
"""


@pytest.mark.slow
def test_the_order_of_a_set_is_refused_before_the_first_step(tmp_path: Path) -> None:
    """Under torchrun, whose workers hash strings each in their own way."""
    (tmp_path / "unsorted.py").write_text(IN_THE_ORDER_OF_A_SET)
    words = ["recipe=resnet18", "recipe.uses=unsorted", "recipes.path=unsorted.py", "tracker=none"]
    done = launch(tmp_path, words)
    assert (
        done.stderr.count("the ranks do not hold the same data. Rank 1 differs in: training column im") == 1
    )
    assert "step 1" not in done.stdout


NUMBERED_BY_A_SET = """
import torch
from torch import nn
from launcher.recipe import Recipe, TensorData, cross_entropy, recipe

@recipe("numbered")
def numbered(config):
    names = [f"class {index % 8}" for index in range(64)]
    numbers = {name: number for number, name in enumerate(set(names))}
    x = nn.functional.one_hot(torch.arange(64) % 8).float()
    data = TensorData({"image": x, "label": torch.tensor([numbers[name] for name in names])})
    return Recipe(lambda: nn.Linear(8, 8), data, data, cross_entropy)
"""


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_a_resume_on_classes_numbered_by_a_set_is_refused(tmp_path: Path, monkeypatch) -> None:
    """A process with another seed of its hashes numbers the same classes otherwise."""
    (tmp_path / "numbered.py").write_text(NUMBERED_BY_A_SET)
    words = ["recipe=resnet18", "recipe.uses=numbered", "recipes.path=numbered.py", "tracker=none"]
    words += ["precision=fp32", "run.dir=run", "data.batch_size=8"]
    found = []
    for seed, *more in (
        ("1", "train.max_steps=2"),
        ("2", "train.max_steps=4"),
        ("2", "train.max_steps=4", "checkpoint.allow_other_data=true"),
    ):
        monkeypatch.setenv("PYTHONHASHSEED", seed)
        found.append(launch(tmp_path, [*words, *more], ranks=0))
    assert [each.returncode for each in found] == [0, 7, 0], [each.stderr for each in found]
    assert "another meaning: training column label (" in found[1].stderr
    assert "set() or a folder" in found[1].stderr
    assert "checkpoint.allow_other_data=true" in found[1].stderr
    assert "the data is not that of the checkpoint" in found[2].stdout + found[2].stderr


def test_a_schedule_that_differs_by_rank_ends_the_run_before_its_first_step(tmp_path: Path) -> None:
    write_recipe(tmp_path)
    file = tmp_path / "tiny.py"
    file.write_text(
        file.read_text().replace(
            'classes=("a", "b")', 'classes=("a", "b"), schedule=lambda step, total: 1 + RANK'
        )
    )
    with Parent(tmp_path, "optim.lr=0.1", "train.epochs=1") as parent:
        assert parent.end() == ConfigError.exit_code
        assert re.search(
            r"^error: the ranks were given different models or settings.* on rank 1 learning_rates is "
            r"\[0\.2, 0\.2, 0\.2, 0\.2\], not \[0\.1, 0\.1, 0\.1, 0\.1\]\. ",
            parent.stderr,
            re.MULTILINE,
        ), parent.stderr
        assert parent.stderr.count("error:") == 1
