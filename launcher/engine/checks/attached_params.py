"""Changes of the model between steps that the Stepper did not make: of its parameters, and of their values.

Owns two checks. `AttachedParams`: the parameters must still be those in the Stepper's flat memory, or it
would train memory that the model no longer uses. `InPlaceWrites`: half weights that were written in place
(clamped, loaded, renormalised) are copied into their fp32 masters, or the next update would undo the change.
Neither waits for the device.

torch counts a tensor's in-place changes in `_version`. The engine writes through its flat memory, which has a
separate counter (`VariableHooks::set_data` leaves that of the parameter unchanged), so a parameter's counter
counts changes made outside, and those of the engine that `count_update` adds. A change through `p.data` is
counted nowhere.
"""

from __future__ import annotations

import warnings

import torch
from torch import Tensor, nn

from launcher.engine.checks.param_owners import ParamOwner, trained_parameters
from launcher.engine.errors import EngineWarning, UnusableError, listed
from launcher.engine.grads.zero1 import Zero1
from launcher.engine.names import named_parameters
from launcher.engine.params.flat_params import Layout

SHOWN = 5  # parameters named in a message; more would bury the rest


class AttachedParams:
    """Compares the model's parameters with those with which the Stepper was built."""

    def __init__(self, model: nn.Module, layout: Layout, owner: ParamOwner) -> None:
        self._model, self._owner = model, owner
        places = {  # views of the flat memory, in which trained parameters must still be
            layout.parameters[param.name]: param.view(flat_buffer.weight)
            for flat_buffer in layout.flat_buffers
            for param in flat_buffer.params
        }
        self._built = [(p, places.get(p)) for p in model.parameters()]
        self._accept()

    def _accept(self) -> None:
        """Compare with the present modules from now on."""
        self._members = [d for module in self._model.modules() for d in (module._parameters, module._modules)]
        self._kept = [list(members.values()) for members in self._members]  # or another could have their ids
        self._expected = self._fingerprint()

    def _fingerprint(self) -> tuple[list[object], list[int]]:
        """What no change leaves as it is: 0.3 us per parameter, where a walk over the model takes 3."""
        return (
            [(p.data_ptr(), p.shape, p.requires_grad) for p, _ in self._built],
            [id(member) for members in self._members for member in members.values()],
        )

    def check(self) -> None:
        """Raise UnusableError if a parameter is no longer the one in flat memory."""
        self._owner.check()
        if self._fingerprint() == self._expected:
            return
        present = list(self._model.parameters())
        same = len(present) == len(self._built) and all(
            p is built and _is_in(place, p) for p, (built, place) in zip(present, self._built, strict=True)
        )
        if not same:
            raise UnusableError(
                "the model has changed since its training began: parameters "
                f"{listed(self._changed(), SHOWN)} were cast, moved, frozen, unfrozen, replaced, added or "
                "removed. Those that it had are trained, in flat memory: change them before, in a recipe "
                "within build_model, in a loop of your own before its Stepper is built. To unfreeze a part "
                "later, start a second run from the weights of the first; in a loop of your own, build "
                "another Stepper. Set values by p.copy_() under torch.no_grad()."
            )
        self._accept()  # a harmless change, such as torch.compile around a layer

    def _changed(self) -> list[str]:
        """The names of present parameters that are not as they were; of removed ones how many there are."""
        places = dict(self._built)
        named = named_parameters(self._model)
        changed = [n for n, p in named.items() if p not in places or not _is_in(places[p], p)]
        gone = len(self._built) - sum(p in places for p in named.values())
        return changed + ([f"{gone} that are gone"] if gone else [])


def _is_in(place: Tensor | None, p: nn.Parameter) -> bool:
    """Whether `p` is that part of the flat memory; None: whether it is frozen."""
    if place is None:
        return not p.requires_grad
    same = p.data_ptr() == place.data_ptr() and p.dtype == place.dtype and p.shape == place.shape
    return same and p.requires_grad and p.device == place.device


class InPlaceWrites:
    """Detects writes to the model's weights since the last check, and copies them into the masters."""

    def __init__(self, model: nn.Module, layout: Layout, zero1: Zero1) -> None:
        self._zero1 = zero1
        self._trained = list(layout.parameters.values())
        self._watched = zero1.rounded()
        self._parameters = [layout.parameters[param.name] for _, param in self._watched]
        frozen = named_parameters(model).items()
        self._frozen = {name: (p, p._version) for name, p in frozen if not p.requires_grad}
        self._warned = False
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

    def reload_model_params(self) -> None:
        """Copy each changed weight into its master, unless that still rounds to it."""
        self._warn_of_frozen()
        updates = self._updates
        if [p._version - updates for p in self._parameters] == self._versions:
            return
        news = zip(self._watched, self._parameters, self._versions, strict=True)
        changed = [place for place, p, version in news if p._version - updates != version]
        for flat_buffer, param in changed:
            self._zero1.take_weights(flat_buffer, param)
        self.forget()
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"{listed([each.name for _, each in changed], SHOWN)}: half weights were written in place "
                "since the last step; the masters now hold these rounded values. That is fine for clamping, "
                "initialising and max_norm. To keep the fp32 values of a state, load it before building the "
                "Stepper, or with Stepper.load().",
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
                f"{listed(written, SHOWN)}: frozen parameters were written in place. A skipped step does "
                "not undo that, ranks that write different values are not noticed, and half weights round "
                "small changes away. For an average of the weights use ema.decay (ExponentialMovingAverage). "
                "Write others after a step, alike on all ranks, with fp32 weights (precision=amp_fp16).",
                EngineWarning,
                stacklevel=4,
            )
