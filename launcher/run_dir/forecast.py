"""The content of `plan.json`: what `plan` foretold of a run, in the directory that it named for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

PLAN = "plan.json"


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """Numbers of one rank, as result.json and metrics.jsonl have them of the run itself."""

    steps: int
    parameters: int  # elements of the model
    step_ms: float | None = None  # None: not measured, or over links whose rates are not known
    wire_bytes_per_step: float  # that a rank sends
    state_bytes: float  # of weights, masters, gradients and optimizer
    memory_bytes: float  # the peak of a step
    checkpoint_bytes: int
    world_size: int | None = None
    config: Mapping[str, str]  # by dotted key: what it was computed for
