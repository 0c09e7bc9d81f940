"""All that a training run is, by name: what must be kept for another process to go on bit for bit.

Owns the form of the state in memory. Names and fp32 values do not depend on the number of ranks, the wire,
sharding or the order of parameters, so a run may go on with others of these. Knows no files.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import get_args

import torch
from torch import Tensor

from launcher.engine.limits import LARGEST_COUNT, a_reference_count, is_whole
from launcher.engine.policy import ScaleMode
from launcher.engine.scale import LossScale


@dataclass(frozen=True)
class EngineState:
    """Tensors by name. `optimizer` has one entry per state and parameter: `exp_avg/fc.weight`.

    `weights` are fp32: masters (never rebuilt from half weights) and frozen parameters. `counters` are those
    of the loss scale: exponent, clean steps in a row, lives, applied and skipped steps.
    """

    weights: dict[str, Tensor]
    optimizer: dict[str, Tensor]
    buffers: dict[str, Tensor]
    counters: dict[str, int]
    reference_count: int | None = None  # n0; None before the first step, where it was not given
    scale_mode: ScaleMode | None = None  # how the loss scale moved; None where that is unknown

    def clone(self) -> EngineState:
        """A copy that later steps do not change."""
        return EngineState(
            {name: tensor.clone() for name, tensor in self.weights.items()},
            {name: tensor.clone() for name, tensor in self.optimizer.items()},
            {name: tensor.clone() for name, tensor in self.buffers.items()},
            dict(self.counters),
            self.reference_count,
            self.scale_mode,
        )


def counters_of(scale: LossScale) -> dict[str, int]:
    """The loss scale's counters by name. Waits for the device."""
    return dict(zip(LossScale.FIELDS, scale.state.tolist(), strict=True))


def refuse_numbers(state: EngineState) -> None:
    """Raise ValueError for counters that no loss scale has, and for an unknown mode or reference count."""
    refuse_other_names("counters of the loss scale", set(LossScale.FIELDS), set(state.counters))
    for name, value in state.counters.items():
        signed = name in ("exponent", "lives")
        if not is_whole(value) or abs(value) > LARGEST_COUNT or not (signed or value >= 0):
            raise ValueError(f"the state does not fit: its counter {name} is {value!r}.")
    if state.scale_mode not in (None, *get_args(ScaleMode)):
        raise ValueError(f"the state does not fit: its scale_mode is {state.scale_mode!r}.")
    if state.reference_count is not None:
        a_reference_count.require("the state's reference_count", state.reference_count)


def refuse_other_names(kind: str, expected: set[str], given: set[str]) -> None:
    """Raise ValueError unless a state holds exactly what this model and optimizer have."""
    missing, unknown = sorted(expected - given), sorted(given - expected)
    if missing or unknown:
        raise ValueError(
            f"the state does not fit: of the {kind}, {len(missing)} are missing ({', '.join(missing[:3])}) "
            f"and {len(unknown)} are not known here ({', '.join(unknown[:3])}). Build the model and the "
            "optimizer that the state was saved from."
        )


def refuse_misfits(kind: str, expected: Mapping[str, torch.Size], given: Mapping[str, Tensor]) -> None:
    """The same for names, and for tensors of another shape: copying might stretch them unseen."""
    refuse_other_names(kind, set(expected), set(given))
    for name, shape in expected.items():
        if given[name].shape != shape:
            raise ValueError(
                f"the state does not fit: of the {kind}, {name} has shape {tuple(given[name].shape)} in the "
                f"state and {tuple(shape)} in the model. Build the model that the state was saved from."
            )
