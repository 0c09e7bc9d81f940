"""Collects the gradients of one bucket from autograd, and copies them to the wire in one call.

Owns what a bucket's slots hold within a step: sums of micro-batches in fp32, zeros where nothing arrived. A
copy per parameter would cost a small network on a GPU more host time than communication does. In exchange the
gradients of a bucket stay alive until it is complete.
"""

from __future__ import annotations

import torch
from torch import Tensor

from launcher.engine.flat.layout import Run, Segment, Slot


class Inbox:
    """Receives the gradients of one run of `segment`; `factor`, a power of two, multiplies what is sent.

    `totals` is the segment's fp32 accumulator where a step has several micro-batches, else None.
    """

    def __init__(self, segment: Segment, run: Run, factor: float, totals: Tensor | None) -> None:
        self._factor = factor
        self._sent = segment.grad[run.start : run.end]
        self._totals = None if totals is None else totals[run.start : run.end]
        written = segment.grad if totals is None else totals
        self._places = {slot.index: slot.view(written) for slot in run.slots}
        self._held: dict[int, Tensor] = {}
        self._filled: set[int] = set()  # slots that hold a gradient of this step

    def take(self, slot: Slot, gradient: Tensor) -> None:
        """Hold a parameter's gradient. A second one is added to the first, in this order."""
        if slot.index in self._held:
            self.drain()
        self._held[slot.index] = _laid_out(gradient, slot)

    def drain(self) -> None:
        """Copy all held gradients to their places, and release them."""
        held, self._held = self._held, {}
        first = [index for index in held if index not in self._filled]
        again = [index for index in held if index in self._filled]
        self._filled.update(first)
        factor = self._factor if self._totals is None else 1.0
        if first:
            _write([self._places[i] for i in first], [held[i] for i in first], factor)
        if again:
            places, gradients = [self._places[i] for i in again], [held[i] for i in again]
            torch._foreach_add_(places, _exact(gradients, places[0].dtype), alpha=factor)

    def drop(self) -> None:
        """Release held gradients, after a backward pass that failed."""
        self._held = {}

    def complete(self) -> None:
        """Complete the message: sums of micro-batches rounded once, zeros where nothing arrived."""
        self.drain()
        missing = [place for index, place in self._places.items() if index not in self._filled]
        self._filled = set()
        if missing:
            torch._foreach_zero_(missing)
        if self._totals is not None:
            _write([self._sent], [self._totals], self._factor)


def _write(places: list[Tensor], gradients: list[Tensor], factor: float) -> None:
    """Write to the message or the totals, computed in fp32 and rounded once."""
    kept, given = places[0].dtype, gradients[0].dtype
    if factor == 1.0:
        torch._foreach_copy_(places, gradients)
    elif places[0].device.type == "cpu" and torch.promote_types(kept, given) == given:
        for place, gradient in zip(places, gradients, strict=True):  # one pass, rounded once at its end
            torch.mul(gradient, factor, out=place)
    elif torch.promote_types(kept, given) == kept:  # the copy rounds nothing
        torch._foreach_copy_(places, gradients)
        torch._foreach_mul_(places, factor)
    else:
        torch._foreach_copy_(places, torch._foreach_mul(_exact(gradients, kept), factor))


def _exact(gradients: list[Tensor], kept: torch.dtype) -> list[Tensor]:
    """In fp32, unless `kept` is their dtype: a product of halves would be rounded to half first."""
    return gradients if gradients[0].dtype == kept else [gradient.float() for gradient in gradients]


def _laid_out(gradient: Tensor, slot: Slot) -> Tensor:
    """With the slot's strides: torch may use other ones for a dimension of one element.

    On a GPU one kernel copies many gradients if all strides are equal; else each needs its own kernel.
    """
    own = gradient.stride()
    if own == slot.stride:
        return gradient
    sizes = zip(gradient.shape, own, slot.stride, strict=True)
    if any(size != 1 and stride != other for size, stride, other in sizes):
        return gradient
    return gradient.as_strided(slot.shape, slot.stride)
