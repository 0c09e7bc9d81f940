"""The training state by name: everything that another process needs to resume bit for bit.

Owns the form of the state in memory. Names and fp32 values do not depend on the number of ranks,
sharding or the order of parameters, so a run may resume with different ones. Knows nothing of files.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, get_args

import torch
from torch import Tensor, nn

from launcher.engine.errors import UnusableError
from launcher.engine.limits import LARGEST_COUNT, a_reference_count, is_whole
from launcher.engine.names import named_buffers, named_parameters
from launcher.engine.precision.loss_scale import LossScale
from launcher.engine.precision.op_lists import HALF
from launcher.engine.precision.policy import ScaleMode

_TENSORS = ("weights", "optimizer", "buffers")
_PARTS = (*_TENSORS, "counters")
_NUMBERS = ("reference_count", "scale_mode")
Form = tuple[torch.Size, torch.dtype]
EXPECTED = "Give what Stepper.state_dict() returned."


@dataclass(frozen=True)
class EngineState:
    """The state of a Stepper: tensors by name, each with the shape of its parameter or buffer.

    `optimizer` has one entry per state and parameter, fp32 for our own optimizers: `exp_avg/fc.weight`.

    `weights` are fp32: masters (never rebuilt from half weights) and frozen parameters. Frozen parameters
    that are fp64 or not floating-point keep their dtype. `counters` are those of the loss scale:
    its exponent, growth and hysteresis trackers, applied and skipped steps.

    `as_dict()` can be saved with torch.save, and loaded with torch.load(weights_only=True) and `from_dict`.
    """

    weights: dict[str, Tensor]
    optimizer: dict[str, Tensor]
    buffers: dict[str, Tensor]
    counters: dict[str, int]
    reference_count: int | None = None  # n0; None before the first step, where it was not given
    scale_mode: ScaleMode | None = None  # how the loss scale moved; None where that is unknown

    def clone(self) -> EngineState:
        """A copy that later steps do not change."""
        copies: dict[str, Any] = {
            part: {name: tensor.detach().clone() for name, tensor in getattr(self, part).items()}
            for part in _TENSORS
        }
        return replace(self, counters=dict(self.counters), **copies)

    def as_dict(self) -> dict[str, object]:
        """The fields as a dict of dicts of the same tensors, of ints, a string and None."""
        return _copied(vars(self))

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> EngineState:
        """The state that `as_dict` was called on. Raises UnusableError for any other mapping."""
        check_dict(values)
        return cls(**_copied(values))


def _copied(values: Mapping[str, object]) -> dict[str, Any]:
    """The same values in new dicts; tensors are shared."""
    return {name: dict(value) if isinstance(value, Mapping) else value for name, value in values.items()}


def check_dict(values: Mapping[str, Any]) -> None:
    """Raise UnusableError unless `values` is the dict form of a state."""
    if not isinstance(values, Mapping):
        raise UnusableError(f"a state was given as a {type(values).__name__}. {EXPECTED}")
    missing = [name for name in _PARTS if name not in values]
    unknown = [str(name) for name in values if name not in (*_PARTS, *_NUMBERS)]
    if missing or unknown:
        raise UnusableError(
            f"this is not the state of a Stepper: {len(missing)} keys are missing ({', '.join(missing)}) and "
            f"{len(unknown)} are not known ({', '.join(unknown[:3])}). {EXPECTED}"
        )
    for part in _PARTS:
        kind = int if part == "counters" else Tensor
        if not isinstance(values[part], Mapping):
            raise UnusableError(f"{part} of a state is a {type(values[part]).__name__}. {EXPECTED}")
        for name, value in values[part].items():
            if not isinstance(value, kind):
                raise UnusableError(f"{part}/{name} of a state is a {type(value).__name__}. {EXPECTED}")


def check_numbers(state: EngineState) -> None:
    """Raise ValueError for counters no loss scale can have, and for an unknown mode or reference count."""
    check_names("counters of the loss scale", set(LossScale.FIELDS), set(state.counters))
    for name, value in state.counters.items():
        # The hysteresis tracker falls below 0 where overflows follow each other.
        signed = name in ("exponent", "hysteresis_tracker")
        if not is_whole(value) or abs(value) > LARGEST_COUNT or not (signed or value >= 0):
            raise ValueError(f"the state does not fit: its counter {name} is {value!r}.")
    if state.scale_mode not in (None, *get_args(ScaleMode)):
        raise ValueError(f"the state does not fit: its scale_mode is {state.scale_mode!r}.")
    if state.reference_count is not None:
        a_reference_count.require("the state's reference_count", state.reference_count)


def check_names(kind: str, expected: set[str], given: set[str]) -> None:
    """Raise ValueError unless a state holds exactly what this model and optimizer have."""
    missing, unknown = sorted(expected - given), sorted(map(str, given - expected))
    if missing or unknown:
        raise ValueError(
            f"the state does not fit: of the {kind}, {len(missing)} are missing ({', '.join(missing[:3])}) "
            f"and {len(unknown)} are not known here ({', '.join(unknown[:3])}). Build the model and the "
            "optimizer that the state was saved from."
        )


def check_model_state(model: nn.Module, state: EngineState) -> None:
    """Raise ValueError unless `state` has the weights and buffers of `model`: names, shapes and dtypes.

    Weights must be fp32, whatever dtype the model computes in. An fp32 buffer also accepts half values.
    """
    if not isinstance(state, EngineState):
        given = type(state).__name__
        raise UnusableError(
            f"load() takes what state() returned, not a {given}. load_state_dict() takes a dict."
        )
    check_dict(vars(state))
    weights = {
        name: (p.shape, torch.float32 if p.dtype in HALF else p.dtype)
        for name, p in named_parameters(model).items()
    }
    check_forms("weights", weights, state.weights)
    check_forms("buffers", forms_of(named_buffers(model)), state.buffers, widens=True)


def _has_values(value: object) -> bool:
    """Whether `value` is a dense tensor, which can be copied to any device; a Parameter is."""
    return (
        isinstance(value, Tensor) and value.layout == torch.strided and not (value.is_nested or value.is_meta)
    )


def forms_of(tensors: Mapping[str, Tensor]) -> dict[str, Form]:
    """What a state must have in their place."""
    return {name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()}


def check_forms(
    kind: str, expected: Mapping[str, Form], given: Mapping[str, Tensor], widens: bool = False
) -> None:
    """Raise ValueError for other names or dtypes, or for another shape, which copying might broadcast.

    `widens`: what is expected in fp32 may be half.
    """
    check_names(kind, set(expected), set(given))
    for name, (shape, dtype) in expected.items():
        found = given[name]
        if not _has_values(found):
            problem = f"is a {type(found).__name__}, and must be a dense tensor that has values"
        elif found.shape != shape:
            problem = f"has shape {tuple(found.shape)} in the state and {tuple(shape)} in the model"
        elif found.dtype != dtype and not (widens and dtype == torch.float32 and found.dtype in HALF):
            problem = f"is {found.dtype} in the state and must be {dtype}"
        else:
            continue
        raise ValueError(
            f"the state does not fit: of the {kind}, {name} {problem}. Build the model that the state was "
            "saved from, and give what Stepper.state() gave: masters are never rebuilt from half values."
        )
