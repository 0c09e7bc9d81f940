"""Changes of the model between steps that the Stepper did not make: of its parameters, and of their values.

Owns two checks. `AttachedParams`: the parameters must still be those in the Stepper's flat memory, or it
would train memory that the model no longer uses. `InPlaceWrites`: half weights that were written in place
(clamped, loaded, renormalised) are copied into their fp32 masters, or the next update would undo the change.
Neither waits for the device.

torch counts a tensor's in-place changes in `_version`. The engine writes through its flat memory, which has a
separate counter (`VariableHooks::set_data` leaves that of the parameter unchanged), so a parameter's counter
counts changes made outside, and those of the engine that `count_update` adds.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from launcher.engine.checks.step_warnings import warn
from launcher.engine.errors import UnusableError, listed
from launcher.engine.grads.zero1 import Zero1
from launcher.engine.names import named_parameters
from launcher.engine.params.flat_buffers import FlatBuffer, ParamRange
from launcher.engine.params.flat_params import Layout

SHOWN = 5  # parameters named in a message; more would bury the rest


class AttachedParams:
    """Compares the model's parameters with those with which the Stepper was built.

    A parameter or layer that is put in the place of another one is not noticed, as with torch.optim.
    """

    def __init__(self, model: nn.Module) -> None:
        self._parameters = named_parameters(model)
        self._built = self._fingerprint()
        self._frozen = {n: (p, p._version) for n, p in self._parameters.items() if not p.requires_grad}
        self.weights_swapped = False  # whether the model has the averages of ExponentialMovingAverage

    def _fingerprint(self) -> list[int | None]:
        return [p.data_ptr() if p.requires_grad else None for p in self._parameters.values()]

    def check(self) -> None:
        """Raise UnusableError if a parameter is no longer the one in flat memory. 0.2 us per parameter."""
        if self.weights_swapped:
            raise UnusableError(
                "within ExponentialMovingAverage.in_model() the model has the averages: train, save and load "
                "outside of it."
            )
        self._warn_of_frozen()
        present = self._fingerprint()
        if present == self._built:
            return
        pairs = zip(self._parameters, self._built, present, strict=True)
        changed = [name for name, built, now in pairs if now != built]
        raise UnusableError(
            f"the model has changed since its training began: parameters {listed(changed, SHOWN)} were cast, "
            "moved, frozen, unfrozen, or taken by a newer Stepper. Those that it had are trained, in flat "
            "memory: change them before, in a recipe within build_model, in a loop of your own before its "
            "Stepper is built. To unfreeze a part later, start a second run from the weights of the first; "
            "in a loop of your own, build another Stepper. Set values by p.copy_() under torch.no_grad()."
        )

    def _warn_of_frozen(self) -> None:
        """Warn once of frozen parameters that were written, as those of a teacher in the forward pass."""
        # One in the flat memory of another Stepper, which trains that part of the model, is left out.
        written = [
            name
            for name, (p, version) in self._frozen.items()
            if p._version != version and p.untyped_storage().nbytes() == p.nbytes
        ]
        if not written:
            return
        self._frozen = {}
        warn(
            f"{listed(written, SHOWN)}: frozen parameters were written in place. A skipped step does not "
            "undo that, ranks that write different values are not noticed, and half weights round small "
            "changes away. For an average of the weights use ema.decay (ExponentialMovingAverage). Write "
            "others after a step, alike on all ranks, with fp32 weights (precision=amp_fp16)."
        )


class InPlaceWrites:
    """Detects writes to the model's weights since the last check, and copies them into the masters."""

    def __init__(self, layout: Layout, zero1: Zero1) -> None:
        self._zero1 = zero1
        self._trained = list(layout.parameters.values())
        self._watched = zero1.params_with_masters()
        self._parameters = [layout.parameters[param.name] for _, param in self._watched]
        self.forget()

    def forget(self) -> None:
        """Ignore changes up to now: the masters were set together with the weights."""
        self._versions = [p._version for p in self._parameters]
        self._updates = 0  # of the engine since then

    def count_update(self) -> None:
        """The engine has written all weights: autograd refuses the backward pass of a graph from before.

        As after a step of torch.optim. One call for all parameters: 0.1 us for each.
        """
        torch.autograd.graph.increment_version(self._trained)
        self._updates += 1

    def changed(self) -> list[tuple[FlatBuffer, ParamRange]]:
        """The parameters that were written since the last check."""
        updates = self._updates
        if [p._version - updates for p in self._parameters] == self._versions:
            return []
        news = zip(self._watched, self._parameters, self._versions, strict=True)
        return [place for place, p, version in news if p._version - updates != version]

    def reload_model_params(self, changed: Sequence[tuple[FlatBuffer, ParamRange]]) -> None:
        """Copy each `changed` weight into its master, unless that still rounds to it."""
        for flat_buffer, param in changed:
            self._zero1.masters_from_weights(flat_buffer, param)
        self.forget()
