"""Emulated sums of many halves are made in fp32: 4096 ones give 4096, not 2048 as in fp16, 256 as in bf16."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad

from launcher.engine import Policy
from tests.engine.precision.test_emulated_functions import GATHERS

MANY = 4096
ZEROS, INDEX = torch.zeros(2, dtype=torch.int64), torch.zeros(MANY, dtype=torch.int64)
DTYPES = pytest.mark.parametrize("name", ["fp16", "bf16"])

# Of 4096 ones, shape [4096]: a result whose elements are all 4096.
FORWARD: dict[str, Callable[[Tensor], Tensor]] = {
    "sum": lambda x: x.sum(),
    "cumsum": lambda x: x.cumsum(0)[-1],
    "index_add": lambda x: x.new_zeros(1).index_add(0, INDEX, x),
    "scatter_add": lambda x: x.new_zeros(1).scatter_add(0, INDEX, x),
    "index_put": lambda x: x.new_zeros(1).index_put((INDEX,), x, accumulate=True),
    "scatter_reduce": lambda x: x.new_zeros(1).scatter_reduce(0, INDEX, x, "sum"),
    "index_reduce": lambda x: x.new_zeros(1).index_reduce(0, INDEX, x, "mean") * (MANY + 1),
    "segment_reduce": lambda x: torch.segment_reduce(x, "sum", lengths=torch.tensor([MANY])),
    "embedding_bag": lambda x: F.embedding_bag(torch.arange(MANY), x[:, None], ZEROS[:1], mode="sum"),
    "fold": lambda x: F.fold(x[:512].expand(1, 512, 512) * 8, (1, 1), (1, 512), padding=(0, 511)),
    "linear": lambda x: F.linear(x[None], x[None]),
    "inner": lambda x: torch.inner(x, x),
    "dot": lambda x: torch.dot(x, x),
    "conv_transpose1d": lambda x: F.conv_transpose1d(x.view(1, MANY, 1), x.view(MANY, 1, 1)),
}
# Of one parameter of value 1, shape [1, 1]: 4096 ones, each with a gradient of one.
BACKWARD: dict[str, Callable[[Tensor], Tensor]] = {
    **{
        f"pick {name}": lambda p, pick=pick: pick(p.expand(1, 2), INDEX)[:, 0]
        for name, pick in GATHERS.items()
    },
    "take": lambda p: p.take(INDEX),
    "take_along_dim": lambda p: torch.take_along_dim(p, INDEX[:, None], 0),
    "embedding": lambda p: F.embedding(INDEX, p),
    "repeat_interleave": lambda p: p.repeat_interleave(MANY, 0),
    "expand": lambda p: p.expand(MANY, 1) * 1.0,
    "broadcast": lambda p: p + p.new_zeros(MANY, 1),
    "repeat": lambda p: p.repeat(MANY, 1),
    "replicate": lambda p: F.pad(p[None], (0, MANY - 1), mode="replicate"),
    "nearest": lambda p: F.interpolate(p[None], size=MANY),
    "bilinear": lambda p: F.interpolate(p[None, None], size=(64, 64), mode="bilinear"),
    "antialias": lambda p: F.interpolate(p[None, None], size=(64, 64), mode="bilinear", antialias=True),
    "grid_sample": lambda p: F.grid_sample(p[None, None], p.new_zeros(1, 64, 64, 2), align_corners=True),
    "linear": lambda p: F.linear(p.new_ones(MANY, 1), p),
    "bias": lambda p: F.linear(p.new_zeros(MANY, 1), p.detach(), p[0]),
    "unfold": lambda p: F.unfold(p[None, None], 1, padding=0).expand(1, MANY, 1) * 1.0,
}


@pytest.mark.filterwarnings("ignore:index_reduce")
@DTYPES
@pytest.mark.parametrize("function", FORWARD)
def test_a_result_is_the_sum(function: str, name: str) -> None:
    policy = Policy.named(name)
    with policy.forward(torch.device("cpu"), emulate=True):
        found = FORWARD[function](torch.ones(MANY, dtype=policy.weights))
    assert (found == MANY).all()


@DTYPES
@pytest.mark.parametrize("function", BACKWARD)
def test_a_gradient_is_the_sum(function: str, name: str) -> None:
    policy = Policy.named(name)
    p = torch.ones(1, 1, dtype=policy.weights, requires_grad=True)
    with policy.forward(torch.device("cpu"), emulate=True):
        found = BACKWARD[function](p)
        assert found.numel() == MANY
    found.sum(dtype=torch.float32).backward()
    assert p.grad is not None
    assert p.grad.item() == MANY


@pytest.mark.filterwarnings("ignore:.torch.jit.script")  # torch's own, in forward mode
@pytest.mark.parametrize("pick", GATHERS)
def test_picks_have_second_derivatives_and_transforms(pick: str) -> None:
    table = torch.tensor([[1.0, 2.0], [3.0, 4.0]], dtype=torch.float16)

    def loss(table: Tensor) -> Tensor:
        with Policy.fp16().forward(torch.device("cpu"), emulate=True):
            return (GATHERS[pick](table, torch.tensor([1, 1])).float() ** 3).sum()

    leaf = table.clone().requires_grad_()
    first = torch.autograd.grad(loss(leaf), leaf, create_graph=True)[0]
    first.sum().backward()
    assert leaf.grad is not None
    assert leaf.grad.tolist() == [[0, 0], [36, 48]]  # 2 x 6 x
    assert torch.equal(torch.func.grad(loss)(table), first)
    assert torch.equal(torch.func.vmap(torch.func.grad(loss))(table[None])[0], first)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(leaf, torch.ones_like(table))
        assert forward_ad.unpack_dual(loss(dual)).tangent == first.sum()
