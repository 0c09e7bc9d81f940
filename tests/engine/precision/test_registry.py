"""Every kernel that is registered for half arithmetic, called natively, with each kind of its arguments.

What the kernels have in common is tested here over the registry itself, so that none is left out; an operator
without a row of arguments fails. By function, they are tested in test_autocast.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._ops import OpOverload

from launcher.engine.precision import autocast
from launcher.engine.precision.autocast import HalfArithmetic
from tests.engine.precision.test_emulated_functions import (
    ARGUMENTS,
    HALF,
    OTHER,
    SQUARE,
    VECTOR,
    Arguments,
    matrix,
)

UNIT = VECTOR / 2  # within the domains of all curves
IMAGE, IMAGE1, IMAGE3 = matrix(1, 2, 4, 4), matrix(1, 2, 4), matrix(1, 2, 2, 2, 2)
ROWS, MASK = torch.tensor([0, 2, 2]), torch.tensor([True, False, True])
CELL = (matrix(2, 3), matrix(2, 4), matrix(4, 3), matrix(4, 4), matrix(4), matrix(4))
GATES = {"rnn_tanh": 1, "rnn_relu": 1, "gru": 3, "lstm": 4}


def weights(gates: int) -> list[Tensor]:
    return [matrix(4 * gates, 3), matrix(4 * gates, 4), matrix(4 * gates), matrix(4 * gates)]


def rnn(kind: str) -> dict[str, list[Arguments]]:
    hidden: Any = [matrix(1, 2, 4)] * 2 if kind == "lstm" else matrix(1, 2, 4)
    rest = (weights(GATES[kind]), True, 1, 0.0, True, False)
    packed = (matrix(5, 3), torch.tensor([2, 2, 1]))
    cell = (matrix(2, 3), [matrix(2, 4)] * 2 if kind == "lstm" else matrix(2, 4), *weights(GATES[kind]))
    return {
        f"{kind}.input": [(matrix(3, 2, 3), hidden, *rest, False)],
        f"{kind}.data": [(*packed, hidden, *rest)],
        f"{kind}_cell": [cell],
    }


def resized(kind: str, image: Tensor) -> dict[str, list[Arguments]]:
    sizes, corners = [8] * (image.ndim - 2), () if "nearest" in kind else (False,)
    default, vec = (image, sizes, *corners), (image, None, *corners, [2.0] * len(sizes))
    return {kind: [default], f"{kind}.vec": [vec, (image, sizes, *corners, None)]}


def same(names: str, *rows: Arguments) -> dict[str, list[Arguments]]:
    return {name: [*rows] for name in names.split()}


# By operator, or by operator and overload; linalg, special and fft have the rows of test_emulated_functions.
CASES: dict[str, list[Arguments]] = {
    **same("exp expm1 exp2 log log2 log10 log1p reciprocal rsqrt sinh cosh tan acos asin erfinv", (UNIT,)),
    **same("softplus trapezoid.dx trapz.dx cumulative_trapezoid.dx nansum sum", (UNIT,)),
    **same("matrix_exp det logdet slogdet nuclear_norm linalg_lu linalg_lu_factor", (SQUARE,)),
    **same("logaddexp logaddexp2 xlogy pow atan2 dot vdot dist trapezoid.x trapz.x", (UNIT, UNIT + 1)),
    **same("cumulative_trapezoid.x complex", (UNIT, UNIT + 1)),
    **same("cumsum cumprod logcumsumexp special_softmax special_log_softmax", (SQUARE, 0)),
    **same("inner", (SQUARE, OTHER)),
    **same("softmax.int log_softmax.int", (SQUARE, 0), (SQUARE, 0, torch.float64)),
    **same("frobenius_norm.dim logsumexp sum.dim_IntList special_logsumexp", (SQUARE, [0])),
    **same("addcmul addcdiv", (UNIT, UNIT + 1, UNIT + 1)),
    **same("norm.Scalar pdist", (SQUARE, 2)),
    **same("mv", (OTHER, VECTOR[:3])),
    **same("cross linalg_cross cosine_similarity", (SQUARE, OTHER)),
    **same("linalg_matmul", (SQUARE, OTHER), (SQUARE, VECTOR[:3])),
    **same("chain_matmul linalg_multi_dot", ([SQUARE, OTHER, SQUARE],)),
    **same("index_add", (SQUARE, 0, ROWS, OTHER)),
    **same("index_reduce", (SQUARE, 0, ROWS, OTHER, "mean"), (SQUARE, 0, ROWS, OTHER, "prod")),
    **same("scatter_add", (SQUARE, 0, ROWS.expand(3, 3), OTHER)),
    **same("scatter_reduce", (SQUARE, 0, ROWS.expand(3, 3), OTHER, "sum")),
    **same("special_zeta", (UNIT + 1, UNIT + 1)),
    **same("linalg_matrix_norm", (SQUARE, 2)),
    **same("linalg_matrix_norm.str_ord linalg_norm.ord_str", (SQUARE, "fro")),
    **same("matrix_power", (SQUARE, 2)),
    **same("linalg_pinv.atol_rtol_float", (SQUARE,)),
    **same("linalg_pinv", (SQUARE, 1e-3)),
    **same("linalg_solve_ex linalg_solve_triangular", (SQUARE, OTHER)),
    **rnn("rnn_tanh"),
    **rnn("rnn_relu"),
    **rnn("gru"),
    **rnn("lstm"),
    **resized("upsample_linear1d", IMAGE1),
    **resized("upsample_trilinear3d", IMAGE3),
    **resized("upsample_nearest1d", IMAGE1),
    **resized("upsample_nearest3d", IMAGE3),
    **resized("_upsample_nearest_exact1d", IMAGE1),
    **resized("_upsample_nearest_exact3d", IMAGE3),
    "addmv": [(VECTOR[:3], SQUARE, VECTOR[:3])],
    "addr": [(SQUARE, VECTOR[:3], VECTOR[:3])],
    "batch_norm": [
        (IMAGE, *[matrix(2).float()] * 2, matrix(2).float(), matrix(2).abs().float(), True, 0.1, 1e-5, True),
        (IMAGE, None, None, None, None, True, 0.1, 1e-5, True),
    ],
    "bilinear": [(matrix(2, 3), matrix(2, 4), matrix(2, 3, 4), matrix(2))],
    "col2im": [(matrix(1, 8, 9), [4, 4], [2, 2], [1, 1], [0, 0], [1, 1])],
    "im2col": [(IMAGE, [2, 2], [1, 1], [0, 0], [1, 1])],
    "convolution": [(IMAGE, matrix(2, 2, 3, 3), matrix(2), [1, 1], [0, 0], [1, 1], False, [0, 0], 1)],
    "einsum": [("ij,jk->ik", [SQUARE, OTHER])],
    "embedding": [(OTHER, ROWS), (OTHER, ROWS, 2), (OTHER, ROWS, -1, True), (OTHER, ROWS.view(3, 1))],
    "embedding_bag": [(OTHER, ROWS, torch.tensor([0, 1])), (OTHER, ROWS, torch.tensor([0, 1]), False, 1)],
    "embedding_bag.padding_idx": [
        (OTHER, ROWS, torch.tensor([0, 1]), False, 0, False, VECTOR[:3], False, padding)
        for padding in (None, 2)
    ],
    "gather": [(OTHER, 0, ROWS.expand(3, 3)), (OTHER, 1, ROWS.view(3, 1))],
    "group_norm": [(IMAGE, 2, matrix(2), matrix(2))],
    "index": [
        (OTHER, index)
        for index in (
            [ROWS],
            [ROWS.int()],
            [None, ROWS],
            [ROWS, ROWS],
            [ROWS[:, None], ROWS],
            [MASK],
            [OTHER > 0],
            [MASK, ROWS[:2]],
            [MASK.to(torch.uint8)],
        )
    ],
    "index_put": [
        (OTHER, [ROWS], VECTOR[:3]),
        (OTHER, [None, ROWS], OTHER, True),
        (OTHER, [OTHER > 0], torch.tensor(2.0).to(HALF)),
    ],
    "index_select": [(OTHER, 0, ROWS), (OTHER, 1, ROWS.int())],
    "istft": [(matrix(3, 5, 2).float().view(3, 5, 2), 4)],
    "layer_norm": [(SQUARE, [3], matrix(3), matrix(3))],
    "native_layer_norm": [(SQUARE, [3], matrix(3), matrix(3), 1e-5)],
    "norm": [(SQUARE, 2, [0])],
    "nuclear_norm.dim": [(SQUARE, [0, 1])],
    "renorm": [(SQUARE, 2, 0, 1.0)],
    "rms_norm": [(SQUARE, [3], matrix(3), 1e-5)],
    "rrelu": [(SQUARE,)],
    "segment_reduce": [],
    "take": [(OTHER, ROWS), (OTHER, ROWS.view(3, 1))],
    "tensordot": [(SQUARE, OTHER, [1], [0])],
}
CASES |= {
    f"{prefix}{kind}2d{suffix}{overload}": rows
    for prefix, kinds, suffix in (
        ("upsample_", "nearest bilinear bicubic", ""),
        ("_upsample_", "bilinear bicubic lanczos", "_aa"),
        ("_upsample_", "nearest_exact", ""),
    )
    for kind in kinds.split()
    for overload, rows in zip(("", ".vec"), resized(kind, IMAGE).values(), strict=True)
}
# Their arguments are keyword arguments.
KEYWORDS: dict[str, list[tuple[Arguments, dict[str, Any]]]] = {
    "segment_reduce": [((SQUARE, "sum"), {"lengths": torch.tensor([1, 2])})],
    "istft": [((torch.view_as_complex(matrix(3, 5, 2).float()), 4), {"window": VECTOR, "center": True})],
    "linalg_solve_triangular": [((SQUARE, OTHER), {"upper": False})],
    "linalg_pinv.atol_rtol_tensor": [((SQUARE,), {"atol": torch.tensor(0.1).to(HALF)})],
    "linalg_pinv.rcond_tensor": [((SQUARE, torch.tensor(0.1).to(HALF)), {})],
}


def cases(operator: OpOverload) -> list[tuple[Arguments, dict[str, Any]]]:
    """Positional and keyword arguments, all of whose floats are fp16."""
    name = str(operator._name).removeprefix("aten::")
    packet = name.partition(".")[0]
    for key in (name, packet):
        if key in KEYWORDS:
            return KEYWORDS[key]
        if key in CASES:
            return [(_of_schema(operator, row), {}) for row in CASES[key]]
    home, _, function = packet.partition("_")
    return [(_of_schema(operator, ARGUMENTS[home][function]), {})]


def _of_schema(operator: OpOverload, row: Arguments) -> Arguments:
    """The tensors that an overload takes as numbers are numbers."""
    numbers = ["number" in str(argument.type) for argument in operator._schema.arguments]
    return tuple(
        float(value.flatten()[0]) if isinstance(value, Tensor) and number else value
        for value, number in zip(row, numbers, strict=False)
    )


def cast(dtype: torch.dtype, value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return type(value)(cast(dtype, item) for item in value)
    return value.to(dtype) if isinstance(value, Tensor) and value.dtype == HALF else value


def kinds(operator: OpOverload, row: Arguments, dtype: torch.dtype) -> Iterator[Arguments]:
    """All half; all fp32; each argument fp32 among halves; the optional ones left out."""
    yield cast(dtype, row)
    yield cast(torch.float32, row)
    for i, argument in enumerate(operator._schema.arguments[: len(row)]):
        before, this, after = row[:i], row[i], row[i + 1 :]
        if repr(cast(torch.float32, this)) != repr(this):
            yield (*cast(dtype, before), cast(torch.float32, this), *cast(dtype, after))
        if str(argument.type) == "Optional[Tensor]" and this is not None:
            yield (*cast(dtype, before), None, *cast(dtype, after))


def leaves(value: Any) -> list[Tensor]:
    if isinstance(value, (list, tuple)):
        return [leaf for item in value for leaf in leaves(item)]
    return [value] if isinstance(value, Tensor) else []


def widened(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return type(value)(widened(item) for item in value)
    half = isinstance(value, Tensor) and value.dtype in (torch.float16, torch.bfloat16)
    return value.float() if half else value


REGISTRY = {str(op._name).removeprefix("aten::"): op for op, _ in autocast._missing("cpu", "AutocastCPU")}
COMPUTE = {str(op._name).removeprefix("aten::"): how for op, how in autocast._missing("cpu", "AutocastCPU")}


@pytest.mark.filterwarnings("ignore:.*deprecated", "ignore:indexing with dtype torch.uint8")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", sorted(REGISTRY))
def test_every_registered_kernel_takes_what_its_operator_takes(name: str, dtype: torch.dtype) -> None:
    called = 0
    for row, named in cases(REGISTRY[name]):
        for args in kinds(REGISTRY[name], row, dtype):
            for gradients in (False, True):
                called += check(name, args, cast(dtype, named), dtype, gradients)
    assert called


def check(name: str, args: Arguments, named: dict[str, Any], dtype: torch.dtype, gradients: bool) -> bool:
    """Compare with fp32; False where the operator does not take these arguments in fp32 either."""
    operator, wide_named = REGISTRY[name], {key: widened(value) for key, value in named.items()}
    wide, ours = (
        tuple(
            x.clone().requires_grad_(gradients) if isinstance(x, Tensor) and x.is_floating_point() else x
            for x in row
        )
        for row in (widened(args), args)
    )
    try:
        exact = run(operator, wide, wide_named)
    except (RuntimeError, ValueError):
        return False
    with HalfArithmetic("cpu", dtype):
        found = run(operator, ours, named)
    half = any(x.dtype == dtype for x in leaves(args))
    for value, theirs in zip(found, exact, strict=True):
        if COMPUTE[name] is autocast._in_fp32:
            assert value.dtype == theirs.dtype
        elif COMPUTE[name] in (autocast._pick, autocast._curve, autocast._batch_norm):
            assert value.dtype in ((dtype, torch.float32) if half else (theirs.dtype,))
        tolerance = 1e-5 if value.dtype == torch.float32 else 4 * torch.finfo(dtype).eps
        if value.is_floating_point() or value.is_complex():
            torch.testing.assert_close(
                value.to(theirs.dtype), theirs, rtol=tolerance, atol=tolerance, equal_nan=True
            )
    return True


def run(operator: OpOverload, args: Arguments, named: dict[str, Any]) -> list[Tensor]:
    """The results; after their sum's backward pass, if they have one."""
    torch.manual_seed(0)
    found = leaves(operator(*args, **named))
    for value in found:
        if value.requires_grad:
            value.sum().abs().backward(retain_graph=True)
    return [value.detach() for value in found]
