"""The training state by name: everything that another process needs to resume bit for bit.

Owns the form of the state in memory. Names and fp32 values do not depend on the number of ranks,
sharding or the order of parameters, so a run may resume with different ones. Knows nothing of files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from launcher.engine.names import named_buffers, named_parameters
from launcher.engine.precision.op_lists import HALF
from launcher.engine.precision.policy import ScaleMode

Form = tuple[torch.Size, torch.dtype]


class LazyTensors(Mapping[str, Tensor]):
    """Tensors by name, each made anew when it is asked for, so that they are never in memory together.

    Where another rank sends them that is a collective: all ranks ask for the same ones in one order.
    """

    def __init__(self, forms: Mapping[str, Form], make: Callable[[str], Tensor]) -> None:
        self.forms, self._make = forms, make

    def __getitem__(self, name: str) -> Tensor:
        return self._make(name)

    def __contains__(self, name: object) -> bool:
        return name in self.forms

    def __iter__(self) -> Iterator[str]:
        return iter(self.forms)

    def __len__(self) -> int:
        return len(self.forms)


@dataclass(frozen=True)
class EngineState:
    """The state of a Stepper: tensors by name, each with the shape of its parameter or buffer.

    `optimizer` has one entry per state and parameter, fp32 for our own optimizers: `exp_avg/fc.weight`.

    `weights` are fp32: masters (never rebuilt from half weights) and frozen parameters. Frozen parameters
    that are fp64 or not floating-point keep their dtype. `counters` are those of the loss scale:
    its exponent, growth and hysteresis trackers, applied and skipped steps.

    Its fields are mappings, ints, a string and None, as Stepper.state_dict() has them.
    """

    weights: Mapping[str, Tensor]
    optimizer: Mapping[str, Tensor]
    buffers: dict[str, Tensor]
    counters: dict[str, int]
    reference_count: int | None = None  # n0; None before the first step, where it was not given
    scale_mode: ScaleMode | None = None  # how the loss scale moved; None where that is unknown
    outliers: dict[str, list[float]] | None = None  # what outliers are measured by; None: none are skipped

    def clone(self) -> EngineState:
        """A copy that later steps do not change."""
        copies: dict[str, Any] = {
            part: {name: tensor.detach().clone() for name, tensor in getattr(self, part).items()}
            for part in ("weights", "optimizer", "buffers")
        }
        return replace(self, counters=dict(self.counters), **copies)


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
    weights = {
        name: (p.shape, torch.float32 if p.dtype in HALF else p.dtype)
        for name, p in named_parameters(model).items()
    }
    check_forms("weights", weights, state.weights)
    check_forms("buffers", forms_of(named_buffers(model)), state.buffers, widens=True)


def forms_of(tensors: Mapping[str, Tensor]) -> dict[str, Form]:
    """What a state must have in their place."""
    if isinstance(tensors, LazyTensors):
        return dict(tensors.forms)
    return {name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()}


def check_forms(
    kind: str, expected: Mapping[str, Form], given: Mapping[str, Tensor], widens: bool = False
) -> None:
    """Raise ValueError for other names or dtypes, or for another shape, which copying might broadcast.

    `widens`: what is expected in fp32 may be half.
    """
    check_names(kind, set(expected), set(given))
    found = forms_of(given)
    for name, (shape, dtype) in expected.items():
        its_shape, its_dtype = found[name]
        if its_shape != shape:
            problem = f"has shape {tuple(its_shape)} in the state and {tuple(shape)} in the model"
        elif its_dtype != dtype and not (widens and dtype == torch.float32 and its_dtype in HALF):
            problem = f"is {its_dtype} in the state and must be {dtype}"
        elif not isinstance(given, LazyTensors) and given[name].is_meta:
            problem = "has no values"
        else:
            continue
        raise ValueError(
            f"the state does not fit: of the {kind}, {name} {problem}. Build the model that the state was "
            "saved from, and give what Stepper.state() gave: masters are never rebuilt from half values."
        )
