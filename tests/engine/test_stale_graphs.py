"""A graph that was recorded before an update cannot be differentiated after it, as with torch.optim."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from launcher.engine import (
    SGD,
    AdamW,
    DDPOptions,
    ExponentialMovingAverage,
    ParameterGroup,
    Policy,
    Scaling,
    Stepper,
    TorchOptimizer,
)
from tests.engine.observe import deciding_on_device
from tests.meta_device import fake_group
from tests.models import features, loss_sum, mlp

BATCH = features(4, 0)
CHANGED = "modified by an inplace operation"
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "on the device": {"on_device": True},
    "AdamW": {"optimizer": AdamW(0.1)},
    "of torch": {"optimizer": TorchOptimizer(torch.optim.Adam, 0.1)},
    "groups": {"groups": [ParameterGroup("*.bias", lr_scale=0.5)]},
}


def stepper_of(policy: str = "fp32", **settings: Any) -> Stepper:
    defaults = {
        "optimizer": SGD(0.1),
        "scaling": Scaling("static", 1),
        "reference_count": 4,
        "emulate": False,
    }
    with deciding_on_device(settings.pop("on_device", False)):
        return Stepper(mlp(), policy=Policy.named(policy), **defaults | settings)


def loss_of(stepper: Stepper) -> Tensor:
    x, classes = BATCH
    with stepper.forward():
        return loss_sum(stepper.model(x), classes)


@pytest.mark.parametrize("policy", ["fp32", "fp16", "bf16", "pure_fp16"])
@pytest.mark.parametrize("name", SETTINGS)
def test_an_update_makes_earlier_graphs_stale(name, policy) -> None:
    if name == "of torch" and policy == "pure_fp16":
        pytest.skip("an optimizer of torch needs masters")
    refuses_the_stale(stepper_of(policy, **SETTINGS[name]))


SHARDED = pytest.param(
    DDPOptions(shard_optimizer=True),
    id="sharded",
    marks=pytest.mark.skipif(torch.__version__ < "2.13", reason="its fake group writes no reduced shard"),
)


@pytest.mark.parametrize("ddp", [pytest.param(DDPOptions(), id="native"), SHARDED])
def test_an_update_on_several_ranks_makes_earlier_graphs_stale(ddp) -> None:
    with fake_group(2) as group:
        refuses_the_stale(stepper_of("fp16", group=group, ddp=ddp))


def refuses_the_stale(stepper: Stepper) -> None:
    stale = loss_of(stepper)
    for _ in range(2):
        stepper.backward(loss_of(stepper), 4)
        assert not stepper.step().read().skipped
    with pytest.raises(RuntimeError, match=CHANGED):
        stepper.backward(stale, 4)
    assert stepper.abandon().read().abandoned_ranks == (0,)
    stepper.backward(loss_of(stepper), 4)
    assert not stepper.step().read().skipped


def test_a_loaded_state_makes_earlier_graphs_stale() -> None:
    stepper = stepper_of()
    stale = loss_of(stepper)
    stepper.load(stepper.state())
    with pytest.raises(RuntimeError, match=CHANGED):
        stepper.backward(stale, 4)


def test_a_graph_over_the_averages_is_stale_once_the_model_has_its_weights_again() -> None:
    stepper = stepper_of()
    average = ExponentialMovingAverage(stepper, 0.5)
    stepper.backward(loss_of(stepper), 4)
    stepper.step()
    earlier = loss_of(stepper)
    with average.in_model():
        with pytest.raises(RuntimeError, match=CHANGED):
            earlier.backward()
        stale = loss_of(stepper)
    with pytest.raises(RuntimeError, match=CHANGED):
        stepper.backward(stale, 4)
    stepper.abandon()
    stepper.backward(loss_of(stepper), 4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # nothing was changed in place
        assert not stepper.step().read().skipped


def test_a_step_that_the_host_skips_or_abandons_leaves_graphs_as_they_are() -> None:
    stepper = stepper_of()
    earlier = loss_of(stepper)
    stepper.backward(loss_of(stepper) * torch.inf, 4)
    assert stepper.step().read().skipped
    stepper.abandon()
    stepper.backward(earlier, 4)
    assert not stepper.step().read().skipped


@pytest.mark.parametrize("changed", [True, False])
def test_changes_of_weights_are_told_from_updates(changed) -> None:
    """By the same counters, over several updates."""
    stepper = stepper_of("fp16")
    weight = stepper.model[0].weight
    for _ in range(3):
        stepper.backward(loss_of(stepper), 4)
        stepper.step()
    if changed:
        with torch.no_grad():
            weight.fill_(0.25)
    assert len(stepper._parts.in_place.changed()) == changed
    masters = stepper.named_masters()
    assert bool((masters["0.weight"] == 0.25).all()) == changed


def test_an_update_counts_all_parameters_in_one_call(monkeypatch) -> None:
    """It is on the path of every step."""
    calls: list[list[nn.Parameter]] = []
    monkeypatch.setattr(torch.autograd.graph, "increment_version", lambda tensors: calls.append(tensors))
    stepper = stepper_of("fp16")
    calls.clear()
    stepper.backward(loss_of(stepper), 4)
    stepper.step()
    (counted,) = calls
    assert {id(p) for p in counted} == {id(p) for p in stepper.model.parameters()}
