"""Buffers: fp32 whatever they were built as, and one transaction per step whatever a module does to them."""

from __future__ import annotations

import copy
import pickle
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from launcher.engine import SGD, AdamW, Policy, Scaling, Stepper, UnusableError
from tests.engine.observe import state_digest, train
from tests.models import Planted, conv_net, features, loss_sum

POLICIES = ("fp32", "amp_fp16", "fp16", "pure_fp16", "bf16", "amp_bf16")


def rounded(dtype: torch.dtype) -> nn.Module:
    """The fp32 model with the values that it would have in `dtype`."""
    return conv_net().to(dtype).float()


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("emulate", [True, False])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_model_built_in_half_trains_as_its_fp32_original(policy, emulate, dtype) -> None:
    options = {"policy": Policy.named(policy), "emulate": emulate}
    steppers = [Stepper(model, AdamW(0.01), **options) for model in (conv_net().to(dtype), rounded(dtype))]
    for stepper in steppers:
        for step in range(3):
            train(stepper, *features(8, step, (3, 8, 8)))
        assert stepper.model[1].running_mean.dtype == torch.float32
        assert stepper.model[1].running_mean.abs().min() > 0
        assert stepper.state().counters["applied_steps"] > 0
    assert state_digest(steppers[0]) == state_digest(steppers[1])


class Keeping(nn.Module):
    """Puts a half tensor in its buffer's place at each pass, as an average over half outputs does."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.planted = Planted()
        self.register_buffer("mean", torch.zeros(2, dtype=dtype))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int16))
        self.register_buffer("phase", torch.zeros(2, dtype=torch.complex64))
        self.register_buffer("exact", torch.zeros(2, dtype=torch.float64))

    def forward(self, gradient: float) -> Tensor:
        self.mean = (self.mean + 1 / 3).half()
        self.steps.add_(1)
        return self.planted(gradient, 1.0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_half_values_in_a_buffers_place_are_widened(dtype) -> None:
    model = Keeping(dtype)
    kept = model.mean
    stepper = Stepper(model, SGD(0.1), scaling=Scaling("static", 1), reference_count=1)
    assert [b.dtype for b in model.buffers()] == [torch.float32, torch.int16, torch.complex64, torch.float64]
    for gradient, passes in ((1.0, 1), (torch.inf, 1), (1.0, 2)):
        with stepper.forward():
            loss = model(gradient)
        stepper.backward(loss, 1)
        stepper.step()
        assert model.mean is kept
        assert model.mean.dtype == torch.float32
        assert model.steps == passes
        assert torch.equal(model.mean, torch.full((2,), 1 / 3).half().float() * passes)


def test_a_state_with_half_buffers_is_widened() -> None:
    stepper = Stepper(conv_net(), SGD(0.1), scaling=Scaling(init=64))
    train(stepper, *features(8, 0, (3, 8, 8)))
    state = stepper.state().clone()
    halves = {n: b.half() if b.is_floating_point() else b for n, b in state.buffers.items()}
    stepper.load(replace(state, buffers=halves))
    assert stepper.model[1].running_mean.dtype == torch.float32
    assert torch.equal(stepper.model[1].running_mean, halves["1.running_mean"].float())


def test_each_buffer_that_was_replaced_is_taken_in_whichever_others_were_not() -> None:
    model = conv_net()
    stepper = Stepper(model, SGD(0.1), Policy.fp32())
    kept, *_, replaced, _ = model.named_buffers()
    module, _, key = replaced[0].rpartition(".")
    model.get_submodule(module)._buffers[key] = torch.full_like(replaced[1], 5.0)
    stepper.buffers.collect()
    assert torch.equal(replaced[1], torch.full_like(replaced[1], 5.0))
    assert model.get_submodule(module)._buffers[key] is replaced[1]
    assert not torch.equal(kept[1], torch.full_like(kept[1], 5.0))


def test_a_buffer_of_another_shape_is_refused_before_the_update() -> None:
    """What is left can be abandoned: nothing was written."""
    model = conv_net()
    stepper = Stepper(model, AdamW(0.1), Policy.fp16(), scaling=Scaling("static", 64))
    before = state_digest(stepper)
    x, classes = features(4, 0, (3, 8, 8))
    with stepper.forward():
        loss = loss_sum(model(x), classes)
    stepper.backward(loss, 4)
    model[1].running_mean = torch.zeros(9)
    with pytest.raises(UnusableError, match=r"buffer 1\.running_mean"):
        stepper.step()
    stepper.abandon()
    assert state_digest(stepper) == before
    assert train(stepper, x, classes).applied_steps == 1


class Growing(nn.Module):
    """Two buffers whose size only the first pass finds out; one that is left out."""

    def __init__(self) -> None:
        super().__init__()
        self.planted = Planted()
        self.register_buffer("none", None)
        self.register_buffer("seen", torch.zeros(0))

    def forward(self, seen: Tensor) -> Tensor:
        self.seen = seen
        return self.planted(1.0, 1.0)


def test_a_buffer_without_elements_stays_so_and_is_refused_with_some() -> None:
    """What has no place in the flat memory would not be restored after a skipped step."""
    stepper = Stepper(Growing(), SGD(0.1), scaling=Scaling("static", 1), reference_count=1)
    kept = stepper.model.seen
    stepper.backward(stepper.model(torch.zeros(0)), 1)
    stepper.step()
    assert stepper.model.seen is kept
    stepper.backward(stepper.model(torch.ones(3)), 1)
    with pytest.raises(
        UnusableError, match=r"buffer seen \(torch.float32, \(0,\)\) was replaced by .*\(3,\)"
    ):
        stepper.step()
    stepper.abandon()
    assert stepper.model.seen is kept


@pytest.mark.parametrize("part", [None, 1])
def test_a_skipped_step_keeps_the_statistics_that_were_loaded_before_it(part) -> None:
    """A whole model, or a part of it; early steps are skipped often, while the loss scale is found."""
    stepper = Stepper(conv_net(), SGD(0.1), Policy.fp16(), scaling=Scaling(init=1024))
    loaded = {key: value.clone() for key, value in stepper.model.state_dict().items()}
    loaded["1.running_mean"].fill_(7.0)
    if part is None:
        stepper.model.load_state_dict(loaded)
    else:
        names = [key for key in loaded if key.startswith("1.")]
        stepper.model[part].load_state_dict({key.removeprefix("1."): loaded[key] for key in names})
    x, classes = features(8, 0, (3, 8, 8))
    with stepper.forward():
        loss = loss_sum(stepper.model(x), classes)
    stepper.backward(loss * float("inf"), 8)
    assert stepper.step().read().skipped
    assert stepper.model[1].running_mean.eq(7.0).all()


def test_a_skipped_step_keeps_statistics_that_were_reset_before_average_buffers() -> None:
    stepper = Stepper(conv_net(), SGD(0.1), Policy.fp16(), scaling=Scaling(init=64))
    x, classes = features(8, 0, (3, 8, 8))
    train(stepper, x, classes)
    assert stepper.model[1].running_mean.abs().min() > 0
    stepper.model[1].reset_running_stats()
    stepper.average_buffers()
    with stepper.forward():
        loss = loss_sum(stepper.model(x), classes)
    stepper.backward(loss * float("inf"), 8)
    assert stepper.step().read().skipped
    assert stepper.model[1].running_mean.eq(0.0).all()


def test_a_copy_of_the_model_that_loads_a_state_changes_no_snapshot() -> None:
    stepper = Stepper(conv_net(), SGD(0.1), Policy.fp16(), scaling=Scaling(init=1024))
    other = pickle.loads(pickle.dumps(copy.deepcopy(stepper.model)))
    x, classes = features(8, 0, (3, 8, 8))
    before = stepper.model[1].running_mean.clone()
    with stepper.forward():
        loss = loss_sum(stepper.model(x), classes)
    other.load_state_dict(stepper.model.state_dict())
    stepper.backward(loss * float("inf"), 8)
    assert stepper.step().read().skipped
    assert torch.equal(stepper.model[1].running_mean, before)
