"""A state as plain mappings: through torch.save and safetensors and back, bit for bit; others are refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from launcher.engine import SGD, AdamW, Policy, Scaling, Stepper, TorchOptimizer
from tests.engine.observe import flat_tensors, state_digest, train
from tests.models import Odd, conv_net, features

SCALING = Scaling(growth_interval=3, init=1024)
OPTIMIZERS = {
    "sgd": SGD(0.1, 0.9),
    "adamw": AdamW(0.01),
    "adam of torch": TorchOptimizer(torch.optim.Adam, 0.01),
}


def stepper_of(name: str = "adamw", policy: Policy | None = None, model: nn.Module | None = None) -> Stepper:
    policy = policy or Policy.fp16()
    scaling = SCALING if policy.scale_mode == "dynamic" else None
    return Stepper(model or conv_net(), OPTIMIZERS[name], policy, scaling=scaling)


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("policy", [Policy.fp16(), Policy.fp32()], ids=lambda policy: policy.name)
def test_a_run_continues_bit_for_bit_from_a_file(tmp_path: Path, name, policy) -> None:
    whole, resumed = stepper_of(name, policy), stepper_of(name, policy)
    for step in range(4):
        train(whole, *features(4, step, (3, 8, 8)))
    torch.save(whole.state_dict(), tmp_path / "state.pt")
    resumed.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert resumed.state().reference_count == 4
    for stepper in (whole, resumed):
        for step in range(4, 7):
            train(stepper, *features(4, step, (3, 8, 8)))
    one, other = flat_tensors(whole.state()), flat_tensors(resumed.state())
    assert one.keys() == other.keys()  # in whatever order a file has them
    assert all(torch.equal(one[key], other[key]) for key in one)


@pytest.mark.filterwarnings("ignore:.* parameters received no gradient")
def test_parameters_of_every_kind_come_back() -> None:
    steppers = []
    for seed in (0, 1):
        model = Odd(seed)
        model.register_buffer("flags", torch.tensor([True, False]))
        model.fixed = nn.Parameter(torch.tensor([1 / 3], dtype=torch.float64), requires_grad=False)
        steppers.append(stepper_of(model=model))
    train(steppers[0], *features(4, 0))
    steppers[1].load_state_dict(steppers[0].state_dict())
    assert state_digest(*steppers[:1], counters=True) == state_digest(*steppers[1:], counters=True)


def test_a_fresh_stepper_has_a_state_too() -> None:
    stepper = stepper_of()
    stepper.load_state_dict(stepper_of().state_dict())
    assert stepper.state().reference_count is None


def test_what_state_dict_gives_are_references() -> None:
    """As those of torch: a later step changes them."""
    stepper = stepper_of(policy=Policy.fp32())
    values = stepper.state_dict()
    before = values["weights"]["8.weight"].clone()
    train(stepper, *features(4, 0, (3, 8, 8)))
    assert not torch.equal(values["weights"]["8.weight"], before)
    values["weights"].clear()
    assert stepper.state().weights


def changed(part: str, name: str, value: object) -> Callable[[Stepper], dict[str, Any]]:
    def change(stepper: Stepper) -> dict[str, Any]:
        values = stepper.state_dict()
        values[part][name] = value
        return values

    return change


WRONG: dict[str, tuple[Callable[[Stepper], Any], str]] = {
    "no count": (changed("counters", "more", 1), r"counters of the loss scale, 0 are missing .*\(more\)"),
    "half weights": (
        changed("weights", "8.bias", torch.zeros(3).half()),
        r"8\.bias is torch\.float16 .*must be",
    ),
    "half moments": (
        changed("optimizer", "exp_avg/8.bias", torch.zeros(3).half()),
        r"exp_avg/8\.bias is torch\.float16 in the state and must be torch\.float32",
    ),
    "another buffer": (
        changed("buffers", "1.num_batches_tracked", torch.tensor(1.5)),
        r"1\.num_batches_tracked is torch\.float32 in the state and must be torch\.int64",
    ),
    "one buffer more": (changed("buffers", "extra", torch.zeros(1)), r"1 are not known here \(extra\)"),
    "a count": (lambda stepper: stepper.state_dict() | {"reference_count": 3}, "reference_count=3"),
}


@pytest.mark.parametrize("name", WRONG)
def test_other_mappings_are_refused_before_anything_changes(name) -> None:
    make, text = WRONG[name]
    stepper = stepper_of()
    train(stepper, *features(4, 0, (3, 8, 8)))
    values = make(stepper)
    before = state_digest(stepper, counters=True)
    with pytest.raises(ValueError, match=text):
        stepper.load_state_dict(values)
    assert state_digest(stepper, counters=True) == before


@pytest.mark.parametrize("policy", [Policy.fp16(), Policy.fp32()], ids=lambda policy: policy.name)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_state_of_parameters_that_require_gradients_loads_as_plain_values(name, policy) -> None:
    stepper, plain, other = (stepper_of(name, policy) for _ in range(3))
    train(stepper, *features(4, 0, (3, 8, 8)))
    state = stepper.state().clone()
    parameters = replace(
        state,
        weights={key: nn.Parameter(value) for key, value in state.weights.items()},
        optimizer={key: nn.Parameter(value) for key, value in state.optimizer.items()},
    )
    plain.load(state)
    other.load(parameters)
    assert not [tensor for tensor in (*other.own_masters(), *other.updater.tensors()) if tensor.requires_grad]
    for each in (plain, other):
        train(each, *features(4, 1, (3, 8, 8)))
    assert state_digest(other, counters=True) == state_digest(plain, counters=True)


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_the_bytes_of_the_training_state_are_counted_to_the_last(micro_batches) -> None:
    """fp16 weights and gradients, masters and two moments in fp32; two or more micro-batches add a sum."""
    model = nn.Sequential(nn.Linear(16, 8, bias=False))
    model.register_buffer("passes", torch.zeros(3))
    stepper = Stepper(model, AdamW(0.1), Policy.fp16(), micro_batches=micro_batches)
    buffers = 3 * (4 + 4)  # of a buffer: now, and before the step
    per_element = 2 + 2 + 4 + 8 + (4 if micro_batches > 1 else 0)
    assert stepper.state_bytes() == 16 * 8 * per_element + buffers
