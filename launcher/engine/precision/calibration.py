"""The initial loss scale, from one dry backward pass instead of a series of skipped steps.

Owns the choice of the exponent. The dry pass runs in fp32 with the weights widened, so nothing overflows.
Weights, gradients, buffers and random state are restored.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn

import launcher.engine.works as works
from launcher.engine.errors import refuse_count
from launcher.engine.precision.classes import HALF

FP16_MAX = 65504.0
HEADROOM = 4.0  # two octaves: gradients grow in the first steps
UNKNOWN = -(2**31)  # below every octave: the MAX over the ranks drops it, and keeps its negative
FAILED = 2**32  # above every octave and -UNKNOWN: the MAX over the ranks keeps it


Loss = Callable[[], Tensor | tuple[Tensor, float | Tensor]]  # the sum, or the sum and its count
Found = tuple[float, float | Tensor | None]  # the largest gradient of a pass, and the count of its loss
Pass = Callable[[], Found]


def dry_pass(
    run: Pass | None, device: torch.device | None, group: works.Group, agree_on_failure: bool
) -> tuple[int | None, float | Tensor | None] | None:
    """`run` this rank's pass, which is `largest_gradient`, and agree on the result.

    `run` is None if the rank has no micro-batch. A collective, on `device`. With `agree_on_failure` what it
    raises is raised after that, so that no rank waits for this one.

    Returns an octave, such that no gradient of any rank is above 2^octave, and the count of this rank's loss.
    The octave is None if all gradients of all ranks are zero, or any is not finite; the count, if the loss
    came without. None instead of both if the pass of another rank raised.
    """
    largest: float | None = None
    count: float | Tensor | None = 0
    failure: Exception | None = None
    # Made before a pass that may leave no memory.
    agreed = torch.zeros((), dtype=torch.int64, device=device)
    try:
        if run is not None:
            largest, count = run()
    except Exception as error:
        if not agree_on_failure:
            raise
        failure = error
    agreed.fill_(FAILED if failure else _octave(largest))
    works.all_reduce(agreed, group, dist.ReduceOp.MAX)
    try:
        if failure is not None:
            raise failure
    finally:
        failure = None  # its traceback refers to this frame
    octave = int(agreed)
    if octave == FAILED:
        return None
    known = octave not in (UNKNOWN, -UNKNOWN)
    return (octave if known else None), count


def safe_exponent(octave: int, reference_count: int) -> int:
    """The largest s at which 2^s / n0 times 2^octave stays two octaves below 65504."""
    return math.floor(math.log2(FP16_MAX / HEADROOM * reference_count)) - octave


def _octave(largest: float | None) -> int:
    """ceil(log2(largest)) as an integer, so that a MAX over ranks loses no NaN."""
    if largest is None or largest == 0:
        return UNKNOWN
    return math.ceil(math.log2(largest)) if math.isfinite(largest) else -UNKNOWN


def largest_gradient(
    model: nn.Module, loss: Loss, gradients_of: Callable[[Tensor], Mapping[str, Tensor]], growth: float
) -> Found:
    """Run `loss`, the forward pass on a micro-batch, and `gradients_of` its result.

    Returns the largest gradient of module outputs, and of parameters times `growth`, which is how many times
    larger those may be on the wire.
    """
    seen: list[Tensor] = []

    def watch(module: nn.Module, inputs: object, output: object) -> None:
        # A scalar is a loss, and losses are fp32.
        if isinstance(output, Tensor) and output.requires_grad and output.ndim:
            output.register_hook(  # type: ignore[no-untyped-call]
                lambda gradient: seen.append(gradient.detach().abs().amax())
            )

    with _widened(model), ExitStack() as hooks:
        for module in model.modules():
            hooks.callback(module.register_forward_hook(watch).remove)
        given = loss()
        loss_sum, count = given if isinstance(given, tuple) else (given, None)
        if count is not None:
            refuse_count(count)
        seen += [growth * g.float().abs().amax() for g in gradients_of(loss_sum).values()]
        largest = float(torch.stack([value.float() for value in seen]).amax()) if seen else 0.0
    return largest, count


@contextmanager
def _widened(model: nn.Module) -> Iterator[None]:
    """Hold half parameters as fp32 within the context, and restore the random state after it."""
    halves = [(p, p.data) for p in model.parameters() if p.dtype in HALF]
    devices = [torch.cuda.current_device()] if any(p.is_cuda for p in model.parameters()) else []
    with torch.random.fork_rng(devices):
        try:
            for p, half in halves:
                p.data = half.float()
            yield
        finally:
            for p, half in halves:
                p.data = half
