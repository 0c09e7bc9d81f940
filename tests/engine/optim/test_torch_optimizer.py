"""Optimizers of torch.optim on fp32 masters: the same values, with skip, clip and learning-rate table."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from launcher.engine import SGD, AdamW, MuonWithAdamW, Policy, Scaling, Stepper, TorchOptimizer, UnusableError
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
    stepper = Stepper(model, TorchOptimizer(kind, LR, **options), Policy.fp32(), reference_count=16)
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
    stepper = Stepper(Planted(), TorchOptimizer(kind, LR, **options), Policy.fp16(), reference_count=1)

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
        TorchOptimizer(torch.optim.Adagrad, 9.9, eps=0.0),
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


def untouched(model: nn.Module, optimizer: TorchOptimizer, policy: Policy, match: str) -> None:
    """A Stepper of these is refused, and its model is what it was."""
    before = {name: (p.data_ptr(), p.dtype, p.stride()) for name, p in model.named_parameters()}
    with pytest.raises(UnusableError, match=match):
        Stepper(model, optimizer, policy)
    assert {name: (p.data_ptr(), p.dtype, p.stride()) for name, p in model.named_parameters()} == before


def test_a_policy_without_masters_is_refused_before_the_model_is_moved() -> None:
    adam = TorchOptimizer(torch.optim.Adam, LR)
    untouched(mlp(), adam, Policy.pure_fp16(), "Adam needs fp32 masters, and policy pure_fp16 has none")


def test_a_parameter_that_the_optimizer_refuses_is_named_before_the_model_is_moved() -> None:
    muon = TorchOptimizer(torch.optim.Muon, LR)
    untouched(mlp(), muon, Policy.fp16(), r"Muon refuses parameter 0.bias, .* or use MuonWithAdamW")


def test_muon_trains_a_model_of_matrices_as_torch_itself() -> None:
    def matrices() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(8, 16, bias=False), nn.ReLU(), nn.Linear(16, 3, bias=False))

    model, twin = matrices(), matrices()
    stepper = Stepper(model, TorchOptimizer(torch.optim.Muon, LR), Policy.fp32(), reference_count=16)
    theirs = torch.optim.Muon(twin.parameters(), lr=LR)
    for step in range(5):
        x, classes = batch(step)
        train(stepper, x, classes)
        theirs.zero_grad()
        torch.nn.functional.cross_entropy(twin(x), classes).backward()
        theirs.step()
    for ours, reference in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.allclose(ours, reference, atol=1e-3)  # its iteration runs in bf16


class OnlyVectors(torch.optim.SGD):
    def __init__(self, params, lr: float) -> None:
        super().__init__(params, lr)
        if any(p.ndim != 1 for group in self.param_groups for p in group["params"]):
            raise ValueError("vectors only")


def test_the_shape_of_a_probe_is_no_reason_to_refuse_an_optimizer() -> None:
    assert TorchOptimizer(OnlyVectors, LR).kind is OnlyVectors
    with pytest.raises(UnusableError, match=r"Muon refuses lr=0.01, .*: momentum should be"):
        TorchOptimizer(torch.optim.Muon, LR, momentum=-1.0)


ALL = {
    "Adam": (torch.optim.Adam, {}),
    "AdamW": (torch.optim.AdamW, {}),
    "amsgrad": (torch.optim.Adam, {"amsgrad": True}),
    "NAdam": (torch.optim.NAdam, {}),
    "Adamax": (torch.optim.Adamax, {}),
    "Adadelta": (torch.optim.Adadelta, {}),
    "Adagrad": (torch.optim.Adagrad, {}),
    "Adafactor": (torch.optim.Adafactor, {}),
    "ASGD": (torch.optim.ASGD, {}),
    "MuonWithAdamW": (MuonWithAdamW, {}),
    "RMSprop": (torch.optim.RMSprop, {}),
    "RMSprop, centered": (torch.optim.RMSprop, {"centered": True, "momentum": 0.5}),
    "Rprop": (torch.optim.Rprop, {}),
    "SGD": (torch.optim.SGD, {}),
    "SGD with momentum": (torch.optim.SGD, {"momentum": 0.9}),
    "our AdamW": AdamW(LR),
    "our SGD": SGD(LR, 0.9),
}


def trained(name: str, steps: int = 3) -> Stepper:
    kind = ALL[name]
    optimizer = TorchOptimizer(kind[0], LR, **kind[1]) if isinstance(kind, tuple) else kind
    stepper = Stepper(mlp(), optimizer, Policy.fp16(), reference_count=16)
    for number in range(steps):
        train(stepper, *batch(number))
    return stepper


@pytest.mark.sampled(every=5)
@pytest.mark.parametrize("name", ALL)
def test_the_state_of_another_optimizer_is_refused_as_a_whole(name) -> None:
    """Of each that has other states; every one loads its own, saved before the first update and after it."""
    for steps in (0, 3):
        own = trained(name, steps).state().optimizer
        for other in ALL:
            state, stepper = trained(other, steps).state(), trained(name)
            before = state_digest(stepper, counters=True)
            if own.keys() == state.optimizer.keys():
                assert other == name or steps == 0 or {name, other} == {"Adam", "AdamW"}
                stepper.load(state)
                assert stepper.state().optimizer.keys() == state.optimizer.keys()
                train(stepper, *batch(9))
                continue
            with pytest.raises(ValueError, match="the state does not fit: of the optimizer states"):
                stepper.load(state)
            assert state_digest(stepper, counters=True) == before, other


@pytest.mark.parametrize("name", ["Adam", "Adagrad", "Adafactor", "SGD with momentum"])
def test_damaged_states_of_a_torch_optimizer_are_refused_as_a_whole(name) -> None:
    stepper = trained(name)
    state, before = stepper.state(), state_digest(stepper, counters=True)
    for key, value in list(state.optimizer.items())[-3:]:
        for wrong in (value.half(), value.long(), value[None], value.to("meta"), None):
            named = state.optimizer | {key: wrong}
            if wrong is None:
                del named[key]
            with pytest.raises(ValueError, match="of the optimizer states"):
                stepper.load(replace(state, optimizer=named))
            assert state_digest(stepper, counters=True) == before
    with pytest.raises(ValueError, match=r"of the optimizer states, .* not known here \(more/0.bias\)"):
        stepper.load(replace(state, optimizer=state.optimizer | {"more/0.bias": torch.zeros(16)}))


class Counting(torch.optim.SGD):
    """Counts its steps in a number of Python."""

    keeps: object = 0

    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                state["count"] = state.get("count", self.keeps) + 1
        return super().step(closure)


def test_numbers_of_a_foreign_optimizer_are_saved() -> None:
    optimizer = TorchOptimizer(Counting, LR, momentum=0.9)
    whole, resumed = (Stepper(mlp(), optimizer, Policy.fp16(), reference_count=16) for _ in range(2))
    for number in range(4):
        train(whole, *batch(number))
        if number in (0, 1, 3):
            resumed.load(whole.state())
            assert resumed.state().optimizer.keys() == whole.state().optimizer.keys()
            assert state_digest(resumed, counters=True) == state_digest(whole, counters=True)
        count = whole.state().optimizer["count/0.bias"]
        assert (int(count), count.dtype) == (number + 1, torch.int64)
    train(resumed, *batch(4))
    assert int(resumed.state().optimizer["count/0.bias"]) == 5


class Listing(Counting):
    def step(self, closure=None):
        super().step(closure)
        for state in self.state.values():
            state["history"] = [1.0]


def test_what_a_state_cannot_hold_is_refused_when_it_is_saved() -> None:
    stepper = Stepper(mlp(), TorchOptimizer(Listing, LR), Policy.fp16(), reference_count=16)
    train(stepper, *batch(0))
    with pytest.raises(
        UnusableError, match="Listing keeps a list as its state history, which cannot be saved"
    ):
        stepper.state()
