"""BatchNorm over the samples of all ranks, on any device.

Owns the module, its backward pass, and the replacement of batch norms in a model. Statistics are fp32 and
exact for ranks of different sizes. Each forward pass of each module is a collective, and each backward pass
another: all ranks must run the same number. The host never waits for the device. `torch.nn.SyncBatchNorm`
does in every forward pass, to leave out ranks without samples, which here add zeros to the sums. Input and
output are read and written as often as by nn.BatchNorm, in their own dtype: two passes forward, two backward.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.modules.batchnorm import _BatchNorm

import launcher.engine.works as works
from launcher.engine.errors import UnusableError
from launcher.engine.flat.names import named_modules

_CONVERTED = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
WITH_KERNELS = ("cuda",)  # types of device with torch's kernels for a synchronised norm


class SyncBatchNorm(_BatchNorm):
    """A BatchNorm that in training normalises with the statistics of all ranks of `group`.

    Shares parameters, buffers and all else with `original`. Input [n, channels, ...] of fp32 or half; the
    output has the dtype of the input. Running statistics end up equal on all ranks.
    """

    def __init__(self, original: _BatchNorm, group: dist.ProcessGroup) -> None:
        vars(self).update(vars(original))
        self._group = group

    def _check_input_dim(self, input: Tensor) -> None:
        if input.ndim < 2 or input.shape[1] != self.num_features:
            raise ValueError(f"expected [n, {self.num_features}, ...], got {list(input.shape)}")

    def forward(self, input: Tensor) -> Tensor:
        if not self.training:
            return super().forward(input)
        self._check_input_dim(input)
        output, mean, variance, count = _Normalise.apply(  # type: ignore[no-untyped-call]
            input, self.weight, self.bias, self.eps, self._group
        )
        self._track(mean, variance, count)
        return cast(Tensor, output)

    def _track(self, mean: Tensor, variance: Tensor, count: Tensor) -> None:
        """Update the running statistics; their variance is the unbiased one, as in torch."""
        if self.running_mean is None or self.running_var is None or self.num_batches_tracked is None:
            return
        with torch.no_grad():
            self.num_batches_tracked.add_(1)
            # A single sample has no unbiased variance: no division by 0.
            unbiased = variance * (count / (count - 1).clamp(min=1))
            factor: float | Tensor | None = self.momentum
            if factor is None:  # the mean over all batches so far
                factor = self.num_batches_tracked.to(mean.dtype).reciprocal()
            self.running_mean.lerp_(mean, factor)
            self.running_var.lerp_(unbiased, factor)


class _Normalise(torch.autograd.Function):
    """(x - mean) / sqrt(variance + eps) * weight + bias over all ranks; also mean, variance and count."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, group: dist.ProcessGroup
    ) -> tuple[Tensor, ...]:
        x = x.contiguous(memory_format=_format(x))
        with torch._C.DisableTorchFunction():  # emulated half arithmetic would widen x in memory
            mean, variance, count = _statistics(x, group)
            inverse = torch.rsqrt(variance + eps)
            if not x.numel():
                output = torch.empty_like(x)
            elif x.device.type in WITH_KERNELS:
                output = torch.batch_norm_elemt(x, weight, bias, mean, inverse, eps)
            else:
                output = F.batch_norm(x, mean, variance, weight, bias, eps=eps)
        ctx.save_for_backward(x, weight, mean, inverse, count)
        ctx.group = group
        ctx.mark_non_differentiable(mean, variance, count)
        return output, mean, variance, count

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, inverse, count = ctx.saved_tensors
        with torch._C.DisableTorchFunction():
            gradient = gradient.contiguous(memory_format=_format(x))
            sums, products = _sums(gradient, x, mean, inverse)
            shared = torch.stack([sums, products])
            works.all_reduce(shared, ctx.group)
            if not x.numel():
                of_input = torch.zeros_like(x)
            elif x.device.type in WITH_KERNELS:
                of_input = torch.batch_norm_backward_elemt(
                    gradient, x, mean, inverse, weight, shared[0], shared[1], count.view(1).int()
                )
            else:
                mean_sum, mean_product = shared / count
                centred = x.float() - _by_channel(mean, x)
                centred.mul_(_by_channel(mean_product * inverse * inverse, x))
                deviation = torch.sub(gradient, centred).sub_(_by_channel(mean_sum, x))
                factor = inverse if weight is None else inverse * weight
                of_input = deviation.mul_(_by_channel(factor, x)).to(x.dtype)
        # Those of weight and bias are this rank's, like every other gradient.
        of_weight = products * inverse if ctx.needs_input_grad[1] else None
        return of_input, of_weight, sums if ctx.needs_input_grad[2] else None, None, None


def _statistics(x: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, Tensor, Tensor]:
    """Mean, variance and count over all ranks: fp32 [channels], [channels], 0-dim.

    The squared deviations from the common mean come from each rank's variance and mean, without another pass:
    E[x^2] - E[x]^2 would lose the variance to cancellation.
    """
    zeros = x.new_zeros(x.shape[1], dtype=torch.float32)
    own_mean, own_variance = zeros, zeros
    if x.numel() and x.device.type in (*WITH_KERNELS, "cpu"):
        # The kernel wants running statistics: with a momentum of 0 it leaves these as they are.
        own_mean, own_variance = torch.batch_norm_update_stats(x, zeros, zeros.clone(), 0.0)
    elif x.numel():
        own_variance, own_mean = torch.var_mean(x.float(), [0, *range(2, x.ndim)], correction=0)
    own_count = x.numel() // x.shape[1]
    sums = torch.cat([own_mean * own_count, torch.full_like(zeros[:1], own_count)])
    works.all_reduce(sums, group)
    mean, count = sums[:-1] / sums[-1], sums[-1]
    squares = (own_mean - mean).square_().add_(own_variance).mul_(own_count)
    works.all_reduce(squares, group)
    return mean, squares / count, count


def _sums(gradient: Tensor, x: Tensor, mean: Tensor, inverse: Tensor) -> tuple[Tensor, Tensor]:
    """This rank's sums by channel, fp32: of the gradient, and of gradient * (x - mean)."""
    if not x.numel():
        return torch.zeros_like(mean), torch.zeros_like(mean)
    if x.device.type in WITH_KERNELS:
        sums, products, *_ = torch.batch_norm_backward_reduce(
            gradient, x, mean, inverse, None, True, False, False
        )
        return sums, products
    # The gradients of weight and bias of an evaluation with a variance of 1.
    ones = torch.ones_like(mean)
    _, products, sums = torch.ops.aten.native_batch_norm_backward(
        gradient, x, ones, mean, ones, None, None, False, 0.0, [False, True, True]
    )
    return sums, products


def _format(x: Tensor) -> torch.memory_format:
    """The memory format of x, or the nearest without gaps, for which the kernels are written."""
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    last = formats.get(x.ndim, torch.contiguous_format)
    return last if x.is_contiguous(memory_format=last) else torch.contiguous_format


def synchronised(model: nn.Module, group: dist.ProcessGroup) -> nn.Module:
    """Replace the batch norms of `model`, keeping their parameters and buffers, and return the model.

    `group` may be that of a Stepper built with `Wire(overlap=False)`: all ranks then call its collectives in
    the same order, even if parameters of one rank receive no gradient. Two NCCL communicators on one device
    need such an order too. Raises UnusableError for a batch norm of a custom class.
    """
    replaced: dict[nn.Module, SyncBatchNorm] = {}
    for name, module in named_modules(model):
        if not isinstance(module, _BatchNorm):
            continue
        if type(module) not in _CONVERTED:
            raise UnusableError(
                f"{name or 'the model'} is a {type(module).__name__}, whose arithmetic is unknown here. "
                "Use nn.BatchNorm1d, 2d or 3d, or leave the batch norms as they are."
            )
        replaced[module] = SyncBatchNorm(module, group)
    for parent in list(model.modules()):
        for name, child in parent.named_children():
            if child in replaced:
                setattr(parent, name, replaced[child])
    return replaced.get(model, model)


def _by_channel(values: Tensor, x: Tensor) -> Tensor:
    """[channels] in a shape that broadcasts over x [n, channels, ...]."""
    return values.view(1, -1, *([1] * (x.ndim - 2)))
