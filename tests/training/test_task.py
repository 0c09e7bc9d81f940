"""What a run checks of the first loss that it trains on."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

from launcher.engine import SGD, EngineWarning, Policy, Stepper
from launcher.recipe import Loss
from launcher.training.task import Task
from tests.models import features, loss_sum, mlp


def test_a_loss_with_parameters_of_its_own_is_a_warning_once() -> None:
    temperature = nn.Parameter(torch.ones(()))

    def loss(network, batch) -> Loss:
        return Loss(loss_sum(network(batch["x"]) / temperature, batch["label"]), len(batch["x"]))

    x, classes = features(4, 0)
    model = mlp()
    task = Task(Stepper(model, SGD(0.1), Policy.fp32()), model, loss, None, None, None)  # type: ignore[arg-type]
    with pytest.warns(EngineWarning, match="1 parameters that the model does not hold"):
        task.learn_from({"x": x, "label": classes})
    task.stepper.step()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        task.learn_from({"x": x, "label": classes})
