"""What a run trains on in a step, and checks of the first loss."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import IterableDataset

from launcher.data.batch_plan import BatchPlan
from launcher.data.loader import LoaderConfig
from launcher.data.sources import training_batches, wrap_dataset
from launcher.engine import SGD, EngineWarning, Policy, Stepper
from launcher.errors import ConfigError, DataError
from launcher.recipe import Loss
from launcher.trainer.progress import StepIndex, samples_of
from launcher.trainer.train_step import TrainStep
from tests.models import features, loss_sum, mlp


class Rows(IterableDataset):
    """A stream of rows in memory."""

    def __init__(self, rows: list[dict[str, torch.Tensor]]) -> None:
        self.rows = rows

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        return iter(self.rows)


def test_a_loss_with_parameters_of_its_own_is_a_warning_once() -> None:
    temperature = nn.Parameter(torch.ones(()))

    def loss(network, batch) -> Loss:
        return Loss(loss_sum(network(batch["x"]) / temperature, batch["label"]), len(batch["x"]))

    x, classes = features(4, 0)
    model = mlp()
    stepper = Stepper(model, SGD(0.1), Policy.fp32())
    context: Any = SimpleNamespace(stepper=stepper, model=model, recipe=SimpleNamespace(loss=loss))
    task = TrainStep(context)
    with pytest.warns(EngineWarning, match="1 parameters that the model does not hold"):
        task.forward_backward({"x": x, "label": classes})
    task.stepper.step()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        task.forward_backward({"x": x, "label": classes})


def test_a_loss_that_ends_the_training_mode_is_refused() -> None:
    x, classes = features(4, 0)
    model = mlp()
    context: Any = SimpleNamespace(
        stepper=Stepper(model, SGD(0.1), Policy.fp32()),
        model=model,
        recipe=SimpleNamespace(loss=lambda network, batch: Loss(network.eval()(batch["x"]).sum(), 4)),
    )
    with pytest.raises(ConfigError, match="left the network in evaluation mode"):
        TrainStep(context).forward_backward({"x": x, "label": classes})


@pytest.mark.parametrize("weight", [1e-8, 1.0, 64.0])
def test_the_samples_of_a_step_are_those_that_were_read_whatever_the_loss_counts(weight) -> None:
    """Of a stream of 10 samples in batches of 4 the third is smaller, and the fourth begins it again."""
    trained = trained_on_stream(10, 4, weight)
    assert [samples for samples, _ in trained] == [4, 4, 2, 4]
    assert [count for _, count in trained] == pytest.approx([weight * samples for samples, _ in trained])


def test_a_stream_without_samples_is_an_error() -> None:
    with pytest.raises(DataError, match="the training stream is empty"):
        trained_on_stream(0, 2, 1.0)


def trained_on_stream(size: int, steps: int, weight: float) -> list[tuple[int, float]]:
    """The samples and the count of each step."""
    x, classes = features(size, 0)
    stream = Rows([{"x": row, "label": label} for row, label in zip(x, classes, strict=True)])
    plan, how = (
        BatchPlan(4 * steps, 4, None, 1, 0, 0, drop_last=False),
        LoaderConfig(0, torch.device("cpu"), 0),
    )
    batches = training_batches(wrap_dataset(stream, None, how, "training"), plan, None, steps)

    def loss(network, batch) -> Loss:
        return Loss(weight * loss_sum(network(batch["x"]), batch["label"]), weight * len(batch["x"]))

    model = mlp()
    answers = SimpleNamespace(count=lambda of_batch, batch: None)
    stepper = Stepper(model, SGD(0.1), Policy.fp32())
    context: Any = SimpleNamespace(
        stepper=stepper,
        model=model,
        recipe=SimpleNamespace(loss=loss),
        batches=batches,
        plan=plan,
        train_accuracy=answers,
        oom_message="",
        should_stop=lambda: False,
    )
    task = TrainStep(context)
    indices = [StepIndex(0, step, step + 1) for step in range(steps)]
    reports = [task.run(index).read() for index in indices]
    return [
        (samples_of(plan, each, report), report.count) for each, report in zip(indices, reports, strict=True)
    ]
