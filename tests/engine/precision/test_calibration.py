"""The start of the loss scale from one dry backward: as high as fits, and without a trace."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from launcher.engine import SGD, Policy, Scaling, Stepper, UnusableError
from tests.engine.observe import state_digest, train
from tests.models import Planted, conv_net, loss_sum


def planted(gradient: float, scaling: Scaling | None = None) -> tuple[Stepper, int | None]:
    model = Planted()
    stepper = Stepper(model, SGD(0.1), Policy.fp16(), scaling=scaling, reference_count=4)
    return stepper, stepper.calibrate(lambda: model(gradient, 0.0))


@pytest.mark.parametrize("gradient", [1e-6, 3e-4, 0.9, 1.0, 17.0, 2.0**10])
def test_the_largest_gradient_ends_two_octaves_below_overflow(gradient) -> None:
    stepper, exponent = planted(gradient)
    scaled = gradient * 2**exponent / 4  # divided by the reference count
    at_its_limit = exponent == 24
    assert scaled <= 65504 / 4
    assert at_its_limit or 2 * 2 * scaled > 65504 / 4
    assert stepper.scale.value().item() == 2**exponent


def test_the_first_step_is_not_skipped_where_the_default_start_would_be() -> None:
    gradient = 50.0  # times 65536 / 4 is far beyond 65504
    for calibrated in (False, True):
        model = Planted()
        stepper = Stepper(model, SGD(0.1), Policy.fp16(), reference_count=4)
        if calibrated:
            stepper.calibrate(lambda model=model: model(gradient, 0.0))
        with stepper.forward():
            loss = model(gradient, 0.0)
        stepper.backward(loss, 4)
        assert stepper.step().read().skipped is not calibrated


@pytest.mark.parametrize("gradient", [0.0, math.inf, math.nan])
def test_a_batch_that_says_nothing_leaves_the_start_alone(gradient) -> None:
    stepper, exponent = planted(gradient)
    assert exponent is None
    assert stepper.scale.value().item() == 65536


def test_limits_hold() -> None:
    assert planted(1e-30)[1] == 24
    assert planted(1e4, Scaling(min=4096, init=65536))[1] == 12


def test_it_leaves_no_trace() -> None:
    """Weights, masters, BatchNorm statistics, random state and the first step are as without it."""
    outcomes = []
    for calibrated in (False, True):
        model = conv_net()
        stepper = Stepper(model, SGD(0.1), Policy.fp16(), scaling=Scaling("static", 1024), reference_count=4)
        x, classes = (
            torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(0)),
            torch.tensor([0, 1, 2, 0]),
        )
        before = state_digest(stepper), torch.random.get_rng_state()
        if calibrated:
            stepper.calibrate(lambda model=model, x=x, classes=classes: loss_sum(model(x), classes))
            stepper.scale.start_at(10)
        assert state_digest(stepper) == before[0]
        assert torch.equal(torch.random.get_rng_state(), before[1])
        assert all(p.grad is None for p in model.parameters())
        train(stepper, x, classes)
        outcomes.append(state_digest(stepper))
    assert outcomes[0] == outcomes[1]


def test_it_needs_to_know_how_many_samples_a_step_has() -> None:
    model = Planted()
    with pytest.raises(ValueError, match="needs the count of the loss"):
        Stepper(model, SGD(0.1), Policy.fp16()).calibrate(lambda: model(1.0, 1.0))


def test_a_step_of_many_micro_batches_starts_lower() -> None:
    """The sum over 64 of them is 64 times larger, and must fit as well."""
    found = []
    for micro_batches in (1, 64):
        model = Planted()
        stepper = Stepper(model, SGD(0.1), Policy.fp16(), reference_count=64, micro_batches=micro_batches)
        found.append(stepper.calibrate(lambda model=model: model(50.0, 0.0)))
    assert found[0] - found[1] == 6


@pytest.mark.parametrize("policy", [Policy.bf16(), Policy.fp32()], ids=lambda policy: policy.name)
def test_where_there_is_no_loss_scale_there_is_none_to_start(policy) -> None:
    model = Planted()
    stepper = Stepper(model, SGD(0.1), policy, reference_count=4)
    assert stepper.calibrate(lambda: model(50.0, 0.0)) is None
    assert stepper.scale.value().item() == 1


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_it_sees_through_activation_checkpointing(use_reentrant) -> None:
    inner = Planted()
    stepper = Stepper(inner, SGD(0.1), Policy.fp16(), reference_count=4)
    one = torch.ones((), requires_grad=True)  # without it the re-entrant kind has nothing to do
    found = stepper.calibrate(
        lambda: checkpoint(lambda x: inner(50.0 * x, 0.0 * x), one, use_reentrant=use_reentrant)
    )
    assert found == planted(50.0)[1]
    assert all(p.grad is None for p in inner.parameters())


def test_what_a_step_refuses_is_refused_here_too() -> None:
    embedding, tokens = nn.Embedding(4, 2), torch.tensor([1, 2])
    stepper = Stepper(embedding, SGD(0.1), Policy.fp32(), scaling=Scaling(), reference_count=4)
    with pytest.raises(UnusableError, match="the gradient of weight is sparse"):
        stepper.calibrate(lambda: nn.functional.embedding(tokens, embedding.weight, sparse=True).sum())
    with pytest.raises(UnusableError, match="does not depend on any trainable parameter"):
        stepper.calibrate(lambda: torch.zeros(()))


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_where_gradients_are_off_the_loss_is_not_blamed(context) -> None:
    model = nn.Linear(2, 1)
    stepper = Stepper(model, SGD(0.1), Policy.fp16(), reference_count=4)
    with (
        context(),
        pytest.raises(UnusableError, match=r"^gradients are switched off here, by torch\.no_grad"),
    ):
        stepper.calibrate(lambda: model(torch.ones(4, 2)).float().sum())
    assert stepper.calibrate(lambda: model(torch.ones(4, 2)).float().sum()) is not None


def test_a_loss_that_no_parameter_shares_in_says_nothing() -> None:
    stepper = Stepper(Planted(), SGD(0.1), Policy.fp16(), reference_count=4)
    x = torch.ones(3, requires_grad=True)
    assert stepper.calibrate(lambda: x.sum()) is None
    assert stepper.scale.value().item() == 65536
