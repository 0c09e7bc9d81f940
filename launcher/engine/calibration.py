"""A start for the loss scale, from one dry backward instead of a run of skipped steps.

Owns the choice of the exponent. The dry pass runs in fp32 with the weights widened, so nothing overflows,
and leaves no trace: weights, gradients, buffers and random state are as before.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn

FP16_MAX = 65504.0
HEADROOM = 4.0  # two octaves: gradients grow in the first steps
UNKNOWN = -(2**31)


def safe_exponent(
    model: nn.Module,
    loss_sum: Callable[[], Tensor] | None,
    gradients_of: Callable[[Tensor], Mapping[str, Tensor]],
    reference_count: int,
    growth: float,
    group: dist.ProcessGroup | None,
) -> int | None:
    """The largest s at which 2^s / n0 times every gradient of one micro-batch stays two octaves below 65504.

    `loss_sum` runs the forward pass on this rank's micro-batch and gives its summed loss; None where the
    rank has none; `gradients_of` back-propagates it. `growth` is how many times larger a parameter's
    gradient may be on the wire. None if no rank saw a gradient other than zero, or any saw one that is not
    finite. A collective.
    """
    largest = None if loss_sum is None else _largest_gradient(model, loss_sum, gradients_of, growth)
    agreed = torch.tensor(_octave(largest), dtype=torch.int64)
    if group is not None:
        agreed = agreed.to(next(model.parameters()).device)
        dist.all_reduce(agreed, op=dist.ReduceOp.MAX, group=group)
    octave = int(agreed)
    if octave in (UNKNOWN, -UNKNOWN):
        return None
    room = math.floor(math.log2(FP16_MAX / HEADROOM * reference_count))
    return room - octave


def _octave(largest: float | None) -> int:
    """ceil(log2(largest)) as an integer, so that a MAX over ranks loses no NaN."""
    if largest is None or largest == 0:
        return UNKNOWN
    return math.ceil(math.log2(largest)) if math.isfinite(largest) else -UNKNOWN


def _largest_gradient(
    model: nn.Module,
    loss_sum: Callable[[], Tensor],
    gradients_of: Callable[[Tensor], Mapping[str, Tensor]],
    growth: float,
) -> float:
    """Of the outputs of modules, and of parameters times `growth`: those are what fp16 must hold."""
    seen: list[Tensor] = []
    with _widened(model), _watched_outputs(model, seen):
        seen += [growth * g.float().abs().amax() for g in gradients_of(loss_sum()).values()]
        return float(torch.stack([value.float() for value in seen]).amax()) if seen else 0.0


@contextmanager
def _widened(model: nn.Module) -> Iterator[None]:
    """Half parameters as fp32 while the context lasts; the random state is put back."""
    halves = [(p, p.data) for p in model.parameters() if p.dtype in (torch.float16, torch.bfloat16)]
    devices = [torch.cuda.current_device()] if any(p.is_cuda for p in model.parameters()) else []
    with torch.random.fork_rng(devices):
        try:
            for p, half in halves:
                p.data = half.float()
            yield
        finally:
            for p, half in halves:
                p.data = half


@contextmanager
def _watched_outputs(model: nn.Module, seen: list[Tensor]) -> Iterator[None]:
    """Put the largest gradient of each module's output into `seen`."""

    def watch(module: nn.Module, inputs: object, output: object) -> None:
        # A scalar is a loss, and losses are fp32.
        if isinstance(output, Tensor) and output.requires_grad and output.ndim:
            output.register_hook(  # type: ignore[no-untyped-call]
                lambda gradient: seen.append(gradient.detach().abs().amax())
            )

    hooks = [module.register_forward_hook(watch) for module in model.modules()]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
