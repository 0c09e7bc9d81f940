"""Half-precision arithmetic for processors that have none.

Operations keep the classes of `torch.autocast`: matrix products take half inputs, accumulate in fp32 and
give half outputs; reductions, exponentials, norms and losses compute in fp32. Here the inputs are widened,
the operation runs in fp32 and the result is rounded once, so the rounding is that of native half arithmetic,
at the speed of fp32. Autograd sees the casts, so gradients are rounded at the same places.

`torch.compile` traces the casts too, and removes fp32 -> fp16 -> fp32 as a no-op unless its option
`emulate_precision_casts` is set.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import FunctionType
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

_HALF = (torch.float16, torch.bfloat16)
_FLOATS = (*_HALF, torch.float32)
MARK = "xpu"  # an unused device type, whose autocast flag marks that this engine's arithmetic is on


def _functions(names: str, *homes: Any) -> Iterable[Callable[..., Any]]:
    """The functions of these names wherever torch offers them: as function, as method, or both."""
    homes = homes or (torch, torch.Tensor, F)
    return (getattr(home, name) for name in names.split() for home in homes if hasattr(home, name))


def _all_but(home: Any, names: str) -> Iterable[Callable[..., Any]]:
    """Every public function of a module of torch, except these."""
    excepted = {*names.split(), "Tensor", "common_args", "merge_dicts"}
    public = (name for name in dir(home) if not name.startswith("_") and name not in excepted)
    return (getattr(home, name) for name in public if callable(getattr(home, name)))


# Elementwise functions of torch.special, whose kernels return half.
CURVES = "digamma entr erf erfc expit gammainc gammaincc gammaln i0 i0e i1 i1e logit multigammaln ndtr"
CURVES += " polygamma psi sinc"

# Half inputs, fp32 accumulation, half output.
PRODUCTS = frozenset(
    [
        *_functions("conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d conv_tbc"),
        *_functions("convolution linear matmul mm bmm mv addmm addmv addbmm addr baddbmm"),
        *_functions("__matmul__ __rmatmul__ einsum chain_matmul prelu scaled_dot_product_attention"),
        *_functions("vecdot multi_dot matmul", torch.linalg),
        # Hidden states stay fp32 from one time step to the next, which native kernels may round.
        *_functions("lstm gru rnn_tanh rnn_relu lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell"),
    ]
)
# fp32 inside and fp32 out, as autocast's fp32 list.
WIDE = frozenset(
    [
        *_functions("softmax log_softmax softmin softplus sum prod cumsum cumprod logsumexp"),
        *_functions("exp expm1 log log10 log2 log1p pow __pow__ __rpow__ reciprocal rsqrt"),
        *_functions("__rdiv__ __rtruediv__ sinh cosh tan acos asin erfinv interpolate"),
        *_functions("layer_norm native_layer_norm group_norm rms_norm normalize cosine_similarity"),
        *_functions("norm frobenius_norm nuclear_norm dist cdist pdist renorm"),
        *_functions("norm vector_norm matrix_norm", torch.linalg),
        *_functions("cross_entropy nll_loss mse_loss l1_loss smooth_l1_loss huber_loss kl_div"),
        *_functions("binary_cross_entropy_with_logits poisson_nll_loss gaussian_nll_loss ctc_loss"),
        *_functions("cosine_embedding_loss hinge_embedding_loss margin_ranking_loss soft_margin_loss"),
        *_functions("triplet_margin_loss multi_margin_loss multilabel_margin_loss"),
        # Not in autocast's lists: decompositions, which have no half kernels, and functions that would
        # accumulate rounding errors in half.
        *_all_but(torch.linalg, "matmul multi_dot vecdot cross diagonal"),
        *_all_but(torch.special, f"{CURVES} round"),
        *_all_but(torch.fft, "fftfreq rfftfreq fftshift ifftshift"),
        *_functions("matrix_exp matrix_power exp2 logaddexp logaddexp2 logcumsumexp xlogy stft istft"),
        *_functions("cholesky cholesky_inverse cholesky_solve det logdet slogdet inverse pinverse qr svd"),
        *_functions("geqrf orgqr ormqr lu_solve triangular_solve svd_lowrank pca_lowrank lobpcg"),
        *_functions("trapezoid trapz cumulative_trapezoid trace nansum quantile nanquantile"),
    ]
)
# fp32 inside, output of the first input's dtype: what CUDA kernels do with half inputs.
INNER = frozenset(
    [
        *_functions("batch_norm instance_norm mean nanmean var std var_mean std_mean cov corrcoef gelu"),
        *_functions(CURVES, torch.special),
        *_functions("avg_pool1d avg_pool2d avg_pool3d"),
        *_functions("adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d"),
    ]
)
# fp32 inside, output half only where all inputs are: autocast's promoting list.
PROMOTING = frozenset(
    [
        *_functions("addcdiv addcmul atan2 bilinear cross dot vdot tensordot"),
        *_functions("grid_sample grid_sampler index_put scatter_add"),
        # A half backward pass on a CPU adds the gradients of equal tokens in half.
        *_functions("cross", torch.linalg),
        *_functions("embedding embedding_bag", torch),
        *_functions("index_select gather take take_along_dim index_add"),
    ]
)
# Written in Python from other functions, which the mode must see one by one. The backward passes are here
# because activation checkpointing runs forward passes within them.
COMPOSITES = frozenset(
    [
        *_functions(
            "multi_head_attention_forward gumbel_softmax local_response_norm embedding embedding_bag", F
        ),
        *_functions("triplet_margin_with_distance_loss"),
        *_functions("backward", torch.Tensor),
        *_functions("backward grad", torch.autograd),
    ]
)
CHANGED = PRODUCTS | WIDE | INNER | PROMOTING | COMPOSITES | {checkpoint, torch.Tensor.__getitem__}


class RoundedArithmetic(TorchFunctionMode):
    """Context in which torch functions round to `dtype` as hardware with such arithmetic does."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype
        self._outer: list[bool] = []

    def __enter__(self) -> Self:
        # nn.RNN and similar modules refuse inputs of another dtype than their weights unless some autocast is
        # on. Compiled code turns off the autocast that was on when it was traced, by which it is recognised
        # below. Autocast of an unused device type has no other effect.
        self._outer.append(torch.is_autocast_enabled(MARK))
        torch.set_autocast_enabled(MARK, True)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)  # type: ignore[no-untyped-call]
        torch.set_autocast_enabled(MARK, self._outer.pop())

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if kwargs.get("out") is not None:  # as in autocast
            return func(*args, **kwargs)
        if not torch.is_autocast_enabled(MARK):
            # Compiled code already contains the rounding. It calls torch.convolution on fp32 buffers and
            # reads as many bytes of the result, which a half result does not have.
            return func(*args, **kwargs)
        if func not in CHANGED:  # most calls: one look-up for them
            return func(*args, **kwargs)
        if func in PRODUCTS:
            args, kwargs = map_tensors(self._round, args), map_tensors(self._round, kwargs)
            return map_tensors(self._narrow, func(*args, **kwargs))
        if func in WIDE:
            return func(*map_tensors(widen, args), **map_tensors(widen, kwargs))
        if func in INNER:
            given = kwargs["input"] if "input" in kwargs else next(a for a in args if _is_tensor(a))
            return self._inside_fp32(func, args, kwargs, given.dtype in _HALF)
        if func in PROMOTING:
            return self._inside_fp32(func, args, kwargs, not any_fp32((args, kwargs)))
        if func is checkpoint:  # only the compiler gets here; it would trace the body without this mode
            torch._dynamo.graph_break("emulated half arithmetic leaves activation checkpointing uncompiled")
        if func is torch.Tensor.__getitem__ and picks_rows(*args):
            return self._inside_fp32(func, args, kwargs, True)
        if func in COMPOSITES:
            with self:
                return _OPENED[func](*args, **kwargs)
        return func(*args, **kwargs)

    def _inside_fp32(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], half: bool
    ) -> Any:
        """Compute in fp32; `half` results unless the caller asks for a dtype."""
        out = func(*map_tensors(widen, args), **map_tensors(widen, kwargs))
        return map_tensors(self._narrow, out) if half and kwargs.get("dtype") is None else out

    def _round(self, value: Any) -> Any:
        """A float tensor as half hardware would read it: rounded to half, held in fp32."""
        if isinstance(value, torch.Tensor) and value.dtype in _FLOATS:
            return value.to(self.dtype).float()
        return value

    def _narrow(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor) and value.dtype == torch.float32:
            return value.to(self.dtype)
        return value


def picks_rows(table: torch.Tensor, index: object) -> bool:
    """Whether `table[index]` may take an element of a half table twice: its gradients are then summed.

    A slice stays a view, which can be written to.
    """
    if table.dtype not in _HALF or not table.requires_grad:
        return False
    return any(
        isinstance(part, list) or (_is_tensor(part) and part.dtype != torch.bool)
        for part in (index if isinstance(index, tuple) else (index,))
    )


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def widen(value: Any) -> Any:
    return value.float() if isinstance(value, torch.Tensor) and value.dtype in _HALF else value


def any_fp32(value: Any) -> bool:
    if isinstance(value, (tuple, list)):
        return any(any_fp32(item) for item in value)
    if isinstance(value, dict):
        return any(any_fp32(item) for item in value.values())
    return isinstance(value, torch.Tensor) and value.dtype == torch.float32


def map_tensors(change: Callable[[Any], Any], value: Any) -> Any:
    """Apply `change` to the leaves of an argument tree of tuples, lists and dicts."""
    if isinstance(value, list):
        return [map_tensors(change, item) for item in value]
    if isinstance(value, tuple):
        return tuple(map_tensors(change, item) for item in value)
    if isinstance(value, dict):
        return {key: map_tensors(change, item) for key, item in value.items()}
    return change(value)


def _opened(composite: Any) -> FunctionType:
    """A copy of the function without its check for an active mode.

    Torch's Python functions begin with that check and pass themselves to the mode; what they call then runs
    with the mode disabled. In this copy the check returns False, so the mode sees the calls within.
    """
    names = dict(composite.__globals__)
    for check in ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic"):
        if check in names:
            names[check] = _no_mode
    opened = FunctionType(composite.__code__, names, composite.__name__, composite.__defaults__)
    opened.__kwdefaults__ = composite.__kwdefaults__
    return opened


def _no_mode(*tensors: Any) -> bool:
    return False


_OPENED = {composite: _opened(composite) for composite in COMPOSITES}
