"""Timing of the parts of a step: marks on the device's clock, read after the step.

Owns the events on a CUDA stream (host clocks would measure only the queueing) and the host clock elsewhere.
Marking never waits for the device.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

PARTS = DATA, COMPUTE, COMMUNICATION, UPDATE = (
    "data",
    "compute",
    "communication",
    "update",
)  # of a step, in their order

Mark = tuple[str, Any]  # the part that ends here, and when: seconds, or on a GPU a torch.cuda.Event


class StepClock:
    """Splits a step into named parts: each mark ends the part that began at the mark before."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        # Called with each part's name when the host reaches its end, and with "" at the start of a step.
        self.on_mark: Callable[[str], None] | None = None
        self.restart()

    def restart(self) -> None:
        """Begin a step's first part now."""
        self._marks: list[Mark] = []
        self.mark("")

    def mark(self, part: str) -> None:
        """End the part of this name now."""
        if self.on_mark is not None:
            self.on_mark(part)
        now: Any = time.perf_counter()
        if self._on_gpu:
            now = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            now.record()
        self._marks.append((part, now))

    def take(self) -> list[Mark]:
        """The marks of the finished step, and begin the next step."""
        marks = self._marks
        self.restart()
        return marks


def spans_ms(marks: Sequence[Mark]) -> dict[str, float]:
    """Milliseconds by part of a finished step. On CUDA the device must have passed the last mark."""
    parts: dict[str, float] = {}
    for (_, start), (part, end) in itertools.pairwise(marks):
        taken_ms = 1e3 * (end - start) if isinstance(end, float) else start.elapsed_time(end)
        parts[part] = parts.get(part, 0.0) + taken_ms
    return parts
