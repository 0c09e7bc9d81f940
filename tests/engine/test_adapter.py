"""Optimizers of torch.optim on fp32 masters: the same values, with skip, clip and learning-rate table."""

from __future__ import annotations

import pytest
import torch

from launcher.engine import Policy, Scaling, Stepper, TorchOptimizer
from tests.engine.observe import state_digest, train, weights_are_rounded_masters
from tests.models import Planted, mlp

KINDS = {
    "Adam": (torch.optim.Adam, {"weight_decay": 0.01}),
    "NAdam": (torch.optim.NAdam, {}),
    "RAdam": (torch.optim.RAdam, {}),
    "RMSprop": (torch.optim.RMSprop, {"momentum": 0.5}),
    "Adagrad": (torch.optim.Adagrad, {}),
}
LR = 0.01


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(16, 8, generator=generator), torch.randint(3, (16,), generator=generator)


@pytest.mark.parametrize("name", KINDS)
def test_fp32_gives_the_values_of_torch_itself(name) -> None:
    kind, options = KINDS[name]
    model, twin = mlp(), mlp()
    stepper = Stepper(model, TorchOptimizer(kind, LR, options), Policy.fp32(), reference_count=16)
    theirs = kind(twin.parameters(), lr=LR, **options)
    for step in range(30):
        x, classes = batch(step)
        train(stepper, x, classes)
        theirs.zero_grad()
        torch.nn.functional.cross_entropy(twin(x), classes).backward()
        theirs.step()
    for ours, reference in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.allclose(ours, reference, rtol=1e-4, atol=2e-6)


@pytest.mark.parametrize("name", KINDS)
def test_fp16_keeps_masters_and_a_skipped_step_touches_nothing(name) -> None:
    kind, options = KINDS[name]
    stepper = Stepper(Planted(), TorchOptimizer(kind, LR, options), Policy.fp16(), reference_count=1)

    def step(gradient: float):
        with stepper.forward():
            loss = stepper.model(gradient, gradient)
        stepper.backward(loss, 1)
        return stepper.step().read()

    step(0.01)
    assert weights_are_rounded_masters(stepper)
    before = state_digest(stepper)
    assert step(float("inf")).skipped
    assert state_digest(stepper) == before
    assert not step(0.01).skipped
    assert state_digest(stepper) != before


def test_the_rate_comes_from_the_table() -> None:
    model = Planted()
    stepper = Stepper(
        model,
        TorchOptimizer(torch.optim.Adagrad, 9.9, {"eps": 0.0}),
        Policy.fp32(),
        scaling=Scaling("none"),
        learning_rates=[0.5, 0.25],
        reference_count=1,
    )
    for _ in range(2):
        with stepper.forward():
            loss = model(1.0, 1.0)
        stepper.backward(loss, 1)
        stepper.step()
    # Adagrad moves by lr / sqrt(number of steps) where the gradient is always 1
    assert torch.allclose(model.vector, torch.full((3,), -0.5 - 0.25 / 2**0.5))


@pytest.mark.parametrize("kind", [torch.optim.LBFGS, torch.optim.SparseAdam])
def test_optimizers_that_cannot_work_on_reduced_gradients_are_refused(kind) -> None:
    with pytest.raises(ValueError, match=f"{kind.__name__} cannot be used here: it"):
        TorchOptimizer(kind, 0.1)


def test_a_policy_without_masters_is_refused() -> None:
    with pytest.raises(ValueError, match="Adam needs fp32 masters"):
        Stepper(mlp(), TorchOptimizer(torch.optim.Adam, LR), Policy.pure_fp16())
