"""Checks that the model's parameters are still views of the Stepper's flat memory.

Owns the check, once per step, and the error that lists the changes. The check takes 0.3 ms for 1,000
parameters; names are resolved only if something differs.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor, nn

from launcher.engine.errors import UnusableError, listed
from launcher.engine.flat.layout import Layout
from launcher.engine.flat.names import named_parameters
from launcher.engine.wire.reducer import Reducer, is_lent

SHOWN = 3  # parameters named in an error; more would bury the rest

TAKEN_OVER = (
    "a newer Stepper was built on this model, or on one with which it shares parameters, and now holds them: "
    "only the newer one can train them. Use that one, and build one Stepper on a module that holds all."
)
HOLDS_OTHERS = (
    "within WeightAverage.in_model() the model has the averages, not the weights that the Stepper trains: "
    "only forward passes are possible there. Build Steppers, train, save, load and update averages after the "
    "context."
)
DETACHED = (
    "the model has changed since this Stepper was built: {found}. The Stepper trains only parameters in "
    "its flat memory. Cast, move, freeze, unfreeze or replace parameters before building the "
    "Stepper; set values with p.copy_() under torch.no_grad() or with load(). To train the model as it is "
    "now, build another Stepper on it."
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
            raise UnusableError(DETACHED.format(found=listed(found, SHOWN, "; ")))
        self._accept()  # harmless: torch.compile around a layer, memory that is now shared

    def refuse_other_weights(self) -> None:
        """Raise UnusableError where the model does not have the weights that this Stepper trains."""
        if self._reducer.closed:
            raise UnusableError(TAKEN_OVER)
        if self._reducer.lent:
            raise UnusableError(HOLDS_OTHERS)

    @contextmanager
    def holding_others(self) -> Iterator[None]:
        """The context within which the flat memory holds other weights than the rounded masters."""
        self.refuse_other_weights()
        self._reducer.lent = True
        try:
            yield
        finally:
            self._reducer.lent = False

    def _accept(self) -> None:
        """Compare with the present model from now on."""
        modules = list(self._model.modules())
        self._frozen = [p for p in self._model.parameters() if not p.requires_grad]
        self._members = [d for m in modules for d in (m._parameters, m._modules)]
        self._kept = [list(members.values()) for members in self._members]  # keeps ids unique
        self._expected = self._snapshot()

    def _snapshot(self) -> tuple[list[object], ...]:
        return (
            [p.data_ptr() for p in self._trained],
            [p.shape for p in self._trained],
            [p.requires_grad for p in self._trained],
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
            elif changed := _changed(new, place):
                yield f"{slot.name} {changed}"
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


def _changed(p: Tensor, place: Tensor) -> str:
    """Why `p` cannot be a view of `place`; empty if it can."""
    if p.dtype != place.dtype:
        return f"was cast from {place.dtype} to {p.dtype}"
    if p.device != place.device:
        return f"was moved from {place.device} to {p.device}"
    if p.shape != place.shape:
        return f"was given the shape {tuple(p.shape)} in place of {tuple(place.shape)}"
    return ""
