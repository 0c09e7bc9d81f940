"""Moves the gradients of one bucket from `p.grad` to its message, in one call.

Owns what a bucket holds within a step: sums of micro-batches in fp32, zeros where nothing arrived. A copy per
parameter would cost a small network on a GPU more host time than communication does. In exchange the
gradients of a bucket stay alive until it is complete. Outside of a step's backward passes `p.grad` is the
user's: `grads_set_aside` keeps what is there.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from launcher.engine.errors import check_loss
from launcher.engine.params.flat_buffers import BucketRange, FlatBuffer, ParamRange


class CopyIn:
    """Collects the gradients of one bucket; `factor`, a power of two, multiplies what is sent.

    `parameters` by name. `sums`: fp32, as long as `flat_buffer`, where a step has several micro-batches.
    """

    def __init__(
        self,
        flat_buffer: FlatBuffer,
        bucket_range: BucketRange,
        parameters: Mapping[str, nn.Parameter],
        factor: float,
        sums: Tensor | None = None,
    ) -> None:
        self._flat_buffer, self._bucket_range = flat_buffer, bucket_range
        self._parameters, self._factor = parameters, factor
        self._filled: set[int] = set()  # parameters that hold a gradient of this step
        self.unused: list[str] | None = None  # not empty, without a gradient in the first step; None before
        self.add_up_in(sums)

    def add_up_in(self, sums: Tensor | None) -> None:
        """Add up micro-batches in these sums from the next step on, or, without them, have one per step."""
        bucket, params = slice(self._bucket_range.start, self._bucket_range.end), self._bucket_range.params
        self._message = self._flat_buffer.grad[bucket]
        self._sums = None if sums is None else sums[bucket]
        written = self._flat_buffer.grad if sums is None else sums
        self._params = [(param, self._parameters[param.name], param.view(written)) for param in params]

    def drain(self) -> None:
        """Move all gradients to their places: added where the step has one there. `p.grad` is None then."""
        # Places and their gradients: of parameters that have none in this step yet, and of those that have.
        first: tuple[list[Tensor], list[Tensor]] = ([], [])
        again: tuple[list[Tensor], list[Tensor]] = ([], [])
        filled = self._filled
        for param, parameter, place in self._params:
            gradient = parameter.grad
            if gradient is None:
                continue
            places, gradients = again if param.index in filled else first
            places.append(place)
            gradients.append(gradient if gradient.stride() == param.stride else _laid_out(gradient, param))
            filled.add(param.index)
            parameter.grad = None
        # Sums are multiplied once, when complete() rounds them.
        factor = self._factor if self._sums is None else 1.0
        if first[0]:
            _write(*first, factor)
        if again[0]:
            places, gradients = again
            torch._foreach_add_(places, _widened(gradients, places, places[0].dtype), alpha=factor)

    def complete(self) -> None:
        """Complete the message: sums of micro-batches rounded once, zeros where nothing arrived.

        Drained before, within the backward pass: after it, `p.grad` is the user's.
        """
        missing: list[tuple[ParamRange, Tensor]] = []
        if len(self._filled) < len(self._params):
            missing = [(param, place) for param, _, place in self._params if param.index not in self._filled]
            torch._foreach_zero_([place for _, place in missing])
        if self.unused is None:
            self.unused = [param.name for param, _ in missing if param.numel]
        self._filled.clear()
        if self._sums is not None:
            _write([self._message], [self._sums], self._factor)

    def drop(self) -> None:
        """Forget what has arrived in this step; in place of `complete`."""
        self._filled.clear()


def _write(places: list[Tensor], gradients: list[Tensor], factor: float) -> None:
    """Write to the message or the sums: multiplied in fp32, then rounded once."""
    if factor != 1.0:  # pre-divided
        gradients = list(torch._foreach_mul(_widened(gradients, places, torch.float32), factor))
    torch._foreach_copy_(places, gradients)


def _widened(gradients: list[Tensor], places: list[Tensor], exempt: torch.dtype) -> list[Tensor]:
    """The gradients in fp32, unless they have the `exempt` dtype: products of halves are rounded to half."""
    if gradients[0].dtype in (exempt, torch.float32):
        return gradients
    numels = [place.numel() for place in places]
    flat = torch.empty(sum(numels), dtype=torch.float32, device=places[0].device)
    parts = zip(torch.split(flat, numels), places, strict=True)
    wide = [part.as_strided(place.shape, place.stride()) for part, place in parts]
    torch._foreach_copy_(wide, gradients)  # one kernel for all of them
    return wide


def _laid_out(gradient: Tensor, param: ParamRange) -> Tensor:
    """The gradient with the parameter's strides: torch may use other ones for a dimension of one element.

    On a GPU one kernel copies many gradients if all strides are equal; else each needs its own kernel.
    """
    sizes = zip(gradient.shape, gradient.stride(), param.stride, strict=True)
    if any(size != 1 and stride != other for size, stride, other in sizes):
        return gradient
    return gradient.as_strided(param.shape, param.stride)


@contextmanager
def grads_set_aside(parameters: Collection[nn.Parameter]) -> Iterator[None]:
    """Set `p.grad` to None on entry, and restore it on exit.

    Gradients of a pass that raises are dropped; one that does not raise must remove its own.
    """
    held = [(p, grad) for p in parameters if (grad := p.grad) is not None]
    for p, _ in held:
        p.grad = None
    try:
        yield
    except BaseException:
        for p in parameters:
            p.grad = None
        raise
    finally:
        for p, grad in held:
            p.grad = grad


def dry_backward(parameters: Mapping[str, nn.Parameter], loss: Tensor, seed: Tensor) -> dict[str, Tensor]:
    """Gradients by name from a backward pass of `seed * loss` that is not part of a step.

    `seed`: fp32, 0-dim. Not with `autograd.grad`, under which re-entrant activation checkpointing refuses to
    run.
    """
    check_loss(loss, 0)
    with grads_set_aside(parameters.values()):
        loss.backward(seed)  # type: ignore[no-untyped-call]
        found = {name: p.grad for name, p in parameters.items() if p.grad is not None}
        for p in parameters.values():
            p.grad = None
    return {name: gradient for name, gradient in found.items() if gradient.numel()}
