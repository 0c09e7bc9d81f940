"""A parameter without a gradient has a zero one: decay and momentum act on it; frozen ones are left alone."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

from launcher.engine import SGD, AdamW, EngineWarning, Policy, Scaling, Stepper, TorchOptimizer

ADAMW = {"lr": 0.1, "weight_decay": 0.1}
CASES = {
    "sgd": (
        SGD(0.1, 0.9, weight_decay=0.1),
        torch.optim.SGD,
        {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1},
    ),
    "adamw": (AdamW(0.1, weight_decay=0.1), torch.optim.AdamW, ADAMW),
    "torch": (TorchOptimizer(torch.optim.AdamW, 0.1, weight_decay=0.1), torch.optim.AdamW, ADAMW),
}


def model_of() -> nn.ModuleDict:
    torch.manual_seed(0)
    model = nn.ModuleDict({name: nn.Linear(2, 2) for name in ("always", "sometimes", "never", "frozen")})
    model["frozen"].requires_grad_(False)
    return model


@pytest.mark.parametrize("name", CASES)
def test_decay_and_momentum_act_as_on_zero_gradients(name) -> None:
    optimizer, kind, options = CASES[name]
    stepper = Stepper(model_of(), optimizer, Policy.fp32(), reference_count=1)
    reference = model_of()
    trainable = [p for p in reference.parameters() if p.requires_grad]
    other = kind(trainable, **options)
    for step in range(4):
        for model in (stepper.model, reference):
            used = ["always"] if step % 2 else ["always", "sometimes"]
            loss = sum(model[key](torch.ones(1, 2)).square().sum() for key in used)
            if model is reference:
                for p in trainable:
                    p.grad = torch.zeros_like(p)
                loss.backward()
                other.step()
            else:
                stepper.backward(loss, 1)
                stepper.step()
    for (key, p), q in zip(stepper.model.named_parameters(), reference.parameters(), strict=True):
        assert torch.allclose(p, q, atol=1e-6), key
    assert torch.equal(stepper.model["frozen"].weight, model_of()["frozen"].weight)
    assert not torch.equal(stepper.model["never"].weight, model_of()["never"].weight)


def zero_start() -> nn.Module:
    """Its first layer has no gradient until the second, which starts at zero, has moved."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    nn.init.zeros_(model[1].weight)
    return model


def detached() -> nn.Module:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[0].register_forward_hook(lambda module, inputs, output: output.detach())
    return model


def times_zero() -> nn.Module:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[0].register_forward_hook(lambda module, inputs, output: output * 0)
    return model


AT_ONCE = {1: "2 of 4 parameters received no gradient in the first applied step: 0.weight, 0.bias. "}


@pytest.mark.parametrize("policy", [Policy.fp32(), Policy.fp16()], ids=lambda policy: policy.name)
@pytest.mark.parametrize(("build", "said"), [(zero_start, {}), (detached, AT_ONCE), (times_zero, {})])
def test_parameters_without_any_gradient_are_named_once(policy, build, said) -> None:
    torch.manual_seed(0)
    model = build()
    model.empty = nn.Parameter(torch.zeros(0))
    scaling = Scaling("static", 128) if policy.name == "fp16" else Scaling("none")
    stepper = Stepper(model, SGD(0.01), policy, scaling=scaling, reference_count=1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        steps = []
        for step in range(1, 26):
            with stepper.forward():
                loss = nn.Sequential.forward(model, torch.ones(1, 2)).float().sub(1).square().sum()
            stepper.backward(loss, 1)
            stepper.step().read()
            steps += [step] * (len(caught) - len(steps))
    assert [warning.filename for warning in caught] == [__file__] * len(said)
    found = {step: str(warning.message) for step, warning in zip(steps, caught, strict=True)}
    assert found.keys() == said.keys()
    for step, text in said.items():
        assert found[step].startswith(text)


def test_a_change_of_the_micro_batches_before_the_report_is_read_keeps_the_warning() -> None:
    stepper = Stepper(detached(), SGD(0.01), Policy.fp32(), reference_count=1)
    stepper.backward(stepper.model(torch.ones(1, 2)).square().sum(), 1)
    result = stepper.step()
    stepper.set_micro_batches(2)
    with pytest.warns(EngineWarning, match="2 of 4 parameters received no gradient"):
        result.read()
