"""Moves the gradients of one bucket from `p.grad` to the wire, in one call.

Owns what a bucket's slots hold within a step: sums of micro-batches in fp32, zeros where nothing arrived. A
copy per parameter would cost a small network on a GPU more host time than communication does. In exchange the
gradients of a bucket stay alive until it is complete.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from launcher.engine.errors import UnusableError
from launcher.engine.params.flat_buffers import Segment, Slot, SlotRun


class CopyIn:
    """Collects the gradients of one run of `segment`; `factor`, a power of two, multiplies what is sent.

    `parameters` by name. `totals` is the segment's fp32 accumulator where a step has several micro-batches,
    else None.
    """

    def __init__(
        self,
        segment: Segment,
        run: SlotRun,
        parameters: Mapping[str, nn.Parameter],
        factor: float,
        totals: Tensor | None,
    ) -> None:
        self._factor = factor
        self._sent = segment.grad[run.start : run.end]
        self._totals = None if totals is None else totals[run.start : run.end]
        written = segment.grad if totals is None else totals
        self._slots = [(slot, parameters[slot.name], slot.view(written)) for slot in run.slots]
        self._parameters = [parameter for _, parameter, _ in self._slots]
        self._places = [place for _, _, place in self._slots]
        # The message, which nothing reads before it is complete, takes further micro-batches as they are.
        lands = totals is not None and segment.grad.device.type != "cpu"
        self._landing = [slot.view(segment.grad) for slot in run.slots if lands]
        self._strides = [slot.stride for slot in run.slots]
        self._indices = {slot.index for slot in run.slots}
        self._filled: set[int] = set()  # slots that hold a gradient of this step
        self.unused: list[str] | None = None  # not empty, without a gradient in the first step; None before

    def drain(self) -> None:
        """Move all gradients to their places: added where the step has one there. `p.grad` is None then.

        Raises UnusableError for a sparse gradient.
        """
        if not self._filled and self._drain_usual():
            return
        first: tuple[list[Tensor], list[Tensor]] = ([], [])
        again: tuple[list[Tensor], list[Tensor]] = ([], [])
        for slot, parameter, place in self._slots:
            gradient = parameter.grad
            if gradient is None:
                continue
            refuse_sparse(slot.name, gradient)
            places, gradients = again if slot.index in self._filled else first
            places.append(place)
            gradients.append(gradient if gradient.stride() == slot.stride else _laid_out(gradient, slot))
            self._filled.add(slot.index)
            parameter.grad = None
        # Totals are multiplied once, when complete() rounds them.
        factor = self._factor if self._totals is None else 1.0
        if first[0]:
            _write(*first, factor)
        if again[0]:
            self._add(*again, factor)

    def _add(self, places: list[Tensor], gradients: list[Tensor], factor: float) -> None:
        """Add to what the step has at these places, computed in its dtype."""
        kept, given = places[0].dtype, gradients[0].dtype
        widens = self._landing and kept != given == self._sent.dtype
        if widens and self._totals is not None and len(gradients) == len(self._slots):
            torch._foreach_copy_(self._landing, gradients)
            self._totals.add_(self._sent)  # widens all of them in one kernel
        else:
            torch._foreach_add_(places, _exact(gradients, kept), alpha=factor)

    def _drain_usual(self) -> bool:
        """The first pass of a step, if all gradients are there as they are sent: a third of the time."""
        given = [parameter.grad for parameter in self._parameters]
        gradients = [gradient for gradient in given if gradient is not None]
        if len(gradients) < len(given) or any(g.layout != torch.strided for g in gradients):
            return False
        if [gradient.stride() for gradient in gradients] != self._strides:
            return False
        _write(self._places, gradients, self._factor if self._totals is None else 1.0)
        for parameter in self._parameters:
            parameter.grad = None
        self._filled |= self._indices
        return True

    def complete(self) -> None:
        """Complete the message: sums of micro-batches rounded once, zeros where nothing arrived.

        Drained before, within the backward pass: after it, `p.grad` is the user's.
        """
        if self.unused is None:
            missing = [slot for slot, _, _ in self._slots if slot.index not in self._filled]
            self.unused = [slot.name for slot in missing if slot.numel]
        if len(self._filled) < len(self._slots):
            torch._foreach_zero_([place for slot, _, place in self._slots if slot.index not in self._filled])
        self._filled.clear()
        if self._totals is not None:
            _write([self._sent], [self._totals], self._factor)

    def drop(self) -> None:
        """Forget what has arrived in this step; in place of `complete`."""
        self._filled.clear()


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
    """The gradients, in fp32 unless `kept` is their dtype: a product of halves would be rounded to half."""
    return gradients if gradients[0].dtype == kept else [gradient.float() for gradient in gradients]


def _laid_out(gradient: Tensor, slot: Slot) -> Tensor:
    """The gradient with the slot's strides: torch may use other ones for a dimension of one element.

    On a GPU one kernel copies many gradients if all strides are equal; else each needs its own kernel.
    """
    sizes = zip(gradient.shape, gradient.stride(), slot.stride, strict=True)
    if any(size != 1 and stride != other for size, stride, other in sizes):
        return gradient
    return gradient.as_strided(slot.shape, slot.stride)


def refuse_sparse(name: str, gradient: Tensor) -> None:
    """Raise UnusableError if the gradient of the parameter `name` is sparse."""
    if gradient.layout != torch.strided:
        raise UnusableError(
            f"the gradient of {name} is sparse; only dense gradients can be reduced. Build the embedding "
            "with sparse=False."
        )
