"""Changes of the model made outside the engine: of its parameters, and of the values in their memory.

Owns two checks of each step. That the parameters are still views of the Stepper's flat memory takes 0.3 ms
for 1,000 of them; names are resolved only if something differs. Weights that were written in place (clamped,
loaded, renormalised by their module) are copied into the fp32 masters, of which half weights are rounded
copies, or the next update would undo the change.

torch counts a tensor's in-place changes in `_version`. The engine writes through its flat memory, which has a
separate counter (`VariableHooks::set_data` leaves that of the parameter unchanged), so a parameter's counter
counts changes made outside, and those of the engine that `count_update` adds. Only `refuse_unseen` waits for
the device.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import nn

import launcher.engine.works as works
from launcher.engine.errors import EngineWarning, UnusableError, listed
from launcher.engine.flat.layout import Layout
from launcher.engine.flat.names import named_parameters
from launcher.engine.wire.reducer import Reducer, is_lent, trained_parameters
from launcher.engine.wire.shards import Shards

LISTED, SHOWN = 3, 5  # changes and parameters named in a message; more would bury the rest

HOLDS_OTHERS = (
    "within WeightAverage.in_model() the model has the averages, not the weights that the Stepper trains: "
    "only forward passes are possible there. Build Steppers, train, save, load and update averages after it."
)


def refuse_lent(model: nn.Module) -> None:
    """Raise UnusableError within in_model(): another Stepper would take the averages for the weights."""
    if is_lent(model):
        raise UnusableError(HOLDS_OTHERS)


class Attachment:
    """Compares the model with how it was built: the same parameters, memory and requires_grad."""

    def __init__(self, model: nn.Module, layout: Layout, reducer: Reducer) -> None:
        self._model = model
        self._layout = layout
        self._reducer = reducer
        self._places = [  # views of the flat memory, in the order of layout.slots
            slot.view(segment.weight) for segment in layout.segments for slot in segment.slots
        ]
        self._trained = [layout.parameters[slot.name] for slot in layout.slots]
        self._accept()

    def check(self) -> None:
        """Raise UnusableError if any parameter is no longer the one in flat memory."""
        self.refuse_other_weights()
        if self._snapshot() == self._expected:
            return
        if found := list(self._differences()):
            raise UnusableError(
                f"the model has changed since this Stepper was built: {listed(found, LISTED, '; ')}. The "
                "Stepper trains only parameters in its flat memory. Cast, move, freeze, unfreeze or replace "
                "them before building it, or build another Stepper; set values by p.copy_() under no_grad()."
            )
        self._accept()  # harmless: torch.compile around a layer, memory that is now shared

    def refuse_other_weights(self) -> None:
        """Raise UnusableError where the model does not have the weights that this Stepper trains."""
        if self._reducer.closed:
            raise UnusableError(
                "a newer Stepper was built on this model, or on one with which it shares parameters, and now "
                "holds them. Use that one, and build one Stepper on a module that holds all."
            )
        if self._reducer.lent:
            raise UnusableError(HOLDS_OTHERS)

    def _accept(self) -> None:
        """Compare with the present model from now on."""
        modules = list(self._model.modules())
        self._frozen = [p for p in self._model.parameters() if not p.requires_grad]
        self._members = [d for m in modules for d in (m._parameters, m._modules)]
        self._kept = [list(members.values()) for members in self._members]  # keeps ids unique
        self._expected = self._snapshot()

    def _snapshot(self) -> tuple[list[object], ...]:
        return (
            [(p.data_ptr(), p.shape, p.requires_grad) for p in self._trained],
            [p.requires_grad for p in self._frozen],
            [id(member) for members in self._members for member in members.values()],
        )

    def _differences(self) -> Iterator[str]:
        """A description of each parameter that has changed."""
        present = named_parameters(self._model)
        names = {id(p): name for name, p in present.items()}
        for slot, p, place in zip(self._layout.slots, self._trained, self._places, strict=True):
            new = present.get(slot.name)
            if new is None:
                is_called = f"is called {names[id(p)]} now" if id(p) in names else "is no longer part of it"
                yield f"{slot.name} {is_called}"
            elif new.dtype != place.dtype:
                yield f"{slot.name} was cast from {place.dtype} to {new.dtype}"
            elif new.device != place.device:
                yield f"{slot.name} was moved from {place.device} to {new.device}"
            elif new.shape != place.shape:
                yield f"{slot.name} was given the shape {tuple(new.shape)} in place of {tuple(place.shape)}"
            elif new is not p:
                yield f"{slot.name} was replaced by another nn.Parameter"
            elif p.data_ptr() != place.data_ptr():
                yield (
                    f"{slot.name} was given other memory (p.data = ..., another memory format, or an RNN's "
                    "flatten_parameters())"
                )
            elif not p.requires_grad:
                yield f"{slot.name} was frozen"
        for name, p in present.items():
            if p.requires_grad and name not in self._layout.parameters:
                yield f"{name} was unfrozen or added"


class InPlaceChanges:
    """Detects writes to the model's weights since the last check, and copies them into the masters."""

    def __init__(self, model: nn.Module, layout: Layout, shards: Shards, group: works.Group) -> None:
        self._shards = shards
        self._group = group
        embeddings = [each for each in model.modules() if isinstance(each, nn.Embedding | nn.EmbeddingBag)]
        self._renormed = [embedding.weight for embedding in embeddings if embedding.max_norm is not None]
        self._trained = list(layout.parameters.values())
        self._watched = shards.rounded()
        self._parameters = [layout.parameters[slot.name] for _, slot in self._watched]
        frozen = named_parameters(model).items()
        self._frozen = {name: (p, p._version) for name, p in frozen if not p.requires_grad}
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
        for weight in self._renormed if self._group is not None else []:
            # The smallest magnitude of each element: max_norm only scales rows down.
            with torch.no_grad():
                smallest = weight.abs()
                works.all_reduce(smallest, self._group, dist.ReduceOp.MIN)
                weight.copy_(torch.copysign(smallest, weight))
        self._warn_of_frozen()
        updates = self._updates
        if [p._version - updates for p in self._parameters] == self._versions:
            return
        news = zip(self._watched, self._parameters, self._versions, strict=True)
        changed = [(*place, p) for place, p, version in news if p._version - updates != version]
        for segment, slot, _ in changed:
            self._shards.take_weights(segment, slot)
        self.forget()
        names = [slot.name for _, slot, p in changed if not any(p is weight for weight in self._renormed)]
        if names and not self._warned:
            self._warned = True
            warnings.warn(
                f"{listed(names, SHOWN)}: half weights were written in place since the last step; the "
                "masters now hold these rounded values. That is fine for clamping or initialising. To keep "
                "the fp32 values of a state, load it before building the Stepper, or with Stepper.load().",
                stacklevel=3,
            )

    def _warn_of_frozen(self) -> None:
        """Warn once of frozen parameters that have been written, as those of a teacher in the forward pass.

        Nothing restores or compares them, and half weights keep no fp32 copy of them.
        """
        written = [name for name, (p, version) in self._frozen.items() if p._version != version]
        if not written:
            return
        elsewhere = trained_parameters()  # by a Stepper of another part, which this one must not judge
        written = [name for name in written if id(self._frozen[name][0]) not in elsewhere]
        self._frozen = {} if written else {n: (p, p._version) for n, (p, _) in self._frozen.items()}
        if written:
            warnings.warn(
                f"{listed(written, SHOWN)}: frozen parameters were written in place. A skipped step does not "
                "undo that, ranks that write different values are not noticed, and half weights round small "
                "changes away. For an average of the weights use WeightAverage (average.decay). Write others "
                "after a step, alike on all ranks, under a policy with fp32 weights.",
                EngineWarning,
                stacklevel=4,
            )

    def refuse_unseen(self) -> None:
        """Raise UnusableError for weight changes that torch's counter missed. Waits for the device.

        A collective where the masters are sharded: all ranks raise, or none.
        """
        if not self._watched or not self._shards.any_rank(bool(self._shards.may_differ())):
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
