"""A mean given where the sum is asked for is noticed; sums, and means times their count, are not."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from launcher.engine import SGD, EngineWarning, Policy, Scaling, Stepper
from launcher.engine.checks.mean_loss import is_mean
from tests.faults.launching import run
from tests.models import features, mlp

Make = Callable[[Tensor, Tensor], Tensor]  # (logits [n, 3], classes [n]) -> 0-dim loss


class Squared(torch.autograd.Function):
    """The mean of squares, as a user's own function."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.square().mean()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grad * 2 * x / x.numel()


def causal_lm_loss(logits: Tensor, classes: Tensor) -> Tensor:
    """As Hugging Face models put it into `outputs.loss`: fp32, shifted, flat, the default reduction."""
    logits, labels = logits.float(), F.pad(classes, (0, 1), value=-100)[..., 1:].contiguous()
    loss = F.cross_entropy(logits.view(-1, 3), labels.view(-1), ignore_index=-100, reduction="mean")
    return SimpleNamespace(loss=loss.to(logits.device)).loss


def per_sample(mean: Make, logits: Tensor, targets: Tensor) -> Tensor:
    """The sum over the samples of each one's mean."""
    return sum(mean(logits[i : i + 1], targets[i : i + 1]) for i in range(len(logits)))  # type: ignore


def onehot(classes: Tensor) -> Tensor:
    return F.one_hot(classes, 3).float()


MEANS: dict[str, Make] = {
    "cross_entropy": F.cross_entropy,
    "label smoothing": lambda x, y: F.cross_entropy(x, y, label_smoothing=0.1),
    "class weights": lambda x, y: F.cross_entropy(x, y, weight=torch.ones(3)),
    "probabilities": lambda x, y: F.cross_entropy(x, onehot(y)),
    "images": lambda x, y: F.cross_entropy(x.T[None], y[None]),
    "module": lambda x, y: nn.CrossEntropyLoss()(x, y),
    "nll": lambda x, y: F.nll_loss(x.log_softmax(1), y),
    "mse": lambda x, y: F.mse_loss(x, onehot(y)),
    "l1": lambda x, y: F.l1_loss(x, onehot(y)),
    "huber": lambda x, y: F.huber_loss(x, onehot(y)),
    "bce": lambda x, y: F.binary_cross_entropy_with_logits(x, onehot(y)),
    "kl": lambda x, y: F.kl_div(x.log_softmax(1), onehot(y), reduction="batchmean"),
    "mean": lambda x, y: F.cross_entropy(x, y, reduction="none").mean(),
    "mean over a dimension": lambda x, y: x.square().sum(1).mean(0),
    "sum over the count": lambda x, y: F.cross_entropy(x, y, reduction="sum") / len(x),
    "times the inverse count": lambda x, y: F.cross_entropy(x, y, reduction="sum") * (1 / len(x)),
    "for accumulation": lambda x, y: F.cross_entropy(x, y) / 4,
    "weighted": lambda x, y: 0.5 * F.cross_entropy(x, y) + 0.1 * F.mse_loss(x, onehot(y)),
    "sum()": lambda x, y: sum([F.cross_entropy(x, y), x.square().sum()]),  # type: ignore[return-value]
    "negated": lambda x, y: -x.log_softmax(1).mean(),
    "two means": lambda x, y: F.cross_entropy(x, y) + x.square().mean(),
    "two plain means": lambda x, y: x.square().mean() + 0.1 * x.abs().mean(),
    "beside a sum": lambda x, y: F.cross_entropy(x, y) + 0.1 * x.square().sum(),
    "beside many sums": lambda x, y: F.cross_entropy(x, y) + sum(x.square().sum() for _ in range(100)),
    "plain, for accumulation": lambda x, y: x.square().mean() / 8,
    "for accumulation by a tensor": lambda x, y: F.cross_entropy(x, y) / torch.tensor(8.0),
    "two for accumulation": lambda x, y: (F.cross_entropy(x, y) + F.mse_loss(x, onehot(y))) / 8,
    "means of samples over the count": lambda x, y: per_sample(F.cross_entropy, x, y) / len(x),
    "cast": lambda x, y: F.cross_entropy(x.double(), y).float(),
    "hugging face": causal_lm_loss,
}
SUMS: dict[str, Make] = {
    "cross_entropy": lambda x, y: F.cross_entropy(x, y, reduction="sum"),
    "label smoothing": lambda x, y: F.cross_entropy(x, y, label_smoothing=0.1, reduction="sum"),
    "mse": lambda x, y: F.mse_loss(x, onehot(y), reduction="sum"),
    "bce": lambda x, y: F.binary_cross_entropy_with_logits(x, onehot(y), reduction="sum"),
    "sum of means of a sample": lambda x, y: F.mse_loss(x, onehot(y), reduction="none").mean(1).sum(),
    "mean times count": lambda x, y: F.cross_entropy(x, y) * len(x),
    "count times mean": lambda x, y: len(x) * F.cross_entropy(x, y),
    "mean times a tensor": lambda x, y: F.cross_entropy(x, y) * torch.tensor(float(len(x))),
    "weighted": lambda x, y: F.cross_entropy(x, y, reduction="sum") + 0.1 * x.square().sum(),
    "a learned weight": lambda x, y: (
        F.cross_entropy(x, y, reduction="sum") * torch.zeros((), requires_grad=True).exp()
    ),
    "halved": lambda x, y: F.mse_loss(x, onehot(y), reduction="sum") / 2,
    "weighted mean times count": lambda x, y: 0.3 * (F.mse_loss(x, onehot(y)) * len(x)),
    "means of one sample each": lambda x, y: per_sample(F.cross_entropy, x, y),
    "plain means of one sample each": lambda x, y: per_sample(lambda a, _: a.square().mean(), x, y),
    "two means of each sample": lambda x, y: (
        per_sample(F.cross_entropy, x, y) + 0.5 * per_sample(F.cross_entropy, -x, y)
    ),
    "two kinds of means of each sample": lambda x, y: (
        per_sample(F.cross_entropy, x, y) + 0.5 * per_sample(F.mse_loss, x, onehot(y))
    ),
    "smoothed means of one sample each": lambda x, y: per_sample(
        partial(F.cross_entropy, label_smoothing=0.1), x, y
    ),
    "a weighted mean as regularizer": lambda x, y: (
        F.cross_entropy(x, y, reduction="sum") + 0.1 * len(y) * x.square().mean()
    ),
    "an unused output": lambda x, y: F.cross_entropy(x, y, reduction="sum") - 0 * x.mean(),
    "an unused loss": lambda x, y: (
        F.cross_entropy(x, y, reduction="sum") + 0 * F.mse_loss(x, onehot(y)) + 0.0 * F.cross_entropy(x, y)
    ),
    "centred within": lambda x, y: (x - x.mean()).square().sum(),
    "own function": lambda x, y: Squared.apply(x),
}


@pytest.mark.parametrize("emulated", [False, True])
@pytest.mark.parametrize(
    ("make", "mean"),
    [pytest.param(make, True, id=f"mean: {name}") for name, make in MEANS.items()]
    + [pytest.param(make, False, id=f"sum: {name}") for name, make in SUMS.items()],
)
def test_means_are_told_from_sums(make: Make, mean: bool, emulated: bool) -> None:
    policy = Policy.fp16() if emulated else Policy.fp32()
    logits = torch.randn(4, 3, requires_grad=True)
    with policy.forward(torch.device("cpu"), emulate=True):
        loss = make(logits.to(policy.weights).float(), torch.tensor([0, 1, 2, 1]))
    assert is_mean(loss, 4) is mean
    assert is_mean(loss, torch.tensor(4)) is mean
    assert not is_mean(loss, 1)
    loss.backward()
    assert logits.grad is not None


def test_fewer_or_more_means_than_samples_are_no_means_of_samples() -> None:
    logits, classes = torch.randn(2, 3, requires_grad=True), torch.tensor([0, 1])
    assert is_mean(per_sample(F.cross_entropy, logits, classes), 3)  # of 3 tokens, for instance


def test_means_of_many_samples_are_no_mean() -> None:
    logits, classes = torch.randn(100, 3, requires_grad=True), torch.arange(100) % 3
    assert not is_mean(per_sample(F.cross_entropy, logits, classes), 100)
    assert is_mean(per_sample(F.cross_entropy, logits, classes), 64)


def test_nothing_is_read_from_a_device() -> None:
    logits = torch.randn(4, 3, device="meta", requires_grad=True)
    classes, count = torch.zeros(4, dtype=torch.int64, device="meta"), torch.ones((), device="meta")
    assert is_mean(F.cross_entropy(logits, classes), count)
    assert not is_mean(F.cross_entropy(logits, classes, reduction="sum") / count, count)
    assert not is_mean(F.cross_entropy(logits, classes) * count, count)


def test_the_stepper_warns_once() -> None:
    stepper = Stepper(mlp(), SGD(0.1), scaling=Scaling(init=64))
    x, classes = features(4, 0)

    def step() -> None:
        with stepper.forward():
            logits = stepper.model(x)
        stepper.backward(F.cross_entropy(logits.float(), classes), 4)
        stepper.step()

    with pytest.warns(EngineWarning, match=r"divided twice. Give the sum \(reduction='sum'\)") as caught:
        step()
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step()


RECIPE = """
import torch
from torch import nn
from torch.nn import functional as F
from launcher.recipe import Loss, Recipe, TensorData, recipe

def loss(network, batch):
    return Loss(F.cross_entropy(network(batch["x"]).float(), batch["label"]), len(batch["x"]))

@recipe("averaged")
def averaged(config):
    data = TensorData({"x": torch.randn(64, 3), "label": torch.randint(4, (64,))})
    return Recipe(lambda: nn.Linear(3, 4), data, data, loss)
"""


@pytest.mark.slow
@pytest.mark.timeout(90)
def test_the_launcher_logs_it_once(tmp_path) -> None:
    (tmp_path / "averaged.py").write_text(RECIPE)
    words = [f"recipes.path={tmp_path / 'averaged.py'}", "recipe.uses=averaged", "train.max_steps=3"]
    ended = run(tmp_path / "run", *words, ranks=2)
    assert ended.codes == [0, 0], ended
    assert len([text for text in ended.warnings if "the loss is a mean" in text]) == 1
    assert "the loss is a mean" in ended.log(1)
