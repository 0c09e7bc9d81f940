"""In-place changes of weights made outside the engine: clamped, loaded, renormalised by their module.

Half weights are rounded copies of fp32 masters, so a change must be copied into the masters, or the next
update would undo it. torch counts a tensor's in-place changes in `_version`. The engine writes through its
flat memory, which has a separate counter (`VariableHooks::set_data` leaves that of the parameter unchanged),
so a parameter's counter counts changes made outside, and those of the engine that `count_update` adds. Only
`refuse_unseen` waits for the device.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

import launcher.engine.works as works
from launcher.engine.errors import UnusableError, listed
from launcher.engine.flat.layout import Layout
from launcher.engine.wire.shards import Shards

SHOWN = 5  # parameters named in a message; more would bury the rest


class InPlaceChanges:
    """Detects writes to the model's weights since the last check, and copies them into the masters."""

    def __init__(
        self, model: nn.Module, layout: Layout, shards: Shards, group: dist.ProcessGroup | None
    ) -> None:
        self._shards = shards
        self._group = group
        self._renormed = [
            module.weight
            for module in model.modules()
            if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.max_norm is not None
        ]
        self._trained = list(layout.parameters.values())
        self._watched = shards.rounded()
        self._parameters = [layout.parameters[slot.name] for _, slot in self._watched]
        self._warned = False
        self.forget()

    def forget(self) -> None:
        """Ignore changes up to now: the masters were set together with the weights."""
        self._versions = [p._version for p in self._parameters]
        self._updates = 0  # of the engine since then

    def count_update(self) -> None:
        """The engine has written all weights: autograd refuses the backward pass of a graph recorded before.

        As after a step of torch.optim. One call for all parameters: 0.1 us for each.
        """
        torch.autograd.graph.increment_version(self._trained)
        self._updates += 1

    def take(self) -> None:
        """Copy each changed weight into its master, unless that still rounds to it.

        A collective for a model with Embedding(max_norm=...): each rank has scaled the rows of its own
        samples, and every rank applies the scaling of all.
        """
        if self._group is not None:
            for weight in self._renormed:
                _agree_on_scaled_rows(weight, self._group)
        updates = self._updates
        if [p._version - updates for p in self._parameters] == self._versions:
            return
        news = zip(self._watched, self._parameters, self._versions, strict=True)
        changed = [(*place, p) for place, p, version in news if p._version - updates != version]
        for segment, slot, _ in changed:
            self._shards.take_weights(segment, slot)
        self.forget()
        self._warn([slot.name for _, slot, p in changed if not any(p is weight for weight in self._renormed)])

    def refuse_unseen(self) -> None:
        """Raise UnusableError for weight changes that torch's counter missed. Waits for the device.

        A collective where the masters are sharded: all ranks raise, or none.
        """
        if not self._watched:
            return
        unseen = torch.stack([self._shards.differs(*place) for place in self._watched]).int()
        if self._shards.sharded:
            works.all_reduce(unseen, self._group, dist.ReduceOp.MAX)
        names = [self._watched[index][1].name for index in unseen.nonzero().flatten().tolist()]
        if names:
            raise UnusableError(
                f"{listed(names, SHOWN)}: the weights differ from their rounded fp32 masters. They were "
                "changed through `.data`, which step() cannot detect: the next update undoes it. Change them "
                "in place under torch.no_grad() (`p.clamp_(-1, 1)`, not `p.data.clamp_(-1, 1)`)."
            )

    def _warn(self, names: Sequence[str]) -> None:
        if names and not self._warned:
            self._warned = True
            warnings.warn(
                f"{listed(names, SHOWN)}: half weights were written in place since the last step; the "
                "masters now hold these rounded values. That is fine for clamping or initialising. A "
                "checkpoint loses its fp32 precision this way: load it before building the Stepper, or with "
                "Stepper.load().",
                stacklevel=4,
            )


def _agree_on_scaled_rows(weight: Tensor, group: dist.ProcessGroup) -> None:
    """Take the smallest magnitude of each element over the ranks: max_norm only scales rows down."""
    with torch.no_grad():
        smallest = weight.abs()
        works.all_reduce(smallest, group, dist.ReduceOp.MIN)
        weight.copy_(torch.copysign(smallest, weight))
