"""Native half arithmetic: `torch.autocast`, plus the operators missing from its lists.

Autocast's lists differ by device and have gaps. On CUDA they contain no decomposition of torch.linalg, so
these fail in half, and `matrix_exp` multiplies in half even for fp32 inputs. On CPUs exponentials and sums
are missing. RNNs compute in fp16 whatever dtype was requested. This module registers kernels for the missing
operators on the Autocast dispatch keys, by the tables of `classes`. Listed operators cost nothing more,
and torch.compile traces these kernels as it does torch's own.

Elements of a half table are copied in half, and the gradients of an element that was taken twice add up in
fp32. Widening the table instead would give the same gradients, and copy the whole table in every forward
pass.

The registration is per process, and done once. Outside the contexts of this module its kernels only
redispatch. Functions that torch composes in Python (svd_lowrank, pca_lowrank, lobpcg) have the classes of
their parts.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Self

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.autograd import forward_ad
from torch.library import Library

import launcher.engine.precision.classes as classes
from launcher.engine.precision.classes import HALF, MARK, any_fp32, is_tensor, map_tensors, widen

EMBEDDING, INDEX = torch.ops.aten.embedding.default, torch.ops.aten.index.Tensor
Kernel = Callable[..., object]

RNNS = ("lstm", "gru", "rnn_tanh", "rnn_relu")
# Operators that sum in fp32 by themselves on a GPU.
ONLY_CPU = ["embedding", "embedding_bag", "index", "index_reduce", "segment_reduce"]
ONLY_CPU += ["col2im", "im2col", "rrelu", "batch_norm"]
UPSAMPLE = [f"upsample_{kind}" for kind in ("linear1d", "bilinear2d", "bicubic2d", "trilinear3d")]
UPSAMPLE += [f"{exact}{n}d" for exact in ("upsample_nearest", "_upsample_nearest_exact") for n in (1, 2, 3)]
UPSAMPLE += [f"_upsample_{kind}2d_aa" for kind in ("bilinear", "bicubic", "lanczos")]


class HalfArithmetic(torch.autocast):
    """`torch.autocast` to `dtype` on `device_type`, plus the operators missing from its lists."""

    def __init__(self, device_type: str, dtype: torch.dtype) -> None:
        super().__init__(device_type, dtype=dtype)
        register(device_type)
        self._outer: list[bool] = []

    def __enter__(self) -> Self:
        self._outer.append(torch.is_autocast_enabled(MARK))
        torch.set_autocast_enabled(MARK, True)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *exception: object) -> None:
        super().__exit__(*exception)
        torch.set_autocast_enabled(MARK, self._outer.pop())


@contextmanager
def repeating_forward() -> Iterator[None]:
    """Context of a backward pass: forward passes that checkpointing recomputes enter autocast themselves."""
    outer = torch.is_autocast_enabled(MARK)
    torch.set_autocast_enabled(MARK, True)
    try:
        yield
    finally:
        torch.set_autocast_enabled(MARK, outer)


_REGISTERED: dict[str, Library] = {}  # by type of device: a registration lasts as long as its Library
KEYS = {"cpu": "AutocastCPU", "cuda": "AutocastCUDA"}


def register(device_type: str) -> None:
    """Add the missing operators to autocast's on one type of device; once per process."""
    # Not a cached function: torch.compile would trace what it wraps, and warn.
    if device_type in _REGISTERED or device_type not in KEYS:
        return
    key = KEYS[device_type]
    library = _REGISTERED[device_type] = Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    for operator, compute in _missing(device_type, key):
        kernel = functools.partial(_compute, operator, compute, device_type, getattr(torch.DispatchKey, key))
        library.impl(operator, kernel, key, with_keyset=True)  # type: ignore[no-untyped-call]


def _missing(device_type: str, key: str) -> Iterator[tuple[OpOverload, Kernel]]:
    """Operators without a kernel on `key`, and what computes them."""
    curves = [f"special_{name}" for name in classes.CURVES.split()]
    table = {
        **dict.fromkeys(_names(classes.PRODUCTS), _in_half),
        **dict.fromkeys(RNNS, _rnn),
        **dict.fromkeys(_names(classes.PROMOTING), _promoted),
        **dict.fromkeys([*_names(classes.WIDE), *UPSAMPLE], _in_fp32),
        **dict.fromkeys([*curves, "rrelu", "col2im", "im2col"], _curve),
        **dict.fromkeys(SUMS, _pick),
        "batch_norm": _batch_norm,
    }
    if device_type == "cuda":
        table = {name: compute for name, compute in table.items() if name not in ONLY_CPU}
    for name, compute in table.items():
        for operator in _overloads(name):
            if not torch._C._dispatch_has_kernel_for_dispatch_key(str(operator._name), key):
                yield operator, compute


def _names(functions: Iterable[Callable[..., object]]) -> set[str]:
    """The operator names of these functions, which are the functions' own."""
    return {function.__name__ for function in functions}


def _overloads(name: str) -> Iterator[OpOverload]:
    """The overloads of an aten operator that return new tensors and take no dtype from the caller."""
    packet = getattr(torch.ops.aten, name, None)
    for overload in packet.overloads() if packet is not None else ():
        operator = getattr(packet, overload)
        if operator._schema.is_mutable or overload.endswith("dtype") or "dimname" in overload:
            continue
        if torch._C._dispatch_has_kernel(str(operator._name)):
            yield operator


def _compute(
    operator: OpOverload,
    compute: Kernel,
    device_type: str,
    key: torch.DispatchKey,
    keyset: torch.DispatchKeySet,
    *args: object,
    **kwargs: object,
) -> object:
    if not torch.is_autocast_enabled(MARK):  # someone else's torch.autocast
        # Not only without `key`: the snapshot that torch.compile puts before all keys would come back here.
        return operator.redispatch(keyset & torch._C._dispatch_keyset_full_after(key), *args, **kwargs)
    dtype = torch.get_autocast_dtype(device_type)
    torch.set_autocast_enabled(device_type, False)
    try:
        return compute(operator, dtype, args, kwargs)
    finally:
        torch.set_autocast_enabled(device_type, True)


def _in_fp32(operator: OpOverload, dtype: torch.dtype, args: object, kwargs: object) -> Any:
    return operator(*map_tensors(widen, args), **map_tensors(widen, kwargs))


def _curve(operator: OpOverload, dtype: torch.dtype, args: Any, kwargs: object) -> object:
    half = any(is_tensor(each) and each.dtype == dtype for each in args)
    result = _in_fp32(operator, dtype, args, kwargs)
    return result.to(dtype) if half else result


def _batch_norm(operator: OpOverload, dtype: torch.dtype, args: Any, kwargs: Any) -> object:
    """Widen a batch norm without weights: kernels for CPUs would keep its mean and variance in half."""
    return operator(*args, **kwargs) if is_tensor(args[1]) else _curve(operator, dtype, args, kwargs)


def _in_half(operator: OpOverload, dtype: torch.dtype, args: object, kwargs: object) -> object:
    return operator(*_narrow(dtype, args), **_narrow(dtype, kwargs))


def _rnn(operator: OpOverload, dtype: torch.dtype, args: Any, kwargs: Any) -> object:
    """All tensors in one dtype, which cuDNN requires of weights.

    bf16 is rounded and then computed in fp32: autocast would cast it to fp16 for cuDNN.
    """
    args = _narrow(dtype, args)
    if dtype != torch.bfloat16:
        return operator(*args, **kwargs)
    return _narrow(dtype, _in_fp32(operator, dtype, args, kwargs))


def _promoted(operator: OpOverload, dtype: torch.dtype, args: object, kwargs: object) -> object:
    """fp32 inside, for sums in the backward pass too; half results where no input is fp32."""
    result = _in_fp32(operator, dtype, args, kwargs)
    return result if any_fp32((args, kwargs)) else _narrow(dtype, result)


def _narrow(dtype: torch.dtype, value: Any) -> Any:
    """Floating-point tensors of an argument tree in half; those in fp64 stay."""

    def narrowed(tensor: Tensor) -> Tensor:
        eligible = tensor.is_floating_point() and tensor.dtype != torch.float64
        return tensor.to(dtype) if eligible else tensor

    return map_tensors(narrowed, value)


# The gradient of a table of this shape, from that of what was picked, and the index.
SUMS: dict[str, Callable[..., Tensor]] = {
    "embedding": lambda shape, picked, tokens, padding=-1, by_frequency=False, *_: (
        torch.ops.aten.embedding_dense_backward(picked, tokens, shape[0], padding, by_frequency)
    ),
    "gather": lambda shape, picked, dim, index, sparse=False: picked.new_zeros(shape).scatter_add_(
        dim, index, picked
    ),
    "index": lambda shape, picked, *index: torch.ops.aten.index_put_(
        picked.new_zeros(shape), index, picked, True
    ),
    "index_select": lambda shape, picked, dim, index: picked.new_zeros(shape).index_add_(dim, index, picked),
    "take": lambda shape, picked, index: picked.new_zeros(shape).put_(index, picked, accumulate=True),
}


def _pick(operator: OpOverload, dtype: torch.dtype, args: Any, kwargs: Any) -> object:
    """Pick elements of a table, with gradients that are summed in fp32 where an element may repeat.

    A plain call without gradients, for tables that are not half, for masks, and for sparse gradients.
    """
    table, *args = args
    if table.dtype not in HALF:
        return operator(table, *args, **kwargs)
    # No autograd function works where torch.func transforms this code, or forward_ad differentiates it.
    transformed = torch._C._are_functorch_transforms_active()
    if transformed or forward_ad.unpack_dual(table).tangent is not None:  # type: ignore[no-untyped-call]
        return operator(table.float(), *args, **kwargs).to(table.dtype)
    index = args[0] if operator is INDEX else args
    repeats = any(is_tensor(each) and each.dtype not in (torch.bool, torch.uint8) for each in index)
    sparse = kwargs.get("sparse_grad") or (operator is EMBEDDING and args[3:4] == [True])
    if table.requires_grad and torch.is_grad_enabled() and repeats and not sparse:
        return _Pick.apply(operator, table, *index)  # type: ignore[no-untyped-call]
    return operator(table, *args, **kwargs)


class _Pick(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, operator: OpOverload, table: Tensor, *index: object) -> object:
        ctx.operator, ctx.shape, ctx.dtype = operator, table.shape, table.dtype
        ctx.rest = [None if is_tensor(each) else each for each in index]
        ctx.save_for_backward(*(each if is_tensor(each) else None for each in index))
        return operator(table, index) if operator is INDEX else operator(table, *index)

    @staticmethod
    def backward(ctx: Any, picked: Tensor) -> tuple[Tensor | None, ...]:
        index = [
            rest if saved is None else saved for saved, rest in zip(ctx.saved_tensors, ctx.rest, strict=True)
        ]
        name = ctx.operator._schema.name.removeprefix("aten::")
        summed = SUMS[name](ctx.shape, picked.float(), *index).to(ctx.dtype)
        return None, summed, *(None for _ in index)
