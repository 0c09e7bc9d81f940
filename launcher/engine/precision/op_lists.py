"""The classes of torch's functions in emulated half arithmetic, after those of `torch.autocast`.

Owns these tables and the casts of arguments. Computes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

HALF = (torch.float16, torch.bfloat16)
FLOATS = (*HALF, torch.float32)


def _functions(names: str, *homes: object) -> Iterable[Callable[..., object]]:
    """The functions of these names wherever torch offers them: as function, as method, or both."""
    homes = homes or (torch, torch.Tensor, F)
    return (getattr(home, name) for name in names.split() for home in homes if hasattr(home, name))


def _all_but(home: object, names: str) -> Iterable[Callable[..., object]]:
    """Every public function of a module of torch, except these."""
    excepted = {*names.split(), "Tensor", "common_args", "merge_dicts"}
    public = (name for name in dir(home) if not name.startswith("_") and name not in excepted)
    return (getattr(home, name) for name in public if callable(getattr(home, name)))


# Elementwise functions of torch.special, whose kernels return half.
SPECIAL = "digamma entr erf erfc expit gammainc gammaincc gammaln i0 i0e i1 i1e logit multigammaln ndtr"
SPECIAL += " polygamma psi sinc"

# Half inputs, fp32 accumulation, half output.
LOWER_PRECISION_FP = frozenset[Callable[..., object]]().union(
    _functions("conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d conv_tbc"),
    _functions("convolution linear matmul mm bmm mv inner addmm addmv addbmm addr baddbmm"),
    _functions("__matmul__ __rmatmul__ einsum chain_matmul prelu scaled_dot_product_attention"),
    _functions("vecdot multi_dot matmul", torch.linalg),
    # Hidden states stay fp32 from one time step to the next, which native kernels may round.
    _functions("lstm gru rnn_tanh rnn_relu lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell"),
)
# fp32 inside and fp32 out, as autocast's fp32 list.
FP32 = frozenset[Callable[..., object]]().union(
    _functions("softmax log_softmax softmin softplus sum prod cumsum cumprod logsumexp"),
    _functions("exp expm1 log log10 log2 log1p pow __pow__ __rpow__ reciprocal rsqrt"),
    _functions("__rdiv__ __rtruediv__ sinh cosh tan acos asin erfinv interpolate"),
    _functions("layer_norm native_layer_norm group_norm rms_norm normalize cosine_similarity"),
    _functions("norm frobenius_norm nuclear_norm dist cdist pdist renorm"),
    _functions("norm vector_norm matrix_norm", torch.linalg),
    _functions("cross_entropy nll_loss mse_loss l1_loss smooth_l1_loss huber_loss kl_div"),
    _functions("binary_cross_entropy_with_logits poisson_nll_loss gaussian_nll_loss ctc_loss"),
    _functions("cosine_embedding_loss hinge_embedding_loss margin_ranking_loss soft_margin_loss"),
    _functions("triplet_margin_loss multi_margin_loss multilabel_margin_loss"),
    # Not in autocast's lists: decompositions, for which no CPU has half kernels, and functions that would
    # accumulate rounding errors in half.
    _all_but(torch.linalg, "matmul multi_dot vecdot cross diagonal"),
    _all_but(torch.special, f"{SPECIAL} round"),
    _all_but(torch.fft, "fftfreq rfftfreq fftshift ifftshift"),
    _functions("matrix_exp matrix_power exp2 logaddexp logaddexp2 logcumsumexp xlogy stft istft"),
    _functions("cholesky cholesky_inverse cholesky_solve det logdet slogdet inverse pinverse qr svd"),
    _functions("geqrf orgqr ormqr lu lu_solve triangular_solve svd_lowrank pca_lowrank lobpcg"),
    _functions("complex polar view_as_complex"),
    _functions("trapezoid trapz cumulative_trapezoid trace nansum quantile nanquantile"),
)
# fp32 inside, output of the first input's dtype: what CUDA kernels do with half inputs.
FP32_INSIDE = frozenset[Callable[..., object]]().union(
    _functions("batch_norm instance_norm mean nanmean var std var_mean std_mean cov corrcoef gelu"),
    _functions(SPECIAL, torch.special),
    _functions("avg_pool1d avg_pool2d avg_pool3d rrelu fold unfold", torch, F),
    _functions("adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d"),
)
# fp32 inside, output half only where all inputs are: autocast's promoting list.
PROMOTE = frozenset[Callable[..., object]]().union(
    _functions("addcdiv addcmul atan2 bilinear cross dot vdot tensordot"),
    _functions("grid_sample grid_sampler grid_sampler_2d grid_sampler_3d index_put scatter_add"),
    _functions("cross", torch.linalg),
    _functions("embedding_bag", torch),
    # Not in autocast's lists: kernels for CPUs add in half, and those of CUDA may.
    _functions("index_add index_reduce scatter_reduce segment_reduce"),
)
# They copy elements of a table. Computed as FP32_INSIDE, because the gradients of an element that is taken
# twice are added: in fp32, as the kernels of GPUs do, and not in half.
GATHERS = frozenset[Callable[..., object]]().union(
    _functions("index_select gather take take_along_dim repeat_interleave"),
    _functions("embedding", torch),
    [torch.Tensor.__getitem__],
)
# Written in Python from other functions, which the mode must see one by one. So are the backward passes,
# because activation checkpointing runs forward passes within them.
COMPOSITES = frozenset[Callable[..., object]]().union(
    _functions("multi_head_attention_forward gumbel_softmax local_response_norm embedding embedding_bag", F),
    _functions("triplet_margin_with_distance_loss"),
)
BACKWARD = frozenset([*_functions("backward", torch.Tensor), *_functions("backward grad", torch.autograd)])
CHANGED = LOWER_PRECISION_FP | FP32 | FP32_INSIDE | PROMOTE | GATHERS | COMPOSITES | BACKWARD | {checkpoint}


def is_tensor(value: object) -> bool:
    return isinstance(value, torch.Tensor)


def widen(value: object) -> Any:
    return value.float() if isinstance(value, torch.Tensor) and value.dtype in HALF else value


def any_fp32(value: object) -> bool:
    if isinstance(value, torch.Tensor):
        return value.dtype == torch.float32
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, (tuple, list)):
        return False
    return any(map(any_fp32, value))


def map_tensors(change: Callable[[torch.Tensor], object], value: Any) -> Any:
    """Apply `change` to the tensors in a tree of tuples, lists and dicts; not of their subclasses."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if type(value) in (tuple, list):
        return type(value)([map_tensors(change, item) for item in value])
    if type(value) is dict:
        return {key: map_tensors(change, item) for key, item in value.items()}
    return value


def round_to(dtype: torch.dtype, value: torch.Tensor) -> torch.Tensor:
    """A float tensor as half hardware would read it: rounded to `dtype`, held in fp32."""
    return value.to(dtype).float() if value.dtype in FLOATS else value


def narrow_fp32(dtype: torch.dtype, value: torch.Tensor) -> torch.Tensor:
    return value.to(dtype) if value.dtype == torch.float32 else value
