"""Gradients between autograd and the wire: copied a bucket at a time, freed then, and of the same bits."""

from __future__ import annotations

import weakref

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from launcher.engine import SGD, DDPOptions, Policy, Stepper
from launcher.engine.grads import reducer
from launcher.engine.grads.copy_in import CopyIn
from launcher.engine.params.flat_params import Layout

HALVES = [torch.float16, torch.bfloat16]


def inbox_of(policy: Policy, factor: float = 1.0, sums: bool = False) -> tuple[CopyIn, Layout]:
    layout = Layout(nn.Sequential(nn.Linear(3, 5), nn.Conv2d(2, 4, 1)), policy)
    flat_buffer = layout.flat_buffers[0]
    totals = torch.zeros(flat_buffer.numel) if sums else None
    return CopyIn(flat_buffer, flat_buffer.bucket_ranges[0], layout.parameters, factor, totals), layout


class Copies(TorchDispatchMode):
    """Counts copies, and multiplications after them."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []
        self.strides: set[tuple[int, ...]] = set()  # of what lists of tensors hold

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(word in str(func) for word in ("copy", "mul", "add", "zero")):
            self.calls.append(str(func))
            self.strides |= {t.stride() for tensors in args if isinstance(tensors, list) for t in tensors}
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("policy", [Policy.fp16(), Policy.amp_fp16(), Policy.fp32()], ids=lambda p: p.name)
def test_a_bucket_is_one_copy(policy) -> None:
    inbox, layout = inbox_of(policy)
    flat_buffer = layout.flat_buffers[0]
    gradients = {param.name: torch.randn(param.shape).to(flat_buffer.weight) for param in flat_buffer.params}
    with Copies() as copies:
        for param in flat_buffer.params:
            layout.parameters[param.name].grad = gradients[param.name]
        inbox.drain()
        inbox.complete()
    assert copies.calls == ["aten._foreach_copy_.default"]
    for param in flat_buffer.params:
        assert torch.equal(param.view(flat_buffer.grad), gradients[param.name].to(flat_buffer.grad.dtype))


@pytest.mark.parametrize("given", [torch.float32, *HALVES])
@pytest.mark.parametrize("ddp", [torch.float32, *HALVES])
def test_a_predivided_gradient_is_rounded_once(given, ddp) -> None:
    """Also where it is a subnormal on the wire, or would be one before it is widened."""
    layout = Layout(nn.Linear(64, 3, bias=False), Policy.fp32(), ddp)
    (flat_buffer,) = layout.flat_buffers
    (param,) = flat_buffer.params
    gradient = (torch.randn(param.shape) * torch.logspace(-8, 4, 64)).to(given)
    parameter = nn.Parameter(torch.empty_like(gradient))
    inbox = CopyIn(flat_buffer, flat_buffer.bucket_ranges[0], {param.name: parameter}, 0.25, None)
    parameter.grad = gradient
    inbox.drain()
    inbox.complete()
    assert torch.equal(param.view(flat_buffer.grad), (gradient.double() * 0.25).to(ddp))


@pytest.mark.parametrize("sums", [False, True], ids=["ddp", "sums"])
def test_what_does_not_arrive_is_zero_although_the_step_before_left_something(sums) -> None:
    inbox, layout = inbox_of(Policy.fp16(), sums=sums)
    flat_buffer = layout.flat_buffers[0]
    one, other = flat_buffer.params
    for param in (one, other):
        layout.parameters[param.name].grad = torch.full(param.shape, 3.0, dtype=torch.float16)
    inbox.drain()
    inbox.complete()
    layout.parameters[one.name].grad = torch.ones(one.shape, dtype=torch.float16)
    inbox.drain()
    inbox.complete()
    assert torch.equal(one.flat(flat_buffer.grad), torch.ones(one.numel, dtype=torch.float16))
    assert not other.flat(flat_buffer.grad).any()


def test_a_second_gradient_of_a_pass_is_added_to_the_first() -> None:
    inbox, layout = inbox_of(Policy.fp16(), factor=0.5)
    param = layout.flat_buffers[0].params[0]
    for value in (3.0, 5.0):
        layout.parameters[param.name].grad = torch.full(param.shape, value, dtype=torch.float16)
        inbox.drain()
        assert layout.parameters[param.name].grad is None
    inbox.complete()
    assert torch.equal(param.flat(layout.flat_buffers[0].grad), torch.full((param.numel,), 4.0).half())


def test_a_stride_of_a_dimension_of_one_element_costs_no_copy_of_its_own() -> None:
    """A 1x1 convolution in channels_last; on a GPU one call takes tensors of equal strides alone."""
    layout = Layout(nn.Conv2d(4, 4, 1, bias=False).to(memory_format=torch.channels_last), Policy.fp32())
    (flat_buffer,) = layout.flat_buffers
    (param,) = flat_buffer.params
    gradient = torch.randn(4, 4, 1, 1)
    assert gradient.stride() != param.stride
    inbox = CopyIn(flat_buffer, flat_buffer.bucket_ranges[0], layout.parameters, 1.0, None)
    layout.parameters[param.name].grad = gradient
    with Copies() as copies:
        inbox.drain()
    inbox.complete()
    assert copies.strides == {param.stride}
    assert torch.equal(param.view(flat_buffer.grad), gradient)


class RunView(nn.Sequential):
    """Notes how many other gradients are alive as each one arrives. To be watched before its Stepper."""

    def watch(self) -> list[int]:
        alive: list[int] = []
        self.gradients: list[weakref.ref[Tensor]] = []

        def note(parameter: nn.Parameter) -> None:
            alive.append(sum(gradient() is not None for gradient in self.gradients))
            self.gradients.append(weakref.ref(parameter.grad))

        for layer in self:
            layer.weight.register_post_accumulate_grad_hook(note)
        return alive


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_gradients_are_freed_with_their_bucket(micro_batches, monkeypatch) -> None:
    monkeypatch.setattr(reducer, "NO_HOOKS_BELOW_BYTES", 8 * 64 * 64 * 4 - 1)
    model = RunView(*(nn.Linear(64, 64, bias=False) for _ in range(8)))
    alive = model.watch()
    stepper = Stepper(
        model,
        SGD(0.1),
        Policy.fp32(),
        ddp=DDPOptions(bucket_bytes=2 * 64 * 64 * 4),
        micro_batches=micro_batches,
        reference_count=4,
    )
    assert [len(bucket.params) for bucket in stepper.reducer.buckets] == [2, 2, 2, 2]
    for _ in range(micro_batches):
        stepper.backward(model(torch.randn(4, 64)).square().sum(), 4)
        assert all(gradient() is None for gradient in model.gradients)
    assert max(alive) == 1


def test_nothing_is_held_after_a_pass_that_failed() -> None:
    model = RunView(*(nn.Linear(8, 8, bias=False) for _ in range(4)))
    model.watch()

    def fail(gradient: Tensor) -> None:
        raise RuntimeError("no")

    stepper = Stepper(model, SGD(0.1), Policy.fp32(), reference_count=4)
    hidden = model[0](torch.randn(4, 8))
    hidden.register_hook(fail)
    with pytest.raises(RuntimeError, match="no"):
        stepper.backward(model[3](model[2](model[1](hidden))).sum(), 4)
    assert len(model.gradients) == 3
    assert all(gradient() is None for gradient in model.gradients)
    assert stepper.step().read().abandoned_ranks == (0,)
