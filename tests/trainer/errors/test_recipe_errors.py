"""Exceptions of torch that a recipe's data brings about, and the rule that the message adds."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from launcher.data.tensors import Batch
from launcher.distributed.env import LaunchEnv
from launcher.errors import DataError, RecipeError
from launcher.recipe import Loss, Recipe, TensorData
from launcher.trainer.errors.rank_failure import to_launcher_error
from launcher.trainer.errors.recipe_errors import guarding, wrap_recipe

LOG = "/run/logs/rank0.log"


def test_a_missing_column_names_those_of_the_batch() -> None:
    batch = {"x": torch.ones(4, 2), "label": torch.zeros(4)}
    found = r"KeyError: 'y'\. A batch has the columns x, label\. The full"
    with pytest.raises(DataError, match=found), guarding("the recipe's loss", LOG, batch):
        _ = batch["y"]
    with pytest.raises(RecipeError, match=r"KeyError: 'y'\. The full"), guarding("the loss", LOG, {}):
        _ = {}["y"]


@pytest.mark.parametrize(
    ("fail", "rule"),
    [
        (lambda: nn.BatchNorm1d(2)(torch.ones(1, 2)), "set data.drop_last=true if"),
        (lambda: nn.functional.cross_entropy(torch.ones(1, 2), torch.tensor([7])), "Target 7 .* at least 0"),
        (lambda: nn.functional.cross_entropy(torch.ones(1, 2), torch.tensor([255])), "ignore_index=255"),
    ],
)
def test_what_the_data_is_at_fault_for_comes_with_the_rule(fail, rule) -> None:
    with pytest.raises(DataError, match=rule), guarding("the recipe's loss", LOG, {"x": torch.ones(1, 2)}):
        fail()


def test_a_key_error_without_a_key_is_the_recipes() -> None:
    with pytest.raises(RecipeError, match="failed"), guarding("the recipe's loss", LOG, {"x": 1}):
        raise KeyError


def recipe_with(loss: Callable[[nn.Module, Batch], Loss]) -> Recipe:
    data = TensorData({"x": torch.ones(4, 3)})
    return wrap_recipe(Recipe(lambda: nn.Linear(3, 1), data, data, loss), LOG)


@pytest.mark.parametrize("text", ["samples 0, 1: RuntimeError: kaboom", "samples 0, 1: it was torn."])
def test_the_error_of_a_sample_is_a_sentence_before_its_log(text: str) -> None:
    error = DataError(text)
    error.traceback = "Traceback"
    found = to_launcher_error(error, LaunchEnv(), "logs/rank0.log", ("reading", "Read less."))
    assert str(found) == f"{text.rstrip('.')}. The full traceback is in logs/rank0.log."
    error.restart_helps = error.shared = True
    found = to_launcher_error(error, LaunchEnv(), "logs/rank0.log", ("reading", "Read less."))
    assert found is not None
    assert found.restart_helps
    assert found.shared


def test_a_lost_loader_process_is_not_blamed_on_what_was_running() -> None:
    """Torch raises it from a signal handler, so anywhere: the pool names the sample later."""
    lost = RuntimeError("DataLoader worker (pid 1234) is killed by signal: Killed. ")

    def loss(network: nn.Module, batch: Batch) -> Loss:
        raise lost

    recipe = recipe_with(loss)
    with pytest.raises(RuntimeError) as caught:
        recipe.loss(nn.Linear(1, 1), {})
    assert caught.value is lost
