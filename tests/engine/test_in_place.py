"""What others than the engine write into weights reaches the fp32 masters, and nothing else does."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, spectral_norm

from launcher.engine import (
    SGD,
    AdamW,
    Policy,
    Scaling,
    Stepper,
    TorchOptimizer,
)
from tests.engine.observe import state_digest, train, weights_are_rounded_masters
from tests.meta_device import META, MetaDevice
from tests.models import Planted, features, mlp

HALF = [Policy.fp16(), Policy.bf16()]
LIMIT = 0.125  # exact in half


def clamp(model: nn.Module) -> None:
    with torch.no_grad():
        for p in model.parameters():
            p.clamp_(-LIMIT, LIMIT)


def copy_some(model: nn.Module) -> None:
    with torch.no_grad():
        model[0].weight[2, 3] = 1 / 3
        model[2].weight[:, ::2].copy_(torch.full((3, 8), -1 / 3))


def initialise(model: nn.Module) -> None:
    nn.init.constant_(model[0].weight, 0.1)


def load_other(model: nn.Module) -> None:
    model.load_state_dict(mlp(seed=5).state_dict())


WRITERS: tuple[Callable[[nn.Module], None], ...] = (clamp, copy_some, initialise, load_other)


def trained(policy: Policy, optimizer: object = None) -> Stepper:
    scaling = Scaling("static", 64) if policy.arithmetic == torch.float16 else None
    stepper = Stepper(mlp(), optimizer or AdamW(0.01), policy, scaling=scaling, reference_count=4)
    train(stepper, *features(4, 0))
    return stepper


def expected(stepper: Stepper, write: Callable[[nn.Module], None]) -> dict[str, Tensor]:
    """The masters after `write`: the weight where it is not the master rounded, untouched elsewhere."""
    before = {name: master.clone() for name, master in stepper.named_masters().items()}
    write(stepper.model)
    weights = dict(stepper.model.named_parameters())
    return {
        name: torch.where(master.to(weights[name].dtype) == weights[name], master, weights[name].float())
        for name, master in before.items()
    }


@pytest.mark.parametrize(
    "optimizer", [AdamW(0.01), TorchOptimizer(torch.optim.Adam, 0.01)], ids=["own", "torch"]
)
@pytest.mark.parametrize("policy", HALF, ids=lambda policy: policy.name)
@pytest.mark.parametrize("write", WRITERS)
def test_what_changed_is_taken_and_the_rest_keeps_its_digits(write, policy, optimizer) -> None:
    stepper, reference = (trained(policy, optimizer) for _ in range(2))
    masters = expected(reference, write)
    state = reference.state()
    assert all(torch.equal(state.weights[name], master) for name, master in masters.items())
    assert (
        any(not torch.equal(m.to(policy.weights).float(), m) for m in masters.values()) or write is load_other
    )

    write(stepper.model)  # the step itself takes them too
    reference.load(replace(state, weights=masters).clone())
    train(stepper, *features(4, 1))
    train(reference, *features(4, 1))
    assert state_digest(stepper) == state_digest(reference)
    assert weights_are_rounded_masters(stepper)


@pytest.mark.parametrize("policy", ["fp32", "amp_fp16", "pure_fp16"])
@pytest.mark.parametrize("write", WRITERS)
def test_without_rounded_copies_the_weights_are_all_there_is(write, policy) -> None:
    stepper = trained(Policy.named(policy))
    write(stepper.model)
    values = [p.clone() for p in stepper.model.parameters()]
    state = stepper.state().weights
    for (name, _), value in zip(stepper.model.named_parameters(), values, strict=True):
        assert torch.equal(state[name], value.float())
    train(stepper, *features(4, 1))
    assert all(
        (p - value).abs().max() < 0.05 for p, value in zip(stepper.model.parameters(), values, strict=True)
    )


def test_weights_clipped_as_for_a_wasserstein_critic_stay_clipped() -> None:
    x, classes = features(16, 0)
    stepper = Stepper(mlp(), SGD(0.5), scaling=Scaling("static", 64))
    torch_model = mlp()
    torch_optimizer = torch.optim.SGD(torch_model.parameters(), 0.5)
    for _ in range(6):
        train(stepper, x, classes)
        clamp(stepper.model)
        torch_optimizer.zero_grad()
        nn.functional.cross_entropy(torch_model(x), classes).backward()
        torch_optimizer.step()
        clamp(torch_model)
    masters = stepper.named_masters()
    for name, p in torch_model.named_parameters():
        assert masters[name].abs().max() <= LIMIT * (1 + 2**-11)
        assert torch.allclose(masters[name], p, atol=2e-3)


def test_a_skipped_step_keeps_what_was_written() -> None:
    stepper = Stepper(Planted(), SGD(1.0), scaling=Scaling("static", 1), reference_count=1)
    with torch.no_grad():
        stepper.model.matrix.fill_(1 / 3)
    stepper.backward(stepper.model(torch.inf, 1.0), 1)
    assert stepper.step().read().skipped
    assert torch.equal(stepper.named_masters()["matrix"], torch.full((2, 3), 1 / 3).half().float())
    assert weights_are_rounded_masters(stepper)


def test_a_loaded_state_replaces_what_was_written() -> None:
    stepper = trained(Policy.fp16())
    state = stepper.state().clone()
    before = state_digest(stepper)
    initialise(stepper.model)
    stepper.load(state)
    assert state_digest(stepper) == before
    train(stepper, *features(4, 1))


def test_values_that_are_not_finite_are_taken_as_they_are() -> None:
    stepper = Stepper(Planted(), SGD(1.0), scaling=Scaling("static", 1), reference_count=1)
    with torch.no_grad():
        stepper.model.matrix[0] = torch.tensor([torch.nan, torch.inf, -torch.inf])
    weights = stepper.state().weights["matrix"]
    assert weights[0, 0].isnan()
    assert torch.equal(weights[0, 1:], torch.tensor([torch.inf, -torch.inf]))


class Bag(nn.Module):
    """Sums of rows of a table whose rows are kept short; row 5 is never asked for."""

    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = kind(6, 4, max_norm=1.0)
        self.head = nn.Linear(4, 3)

    def forward(self, rows: Tensor) -> Tensor:
        # rows: [n, 2]
        found = self.table(rows)
        return self.head(found if found.ndim == 2 else found.sum(1))


def rows_of(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randint(0, 5, (6, 2), generator=generator), torch.randint(0, 3, (6,), generator=generator)


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
@pytest.mark.parametrize("policy", ["fp32", "amp_fp16", "fp16", "bf16"])
def test_a_table_with_a_largest_norm_trains_as_with_torch(policy, kind) -> None:
    stepper = Stepper(Bag(kind), SGD(0.5), Policy.named(policy), scaling=Scaling("static", 64))
    model = Bag(kind)
    untouched = model.table.weight[5].detach().clone()
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    for step in range(8):
        rows, classes = rows_of(step)
        train(stepper, rows, classes)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(rows), classes).backward()
        optimizer.step()
        assert weights_are_rounded_masters(stepper)
    masters = stepper.state().weights
    tolerance = {"fp32": 1e-5, "bf16": 5e-2}.get(policy, 5e-3)
    for name, p in model.named_parameters():
        assert torch.allclose(masters[name], p, atol=tolerance), name
    assert torch.equal(masters["table.weight"][5], untouched)


@pytest.mark.parametrize(
    "wrap", [parametrizations.spectral_norm, parametrizations.weight_norm, spectral_norm]
)
def test_normalised_weights_train_without_a_word(wrap) -> None:
    """They are computed anew, from parameters that stay where they are."""
    x, classes = features(16, 0)
    model = mlp()
    wrap(model[0])
    stepper = Stepper(model, SGD(0.3), scaling=Scaling("static", 64))
    losses = [train(stepper, x, classes).loss for _ in range(10)]
    assert losses[-1] < losses[0]
    assert weights_are_rounded_masters(stepper)
    stepper.state()


def test_taking_changes_asks_the_host_nothing() -> None:
    with MetaDevice() as device:
        model = mlp().to(META)
        stepper = Stepper(model, AdamW(0.1), Policy.fp16(), emulate=True, reference_count=4)
        device.reads.clear()
        clamp(model)
        with stepper.forward():
            loss = model(torch.empty(4, 8, device=META)).float().square().sum()
        stepper.backward(loss, 4)
        stepper.step()
        assert device.reads == []


class Teacher(nn.Module):
    """Has a frozen copy that its forward pass moves towards the trained part, if it is to."""

    def __init__(self, moves: bool) -> None:
        super().__init__()
        self.moves, self.student, self.teacher = moves, mlp(), mlp(seed=1).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            for old, new in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
                if self.moves:
                    old.lerp_(new, 0.1)
        return self.student(x) + self.teacher(x)


@pytest.mark.parametrize("policy", ["fp32", "amp_fp16", "fp16"])
@pytest.mark.parametrize("moves", [False, True])
def test_frozen_parameters_that_are_written_are_named_once(moves, policy) -> None:
    """No skipped step undoes that, and no comparison of the ranks sees it."""
    stepper = Stepper(Teacher(moves), SGD(0.1), Policy.named(policy), reference_count=4)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(3):
            train(stepper, *features(4, step))
        stepper.load(stepper.state())
        train(stepper, *features(4, 3))
    texts = [str(each.message) for each in caught]
    assert [text.startswith("teacher.0.weight, ") and "frozen" in text for text in texts] == [True] * moves
