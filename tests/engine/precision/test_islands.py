"""torch.autocast and custom_fwd within a model: what they ask for is computed, emulated as natively."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.amp import custom_bwd, custom_fwd
from torch.utils.checkpoint import checkpoint

from launcher.engine import SGD, Policy, Scaling, Stepper

WAYS = pytest.mark.parametrize("emulate", [True, False], ids=["emulated", "native"])
POLICIES = pytest.mark.parametrize("name", ["fp16", "amp_fp16", "bf16", "amp_bf16"])
POSITIONS = torch.arange(2000.0)[:, None]
FREQUENCIES = 10000 ** -torch.linspace(0, 1, 8)[None, :]


def island(dtype: torch.dtype | None = None) -> torch.autocast:
    """Without autocast, or with autocast to `dtype`."""
    return torch.autocast("cpu", dtype, enabled=dtype is not None)


def angles() -> Tensor:
    """The angles of a rotary embedding, up to 1999."""
    return POSITIONS @ FREQUENCIES


class Product(torch.autograd.Function):
    """x @ w, which records the dtypes that it computes with."""

    seen: list[torch.dtype]

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        Product.seen.append((x @ w).dtype)
        return x @ w

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        x, w = ctx.saved_tensors
        Product.seen.append((gradient @ w.T).dtype)
        return gradient @ w.T, x.T @ gradient


class InFp32(Product):
    forward = staticmethod(custom_fwd(Product.forward, device_type="cpu", cast_inputs=torch.float32))
    backward = staticmethod(custom_bwd(Product.backward, device_type="cpu"))


class AsAround(Product):
    forward = staticmethod(custom_fwd(Product.forward, device_type="cpu"))
    backward = staticmethod(custom_bwd(Product.backward, device_type="cpu"))


class Model(nn.Module):
    """A linear layer, then what a test computes with its output."""

    def __init__(self, after: Callable[[Tensor], Tensor], repeated: bool | None = None) -> None:
        super().__init__()
        self.layer, self.after, self.repeated = nn.Linear(4, 4), after, repeated

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x)
        if self.repeated is None:
            return self.after(y)
        out: Tensor = checkpoint(self.after, y, use_reentrant=self.repeated)
        return out


def train(
    after: Callable[[Tensor], Tensor], name: str, emulate: bool, repeated: bool | None = None
) -> Tensor:
    """One step of a model; returns its output."""
    torch.manual_seed(0)
    policy = Policy.named(name)
    scaling = Scaling(init=1) if policy.scale_mode == "dynamic" else None
    stepper = Stepper(Model(after, repeated), SGD(0.1), policy, scaling=scaling, emulate=emulate)
    with stepper.forward():
        out: Tensor = stepper.model(torch.linspace(-1, 1, 12).view(3, 4))
    stepper.backward(out.float().square().sum(), 3)
    assert not stepper.step().read().skipped
    return out.detach()


@WAYS
@POLICIES
def test_the_angles_of_a_rotary_embedding_are_those_of_fp32(name: str, emulate: bool) -> None:
    policy = Policy.named(name)
    with policy.forward(torch.device("cpu"), emulate):
        assert (angles().float() - POSITIONS * FREQUENCIES).abs().max() > 0.3
        with island():
            assert torch.allclose(angles(), POSITIONS * FREQUENCIES, rtol=1e-6)
            with island(policy.arithmetic):
                assert angles().dtype == policy.arithmetic
                with island():
                    assert torch.allclose(angles(), POSITIONS * FREQUENCIES, rtol=1e-6)
                assert angles().dtype == policy.arithmetic
            assert angles().dtype == torch.float32
        assert angles().dtype == policy.arithmetic


@WAYS
@pytest.mark.parametrize(("name", "other"), [("fp16", torch.bfloat16), ("bf16", torch.float16)])
def test_an_island_may_have_another_dtype(name: str, other: torch.dtype, emulate: bool) -> None:
    policy = Policy.named(name)
    with policy.forward(torch.device("cpu"), emulate):
        ours = angles()
        with island(other):
            theirs = angles()
    assert (ours.dtype, theirs.dtype) == (policy.arithmetic, other)
    exact = POSITIONS.to(other).float() @ FREQUENCIES.to(other).float()
    assert torch.allclose(theirs.float(), exact, rtol=torch.finfo(other).eps)


CLASSES: dict[str, Callable[[Tensor], Tensor]] = {
    "product": lambda x: x @ x.T,
    "softmax": lambda x: x.softmax(-1),
    "mean": lambda x: x.mean(0),
    "rows": lambda x: x[torch.tensor([0, 0, 1])],
    "attention": lambda x: nn.functional.multi_head_attention_forward(
        *(x[:, None],) * 3, 4, 1, x.new_ones(12, 4), None, None, None, False, 0.0, x.new_ones(4, 4), None
    )[0],
}


@WAYS
@pytest.mark.parametrize("name", CLASSES)
@pytest.mark.parametrize("inside", [torch.float32, torch.float16], ids=str)
def test_each_class_of_operations_is_left_alone_in_an_island(
    name: str, inside: torch.dtype, emulate: bool
) -> None:
    x = torch.randn(5, 4, generator=torch.Generator().manual_seed(0)).to(inside)
    with Policy.fp16().forward(torch.device("cpu"), emulate), island():
        found = CLASSES[name](x)
    assert found.dtype == inside
    assert torch.equal(found, CLASSES[name](x))


@WAYS
@POLICIES
@pytest.mark.parametrize("repeated", [None, False, True], ids=["kept", "repeated", "re-entrant"])
def test_islands_stay_fp32_where_activations_are_recomputed(
    name: str, emulate: bool, repeated: bool | None
) -> None:
    seen = []

    def after(y: Tensor) -> Tensor:
        with island():
            inner = y.float() @ y.float().T
            with island(Policy.named(name).arithmetic):
                half = y @ y.T
        seen.append((inner.dtype, half.dtype))
        return (inner + half).tanh()  # which is saved: recomputing stops at the last such tensor

    out = train(after, name, emulate, repeated)
    assert out.dtype == torch.float32
    assert seen == [(torch.float32, Policy.named(name).arithmetic)] * (1 if repeated is None else 2)


@WAYS
@pytest.mark.parametrize("repeated", [None, False, True], ids=["kept", "repeated", "re-entrant"])
@pytest.mark.parametrize("function", [InFp32, AsAround])
def test_autograd_functions_compute_in_the_dtype_that_they_ask_for(
    function: type[Product], emulate: bool, repeated: bool | None
) -> None:
    Product.seen = []
    weights = torch.linspace(-1, 1, 16).view(4, 4)
    train(lambda y: function.apply(y, weights), "amp_bf16", emulate, repeated)
    expected = torch.float32 if function is InFp32 else torch.bfloat16
    assert Product.seen == [expected] * (2 if repeated is None else 3)


@WAYS
def test_a_function_without_custom_bwd_runs_backward_without_autocast(emulate: bool) -> None:
    Product.seen = []
    with pytest.raises(RuntimeError, match="dtype"):
        train(lambda y: Product.apply(y, torch.eye(4)), "amp_bf16", emulate)
    assert Product.seen == [torch.bfloat16]


@WAYS
def test_the_context_restores_autocast_and_keeps_no_copies_of_weights(emulate: bool) -> None:
    device, weight = torch.device("cpu"), nn.Parameter(torch.ones(2, 2))
    with island(torch.bfloat16):
        with Policy.amp_fp16().forward(device, emulate):
            assert torch.get_autocast_dtype("cpu") == torch.float16
            assert (weight @ weight).dtype == torch.float16
        assert torch.get_autocast_dtype("cpu") == torch.bfloat16
        assert torch.is_autocast_enabled("cpu")
    assert not torch._C._is_any_autocast_enabled()
    with torch.no_grad():
        weight.mul_(2)
    with Policy.amp_fp16().forward(device, emulate):
        assert (weight @ weight)[0, 0] == 8
