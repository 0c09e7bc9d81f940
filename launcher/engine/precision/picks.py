"""Elements of a half table, copied in half; the gradients of an element that was taken twice add up in fp32.

Owns the backward passes of those operators. Widening the table instead would give the same gradients, and
copy the whole table in fp32 in every forward pass.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.autograd import forward_ad

from launcher.engine.precision.classes import HALF, is_tensor

EMBEDDING, INDEX = torch.ops.aten.embedding.default, torch.ops.aten.index.Tensor


def _embedding(
    shape: torch.Size, rows: Tensor, tokens: Tensor, padding: int = -1, by_frequency: bool = False, *_: object
) -> Tensor:
    summed: Tensor = torch.ops.aten.embedding_dense_backward(rows, tokens, shape[0], padding, by_frequency)
    return summed


# The gradient of a table of this shape, from that of what was picked, and the index.
SUMS: dict[str, Callable[..., Tensor]] = {
    "embedding": _embedding,
    "gather": lambda shape, picked, dim, index, sparse=False: picked.new_zeros(shape).scatter_add_(
        dim, index, picked
    ),
    "index": lambda shape, picked, *index: torch.ops.aten.index_put_(
        picked.new_zeros(shape), index, picked, True
    ),
    "index_select": lambda shape, picked, dim, index: picked.new_zeros(shape).index_add_(dim, index, picked),
    "take": lambda shape, picked, index: picked.new_zeros(shape).put_(index, picked, accumulate=True),
}


def pick(operator: OpOverload, table: Tensor, *args: Any, **kwargs: Any) -> Any:
    """`operator(table, *args, **kwargs)`, with gradients that are summed in fp32 where an element may repeat.

    A plain call without gradients, for tables that are not half, for masks, and for sparse gradients.
    """
    index = args[0] if operator is INDEX else args
    repeats = any(is_tensor(each) and each.dtype not in (torch.bool, torch.uint8) for each in index)
    sparse = kwargs.get("sparse_grad") or (operator is EMBEDDING and args[3:4] == (True,))
    added = table.dtype in HALF and table.requires_grad and torch.is_grad_enabled() and repeats and not sparse
    if table.dtype in HALF and _is_transformed(table):  # no autograd function works there
        return operator(table.float(), *args, **kwargs).to(table.dtype)
    if added:
        return _Pick.apply(operator, table, *index)  # type: ignore[no-untyped-call]
    return operator(table, *args, **kwargs)


def _is_transformed(table: Tensor) -> bool:
    """Whether torch.func transforms this code, or forward_ad differentiates it along `table`'s tangent."""
    if torch._C._are_functorch_transforms_active():
        return True
    return forward_ad.unpack_dual(table).tangent is not None  # type: ignore[no-untyped-call]


class _Pick(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, operator: OpOverload, table: Tensor, *index: Any) -> Any:
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
