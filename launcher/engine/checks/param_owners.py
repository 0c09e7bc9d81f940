"""Which Stepper trains which parameters: one at a time.

Owns the list of living owners in this process. A Stepper takes the parameters of its model when it is built,
from an older one too, as where a notebook cell is run again.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable

from torch import nn

import launcher.engine.async_work as async_work
from launcher.engine.errors import UnusableError

SWAPPED = (
    "within ExponentialMovingAverage.in_model() the model has the averages, not the weights that the Stepper "
    "trains: only forward passes are possible there. Build Steppers, train, save, load and update averages "
    "after it."
)


class ParamOwner:
    """A Stepper's claim on `parameters`, whose gradients are sent over `group`.

    `release` is called when a newer Stepper takes one of them.
    """

    def __init__(
        self, parameters: Iterable[nn.Parameter], group: async_work.Group, release: Callable[[], None]
    ) -> None:
        self._parameters, self._group, self._release = list(parameters), group, release
        self._taken = False
        self.weights_swapped = False  # the parameters hold other weights than those that are trained
        own = self.ids()
        for older in list(_OWNERS):
            if not own.isdisjoint(older.ids()):
                older._taken = True
                older._release()
                _OWNERS.discard(older)
        _OWNERS.add(self)

    def ids(self) -> set[int]:
        """The ids of the parameters: a weak reference to a parameter would forbid swapping it."""
        return set(map(id, self._parameters))

    def shares_group(self) -> bool:
        """Whether the gradients of another network are sent over the same process group."""
        if self._group is None or len(_OWNERS) == 1:  # usual; a walk through a WeakSet costs 3 us
            return False
        return any(other._group is self._group for other in _OWNERS if other is not self)

    def check(self) -> None:
        """Raise UnusableError where the model does not have the weights that this Stepper trains."""
        if self._taken:
            raise UnusableError(
                "a newer Stepper was built on this model, or on one with which it shares parameters, and now "
                "holds them. Use that one, and build one Stepper on a module that holds all."
            )
        if self.weights_swapped:
            raise UnusableError(SWAPPED)


_OWNERS: weakref.WeakSet[ParamOwner] = weakref.WeakSet()


def check_not_swapped(model: nn.Module) -> None:
    """Raise UnusableError within in_model(): another Stepper would take the averages for the weights."""
    own = set(map(id, model.parameters()))
    if any(owner.weights_swapped and not own.isdisjoint(owner.ids()) for owner in _OWNERS):
        raise UnusableError(SWAPPED)


def trained_parameters() -> set[int]:
    """The ids of all parameters that a living Stepper trains."""
    return {each for owner in _OWNERS for each in owner.ids()}
