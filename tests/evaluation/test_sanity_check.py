"""The trial before the first step: which mistakes it finds, and that it leaves nothing changed."""

from __future__ import annotations

import contextlib
import random
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset

from launcher.data.loader import LoaderConfig
from launcher.data.sources import FIRST, ONLY_SET, wrap_dataset
from launcher.data.tensors import TensorData
from launcher.distributed.env import WorkerEnv
from launcher.errors import ConfigError, DataError, RecipeError
from launcher.evaluation.evaluate import EvalLoop, Evaluation, monitored_metric, sanity_check
from launcher.evaluation.measuring import MetricValues
from launcher.metrics import Classification
from launcher.recipe import Loss, Recipe, cross_entropy
from launcher.trainer.errors.recipe_errors import guarding

ALONE = WorkerEnv(0, 1, 0, 1, torch.device("cpu"), None)
DATA = TensorData({"image": torch.randn(20, 4), "label": torch.arange(20) % 3})


class Given:
    """Returns what it is given, or raises it."""

    def __init__(self, found: Any = None, **attributes: Any) -> None:
        self.found, self.samples = found, 0
        vars(self).update(attributes)

    def update(self, outputs: Tensor, batch: dict[str, Tensor]) -> None:
        self.samples += len(outputs)

    def compute(self) -> Any:
        if isinstance(self.found, Exception):
            raise self.found
        return {"given": self.found}


class Gathers(Given):
    """Adds over the ranks by itself."""

    def __init__(self) -> None:
        super().__init__(0.5)

    def compute(self) -> dict[str, Any]:
        total = torch.zeros(1)
        dist.all_reduce(total)
        return {"given": total}


def guard(what: str, batch: Any) -> contextlib.AbstractContextManager[None]:
    return guarding(what, "rank0.log", batch)


def tried(
    *metrics: Any, data: Any = DATA, model: nn.Module | None = None, loss: Any = cross_entropy
) -> MetricValues:
    recipe = Recipe(lambda: nn.Linear(4, 3), data, data, loss, metrics=metrics)
    made = wrap_dataset(data, None, LoaderConfig(0, ALONE.device, 0), "validation")
    loop = EvalLoop(recipe, model or nn.Linear(4, 3), contextlib.nullcontext, ALONE, guard)
    return sanity_check(loop, made, 8)


REFUSED: dict[str, tuple[Any, type[Exception], str]] = {
    "a column that is missing": (
        Classification("abc", label="labl"),
        DataError,
        r"Classification reads the column 'labl', but a batch has the columns image, label\. Name one",
    ),
    "fewer classes than outputs": (
        Classification("ab"),
        ConfigError,
        r"needs logits \[6, 2\], one value per",
    ),
    "text": (Given("half"), ConfigError, r"Given's compute\(\) must return one number .* ValueError"),
    "a complex number": (Given(torch.tensor(1j)), ConfigError, r"must return one number"),
    "no number": (Given(None), ConfigError, r"must return one number"),
    "several numbers": (Given(torch.zeros(3)), ConfigError, r"must return one number"),
    "a collective": (
        Gathers(),
        ConfigError,
        r"^the metric Gathers's compute uses torch\.distributed at .*check\.py:\d+, in compute, but",
    ),
    "a misspelt name": (
        Given(NameError("sampels")),
        RecipeError,
        r"Given's compute failed at .*NameError: sam",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_mistake_in_a_metric_is_found_on_one_batch(name: str) -> None:
    metric, kind, text = REFUSED[name]
    with pytest.raises(kind, match=text) as caught:
        tried(metric)
    assert caught.value.exit_code in (1, 2, 7)  # type: ignore[attr-defined]


def test_a_torchmetrics_object_of_other_classes_is_found_too() -> None:
    import torchmetrics  # it imports transformers, which takes seconds: not while tests are collected

    with pytest.raises(
        RecipeError, match=r"the metric MulticlassAccuracy's update failed: ValueError: If `preds` have"
    ):
        tried(torchmetrics.Accuracy("multiclass", num_classes=2))


@pytest.mark.parametrize(
    "found", [1, True, 0.5, np.float32(2), torch.tensor([3.0]), float("nan"), np.array([4])]
)
def test_any_single_number_is_accepted(found: Any) -> None:
    assert tried(Given(found)).values["given"] == pytest.approx(float(np.asarray(found).item()), nan_ok=True)


def test_what_may_be_due_to_the_few_samples_is_reported() -> None:
    found = tried(Given(ValueError("only one class in y_true")), Classification("abc"))
    assert len(found.failed) == 1
    assert found.failed[0].startswith("the metric Given's compute failed at ")
    assert "accuracy" in found.values


def test_names_that_only_other_samples_give_may_be_declared() -> None:
    found = tried(Given(0.5, names=("given", "of_rare_class"), higher_is_better=True))
    evaluations = {ONLY_SET: Evaluation(0.0, 0, found.values, found.higher_is_better)}
    assert not monitored_metric("of_rare_class", evaluations).lower_is_better
    with pytest.raises(
        ConfigError, match="monitor=misspelt: the evaluations of this recipe have no such metric"
    ):
        monitored_metric("misspelt", evaluations)


class Restless(nn.Module):
    """Changes a buffer, and draws, in evaluation mode too."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Dropout())
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        found: Tensor = self.inner(x) + random.random() + np.random.rand() + torch.rand(())
        return found


def test_nothing_is_changed() -> None:
    model, metric = Restless(), Given(0.5)
    model.inner[2].eval()
    modes = [module.training for module in model.modules()]
    before = {name: value.clone() for name, value in model.state_dict().items()}
    tried(metric, Classification("abc"), model=model)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert [module.training for module in model.modules()] == modes
    assert all(p.grad is None for p in model.parameters())
    assert metric.samples == 0


class Indexed(Dataset[dict[str, Tensor]]):
    def __init__(self) -> None:
        self.read: list[int] = []

    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        self.read.append(index)
        return {"image": torch.zeros(4), "label": torch.tensor(index % 3)}


class Streamed(IterableDataset[dict[str, Tensor]]):
    def __init__(self) -> None:
        self.indexed = Indexed()

    def __iter__(self) -> Any:
        return (self.indexed[index] for index in range(len(self.indexed)))


@pytest.mark.parametrize("kind", [Indexed, Streamed])
def test_few_samples_are_read(kind: type[Any]) -> None:
    data = kind()
    recipe = Recipe(lambda: nn.Linear(4, 3), data, data, cross_entropy, metrics=[Classification("abc")])
    made = wrap_dataset(data, None, LoaderConfig(0, ALONE.device, 0), "validation")
    sanity_check(EvalLoop(recipe, nn.Linear(4, 3), contextlib.nullcontext, ALONE), made, 500)
    assert (data if kind is Indexed else data.indexed).read == list(range(FIRST))


def test_a_batch_without_loss_is_no_mistake() -> None:
    found = tried(loss=lambda network, batch: Loss(torch.zeros(()), 0, network(batch["image"])))
    assert found.values == {}
