"""Objects of torchmetrics in a recipe: on any number of ranks what they give on the whole set."""

from __future__ import annotations

import contextlib
import warnings
from typing import Any

import pytest
import torch
from torch import nn

from launcher.data.sources import ONLY_SET
from launcher.data.tensors import TensorData
from launcher.distributed.env import WorkerEnv
from launcher.errors import ConfigError
from launcher.evaluation.evaluate import EvalLoop, Evaluation, evaluate, monitored_metric
from launcher.recipe import Loss, Recipe
from launcher.recipe.checks import refuse_unusable_metrics
from tests.ranks.harness import run_ranks

pytest.importorskip("torchmetrics", reason="torchmetrics is not installed: pip install torchmetrics")
ALONE = WorkerEnv(0, 1, 0, 1, torch.device("cpu"), None)


def objects() -> list[Any]:
    from torchmetrics import Metric, MetricCollection
    from torchmetrics.classification import (
        MulticlassAccuracy,
        MulticlassAUROC,
        MulticlassCohenKappa,
        MulticlassF1Score,
    )
    from torchmetrics.wrappers import ClasswiseWrapper

    class Decayed(Metric):
        """A state whose reduction would lose how much of it each rank has seen."""

        full_state_update = False

        def __init__(self) -> None:
            super().__init__()
            self.add_state("value", torch.tensor(0.0), dist_reduce_fx="mean")

        def update(self, outputs: torch.Tensor, labels: torch.Tensor) -> None:
            for output in outputs[:, 0]:
                self.value = self.value * 0.9 + output

        def compute(self) -> torch.Tensor:
            return self.value

    return [
        Decayed(),
        MulticlassAccuracy(3),  # states that are added
        MulticlassAUROC(3, thresholds=None),  # and such that are joined
        MetricCollection({"f1": MulticlassF1Score(3), "kappa": MulticlassCohenKappa(3)}),
        ClasswiseWrapper(MulticlassAccuracy(3, average=None), prefix="of_class_"),
    ]


class Within:
    """A metric of one's own that holds objects of torchmetrics, at any depth."""

    def __init__(self) -> None:
        from torchmetrics.classification import MulticlassAccuracy

        self.held = {"deep": [(MulticlassAccuracy(3),)]}

    def reset(self) -> None:
        self.held["deep"][0][0].reset()

    def update(self, outputs: torch.Tensor, batch: dict[str, torch.Tensor]) -> None:
        self.held["deep"][0][0](outputs, batch["label"])  # its forward computes as well

    def compute(self) -> dict[str, Any]:
        return {"within": self.held["deep"][0][0].compute()}


def of_numbers() -> list[Any]:
    from torchmetrics.regression import MeanSquaredError, PearsonCorrCoef

    return [MeanSquaredError(), PearsonCorrCoef()]  # the latter's states have no simple reduction


def loss(network: nn.Module, batch: dict[str, torch.Tensor]) -> Loss:
    logits = network(batch["x"])
    return Loss(logits.sum(), len(logits), logits)


def loss_of_numbers(network: nn.Module, batch: dict[str, torch.Tensor]) -> Loss:
    numbers = network(batch["x"])[:, 0]
    return Loss(numbers.sum(), len(numbers), {"number": numbers})


def data_of(num_samples: int) -> TensorData:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(num_samples, 4, generator=generator)
    return TensorData(
        {"x": x, "label": torch.arange(num_samples) % 3, "price": x.sum(1), "large": torch.ones(num_samples)}
    )


def model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Linear(4, 3)


def measure(env: WorkerEnv) -> list[Evaluation]:
    """Of 23 samples, of 1, which leaves rank 0 without any, and of 23 with the same objects again."""
    found = []
    classes, numbers = [*objects(), Within()], of_numbers()
    for num_samples in (23, 1, 23):
        data = data_of(num_samples)
        recipes = [Recipe(model, data, data, loss, metrics=classes)]
        if num_samples > 1:
            recipes.append(Recipe(model, data, data, loss_of_numbers, metrics=numbers, label_column="price"))
        for recipe in recipes:
            refuse_unusable_metrics(recipe)
            with warnings.catch_warnings():
                if num_samples == 1:
                    warnings.filterwarnings("ignore", "No (posi|nega)tive samples in targets")
                found.append(evaluate(EvalLoop(recipe, model(), contextlib.nullcontext, env), data, 4))
    return found


def of_whole_set() -> dict[str, float]:
    data = data_of(23).columns
    logits = model()(data["x"]).detach()
    found: dict[str, Any] = {}
    for metric in objects():
        metric.update(logits, data["label"])
        result = metric.compute()
        found |= result if isinstance(result, dict) else {type(metric).__name__: result}
    found["within"] = found["MulticlassAccuracy"]
    for metric in of_numbers():
        metric.update(logits[:, 0], data["price"])
        found[type(metric).__name__] = metric.compute()
    return {name: float(value) for name, value in found.items()}


@pytest.mark.slow
def test_they_are_exact_on_several_ranks() -> None:
    alone, (first, second) = measure(ALONE), run_ranks(2, measure)
    wanted = of_whole_set()
    for found in (alone, first, second):
        assert found[0].metrics | found[1].metrics == pytest.approx(wanted, rel=1e-5)
        assert found[3].metrics | found[4].metrics == found[0].metrics | found[1].metrics
        assert found[2].metrics == pytest.approx(alone[2].metrics, nan_ok=True)
    assert {"f1", "kappa", "of_class_0", "MulticlassAUROC", "PearsonCorrCoef"} <= wanted.keys()
    better = alone[0].higher_is_better | alone[1].higher_is_better
    assert (better["f1"], better["kappa"], better["MulticlassAccuracy"]) == (True, True, True)
    assert better["MeanSquaredError"] is False
    assert monitored_metric("MeanSquaredError", {ONLY_SET: alone[1]}).lower_is_better


def test_they_read_one_tensor() -> None:
    data = data_of(3)
    recipe = Recipe(
        model,
        data,
        data,
        lambda network, batch: Loss(torch.ones(()), 1, {"a": network(batch["x"]), "b": network(batch["x"])}),
        metrics=objects()[1:2],
    )
    with pytest.raises(
        ConfigError, match=r"Accuracy of torchmetrics reads one tensor, .* a, b\. .* metric around it"
    ):
        evaluate(EvalLoop(recipe, model(), contextlib.nullcontext, ALONE), data, 4)
