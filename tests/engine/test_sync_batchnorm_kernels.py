"""The kernels that synchronised batch norms call on a GPU: their arguments, and the bytes that they move.

Torch has them for CUDA only. Here they are written out for the CPU after their use in torch's own module
(nn.modules._functions.SyncBatchNorm), and counted on `meta`. On a GPU: tests/gpu/test_sync_batchnorm.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from launcher.engine import sync_batchnorm
from launcher.engine.sync_batchnorm import synchronised
from tests.meta_device import META, MetaDevice, fake_group


def by_channel(values: Tensor, x: Tensor) -> Tensor:
    return values.view(1, -1, *[1] * (x.ndim - 2))


def elemt(x: Tensor, weight: Any, bias: Any, mean: Tensor, inverse: Tensor, eps: float) -> Tensor:
    assert mean.dtype == inverse.dtype == torch.float32
    found = (x.float() - by_channel(mean, x)) * by_channel(inverse, x)
    if weight is not None:
        found = found * by_channel(weight, x) + by_channel(bias, x)
    return found.to(x.dtype)


def reduce(
    gradient: Tensor, x: Tensor, mean: Tensor, inverse: Tensor, weight: Any, *wanted: bool
) -> tuple[Tensor, ...]:
    assert gradient.stride() == x.stride()
    assert wanted == (True, False, False)
    others = [dimension for dimension in range(x.ndim) if dimension != 1]
    wide = gradient.float()
    products = (wide * (x.float() - by_channel(mean, x))).sum(others)
    return wide.sum(others), products, torch.empty(0), torch.empty(0)


def backward_elemt(
    gradient: Tensor,
    x: Tensor,
    mean: Tensor,
    inverse: Tensor,
    weight: Any,
    sums: Tensor,
    products: Tensor,
    count: Tensor,
) -> Tensor:
    assert count.dtype == torch.int32
    centred = x.float() - by_channel(mean, x)
    factor = inverse.square() * products / count.sum()
    found = gradient.float() - by_channel(sums / count.sum(), x) - centred * by_channel(factor, x)
    found = found * by_channel(inverse if weight is None else inverse * weight, x)
    return found.to(x.dtype)


KERNELS = {
    "batch_norm_elemt": elemt,
    "batch_norm_backward_reduce": reduce,
    "batch_norm_backward_elemt": backward_elemt,
}


def statistics(x: Tensor, mean: Tensor, variance: Tensor, momentum: float) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape[1], dtype=torch.float32), x.new_empty(x.shape[1], dtype=torch.float32)


@contextmanager
def kernels_on(device: str) -> Iterator[None]:
    """They exist for this type of device, and synchronised batch norms use them."""
    before = sync_batchnorm.WITH_KERNELS
    with torch.library._scoped_library("aten", "IMPL") as library:
        for name, kernel in KERNELS.items():
            library.impl(name, kernel, {"cpu": "CPU", "meta": "Meta"}[device])
        if device == "meta":
            library.impl("batch_norm_update_stats", statistics, "Meta")
        sync_batchnorm.WITH_KERNELS = (device,)
        try:
            yield
        finally:
            sync_batchnorm.WITH_KERNELS = before


@pytest.fixture
def alone(tmp_path) -> Iterator[dist.ProcessGroup]:
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield dist.group.WORLD  # type: ignore[misc]
    dist.destroy_process_group()


SHAPES = [(6, 5), (6, 5, 4), (4, 5, 3, 2), (3, 5, 2, 2, 2)]


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_both_forms_give_the_values_of_batch_norm(alone, shape, channels_last, dtype, affine) -> None:
    generator = torch.Generator().manual_seed(0)
    last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(len(shape), torch.contiguous_format)
    x, weight = ((3 + torch.randn(shape, generator=generator)).to(dtype) for _ in range(2))
    if channels_last:
        x = x.contiguous(memory_format=last)
    exact = passes(norm(len(shape), affine).double(), x.double(), weight.double())
    found = passes(synchronised(norm(len(shape), affine), alone), x, weight)
    with kernels_on("cpu"):
        by_kernels = passes(synchronised(norm(len(shape), affine), alone), x, weight)
    tolerance = 2e-5 if dtype == torch.float32 else 4e-3
    for name, expected in exact.items():
        for each in (found, by_kernels):
            assert each[name].dtype == (dtype if name in ("output", "input") else each[name].dtype)
            torch.testing.assert_close(
                each[name].double(),
                expected.double(),
                rtol=tolerance,
                atol=tolerance,
                msg=lambda m, n=name: f"{n}: {m}",
            )
        if name == "output":
            assert each[name].stride() == x.stride()


def norm(dimensions: int, affine: bool) -> nn.Module:
    kinds = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}
    module = kinds[dimensions](5, affine=affine)
    if affine:
        with torch.no_grad():
            module.weight.copy_(torch.linspace(0.5, 2, 5))
            module.bias.copy_(torch.linspace(-1, 1, 5))
    return module


def passes(module: nn.Module, x: Tensor, weight: Tensor) -> dict[str, Tensor]:
    leaf = x.clone().requires_grad_()
    output = module(leaf)
    output.backward(weight)
    assert leaf.grad is not None
    found = {"output": output.detach(), "input": leaf.grad}
    found |= {f"grad {name}": p.grad for name, p in module.named_parameters()}
    return found | dict(module.named_buffers())


# Passes over tensors of the input's size where that is not one over each argument and result.
PASSES = {
    "native_batch_norm": 3,  # statistics, then reads again and writes
    "_native_batch_norm_legit": 3,
    "native_batch_norm_backward": 5,  # two sums over two tensors, then reads both again and writes
}


class Bytes(TorchDispatchMode):
    """Of reads and writes of tensors of `numel` elements, by pass."""

    def __init__(self, numel: int) -> None:
        super().__init__()
        self.numel, self.moved = numel, Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        large = [
            each
            for each in tree_leaves((args, result))
            if isinstance(each, Tensor) and each.numel() == self.numel
        ]
        if large and name not in ("detach", "alias", "empty_like", "new_zeros", "view"):
            own = sum(each.itemsize for each in large)
            self.moved[name] += PASSES[name] * large[0].itemsize if name in PASSES else own
        return result


def moved(module: nn.Module, x: Tensor) -> tuple[int, int]:
    """Bytes per element, forward and backward."""
    leaf = x.requires_grad_()
    with Bytes(x.numel()) as forward:
        output = module(leaf)
    gradient = torch.empty_like(output)
    with Bytes(x.numel()) as backward:
        output.backward(gradient)
    return forward.moved.total(), backward.moved.total()


def test_they_move_at_most_1_3_times_the_bytes_of_batch_norm() -> None:
    x = torch.empty(4, 8, 6, 6, dtype=torch.float16, device=META)
    alone = moved(nn.BatchNorm2d(8).to(META), x.clone())
    with fake_group(2) as group, kernels_on("meta"), MetaDevice():
        together = moved(synchronised(nn.BatchNorm2d(8).to(META), group), x.clone())
    assert alone == (6, 10)
    assert together <= tuple(1.3 * each for each in alone), (together, alone)
    assert together == (6, 10)
