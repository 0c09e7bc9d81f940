"""BatchNorm over the samples of all ranks, on any device.

Owns the module, its backward pass, and the replacement of batch norms in a model. Statistics are fp32 and
exact for ranks of different sizes. Each forward pass of each module is a collective, and each backward pass
another: all ranks must run the same number. The host never waits for the device. `torch.nn.SyncBatchNorm`
does in every forward pass, to leave out ranks without samples, which here add zeros to the sums.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.modules.batchnorm import _BatchNorm

import launcher.engine.works as works
from launcher.engine.errors import UnusableError
from launcher.engine.flat.names import named_modules

_CONVERTED = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


class SyncBatchNorm(_BatchNorm):
    """A BatchNorm that in training normalises with the statistics of all ranks of `group`.

    Shares parameters and buffers with `original`. Input [n, channels, ...] of fp32 or half; the output has
    the dtype of the input. Running statistics end up equal on all ranks.
    """

    def __init__(self, original: _BatchNorm, group: dist.ProcessGroup) -> None:
        super().__init__(
            original.num_features,
            original.eps,
            original.momentum,
            original.affine,
            original.track_running_stats,
            device="meta",
        )
        self._parameters, self._buffers = original._parameters, original._buffers
        self.training = original.training
        self._group = group

    def _check_input_dim(self, input: Tensor) -> None:
        if input.ndim < 2 or input.shape[1] != self.num_features:
            raise ValueError(f"expected [n, {self.num_features}, ...], got {list(input.shape)}")

    def forward(self, input: Tensor) -> Tensor:
        if not self.training:
            return super().forward(input)
        self._check_input_dim(input)
        normalised, mean, variance, count = _Normalise.apply(  # type: ignore[no-untyped-call]
            input, self.eps, self._group
        )
        self._track(mean, variance, count)
        if self.affine:
            normalised = normalised * _by_channel(self.weight, input) + _by_channel(self.bias, input)
        return cast(Tensor, normalised.to(input.dtype))

    def _track(self, mean: Tensor, variance: Tensor, count: Tensor) -> None:
        """Update the running statistics; their variance is the unbiased one, as in torch."""
        if self.running_mean is None or self.running_var is None or self.num_batches_tracked is None:
            return
        with torch.no_grad():
            self.num_batches_tracked.add_(1)
            unbiased = variance * (count / (count - 1).clamp(min=1))
            if self.momentum is not None:
                self.running_mean.lerp_(mean, self.momentum)
                self.running_var.lerp_(unbiased, self.momentum)
            else:
                factor = self.num_batches_tracked.to(mean.dtype).reciprocal()
                self.running_mean.lerp_(mean, factor)
                self.running_var.lerp_(unbiased, factor)


class _Normalise(torch.autograd.Function):
    """(x - mean) / sqrt(variance + eps) over all ranks, in fp32; also mean, variance and count.

    Two passes, mean then deviations: E[x^2] - E[x]^2 would lose the variance to cancellation.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, eps: float, group: dist.ProcessGroup) -> tuple[Tensor, ...]:
        wide = x.float()
        others = [dimension for dimension in range(x.ndim) if dimension != 1]
        count = torch.full((1,), x.numel() / x.shape[1], device=x.device)
        sums = torch.cat([wide.sum(others), count])
        works.run(dist.all_reduce(sums, group=group, async_op=True), sums)
        mean, count = sums[:-1] / sums[-1], sums[-1]
        centred = wide - _by_channel(mean, x)
        squares = (centred * centred).sum(others)
        works.run(dist.all_reduce(squares, group=group, async_op=True), squares)
        variance = squares / count
        inverse = torch.rsqrt(variance + eps)
        normalised = centred * _by_channel(inverse, x)
        ctx.save_for_backward(normalised, inverse, count)
        ctx.group = group
        ctx.mark_non_differentiable(mean, variance, count)
        return normalised, mean, variance, count

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor, *_: Tensor) -> tuple[Tensor, None, None]:
        normalised, inverse, count = ctx.saved_tensors
        others = [dimension for dimension in range(gradient.ndim) if dimension != 1]
        sums = torch.stack([gradient.sum(others), (gradient * normalised).sum(others)])
        works.run(dist.all_reduce(sums, group=ctx.group, async_op=True), sums)
        mean, slope = sums / count
        deviation = gradient - _by_channel(mean, gradient) - normalised * _by_channel(slope, gradient)
        return deviation * _by_channel(inverse, gradient), None, None


def synchronised(model: nn.Module, group: dist.ProcessGroup) -> nn.Module:
    """Replace the batch norms of `model`, keeping their parameters and buffers, and return the model.

    `group` may be that of a Stepper built with `Wire(overlap=False)`: all ranks then call its collectives in
    the same order, even if parameters of one rank receive no gradient. Two NCCL communicators on one device
    need such an order too. Raises UnusableError for a batch norm of a custom class.
    """
    for name, module in named_modules(model):
        if isinstance(module, _BatchNorm) and type(module) not in _CONVERTED:
            raise UnusableError(
                f"{name or 'the model'} is a {type(module).__name__}, whose arithmetic is unknown here. "
                "Use nn.BatchNorm1d, 2d or 3d, or leave the batch norms as they are."
            )
    replaced = {
        module: SyncBatchNorm(module, group) for module in model.modules() if isinstance(module, _BatchNorm)
    }
    for parent in list(model.modules()):
        for name, child in parent.named_children():
            if isinstance(child, _BatchNorm):
                setattr(parent, name, replaced[child])
    return replaced[model] if isinstance(model, _BatchNorm) else model


def _by_channel(values: Tensor, x: Tensor) -> Tensor:
    """[channels] in a shape that broadcasts over x [n, channels, ...]."""
    return values.view(1, -1, *([1] * (x.ndim - 2)))
