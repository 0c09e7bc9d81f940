"""The bottleneck of a step, in one sentence with advice.

Owns the averages over a run's `step` events and the verdict. Reads no clock and prints nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from launcher.distributed.heartbeat import STEP_PARTS
from launcher.errors import counted
from launcher.telemetry.events import EndEvent
from launcher.telemetry.formatting import percent

PARTS = tuple(f"{part}_ms" for part in STEP_PARTS)
TIMES = ("step_ms", *PARTS)
TITLES = {
    "data_ms": "waiting for data",
    "compute_ms": "forward and backward",
    "communication_ms": "gradient communication",
    "update_ms": "update",
}
OVERHEAD = "overhead"
# A part with this share is reported, even where computing takes longer: without it 1.4 times as fast
LIMIT = 0.3
FEW_STEPS = 5  # with fewer measured ones nothing is said of the time: one slow step would decide
OVERHEAD_LIMIT = 0.4  # from here on twice the batch takes at least a fifth less time per sample
# Of a step: with this share of waiting ranks the slowest one is named. Equal ranks wait less.
OTHERS_WAIT = 0.1
LEAST_GAIN = 1.05  # from here on unequal shares are advised, and made by data.share=auto

ADVICE = {
    "data_ms": (
        "input-bound: {share} of the step{of} waits for data: raise data.num_workers (sets that are not in "
        "memory), make the data set's transform cheaper, or raise data.batch_size"
    ),
    "communication_ms": (
        "communication-bound: {share} of the step{of} waits for the exchange of gradients: "
        "raise data.batch_size, or use fewer ranks"
    ),
    "update_ms": "update-bound: {share} of the step{of} updates the weights: raise data.batch_size",
    "compute_ms": (
        "compute-bound: {share} of the step{of} is forward and backward: use more or faster devices (on a "
        "GPU also train.compile=true)"
    ),
    OVERHEAD: (
        "overhead-bound: {share} of the step{of} is work of the host that does not depend on the size of the "
        "batch: raise data.batch_size (on a GPU also train.compile=true)"
    ),
}


@dataclass(frozen=True)
class TimeShares:
    """Average milliseconds of a step and of its parts, over `num_steps` steps.

    `rank` is the one that the times are of, given where the others wait for it.
    """

    num_steps: int
    step_ms: float
    parts_ms: dict[str, float]
    rank: int | None = field(default=None, kw_only=True)
    auto_share_gain: float = field(default=1.0, kw_only=True)  # as in StepTime

    def share(self, part: str) -> float:
        return self.parts_ms[part] / self.step_ms

    @property
    def other_ms(self) -> float:
        """What is in none of the parts: logs, votes, checks, and whatever else the host does between them."""
        return max(0.0, self.step_ms - math.fsum(self.parts_ms.values()))

    @property
    def overhead_share(self) -> float:
        """The share of the step that is no waiting and would not be shorter with fewer samples."""
        return self.other_ms / self.step_ms

    @property
    def bound(self) -> str:
        """The largest of data, communication, update and overhead that reaches its limit, else compute."""
        others = (part for part in PARTS if part != "compute_ms")
        large = {part: share for part in others if (share := self.share(part)) >= LIMIT}
        if self.overhead_share >= OVERHEAD_LIMIT:
            large[OVERHEAD] = self.overhead_share
        return max(large, key=large.__getitem__, default="compute_ms")

    @property
    def verdict(self) -> str:
        """What bounds the step, and what to change."""
        if self.num_steps < FEW_STEPS:
            few = counted(self.num_steps, "step")
            return f"unknown: {few} measured, and {FEW_STEPS} are needed to say what bounds one"
        bound = self.bound
        share = self.overhead_share if bound == OVERHEAD else self.share(bound)
        of = "" if self.rank is None else f" of rank {self.rank}, for which the others wait,"
        text = ADVICE[bound].format(share=percent(share), of=of)
        if self.rank is None or self.auto_share_gain < LEAST_GAIN:
            return text
        return f"{text}. With data.share=auto a step would be {self.auto_share_gain:.2f} times as fast"


class TimeTotals:
    """Averages over `step` events in order, each weighted by its number of steps.

    Events without all parts are left out. The first of several is ignored, because it contains compilation
    and the first touch of memory.
    """

    def __init__(self) -> None:
        self._first: tuple[float, list[float]] | None = None  # steps and averages of the first event
        self._steps = 0.0  # after the first event
        self._sums = [0.0] * len(TIMES)
        self._last_step = 0.0

    def add(self, event: Mapping[str, Any]) -> bool:
        """Add an event, as metrics.jsonl has it; whether it has all times."""
        times = [ms for key in TIMES if isinstance(ms := event.get(key), int | float) and _is_time(ms)]
        if len(times) < len(TIMES):
            return False
        steps = max(1.0, event["step"] - self._last_step)
        self._last_step = event["step"]
        if self._first is None:
            self._first = steps, times
        else:
            self._steps += steps
            self._sums = [total + steps * ms for total, ms in zip(self._sums, times, strict=True)]
        return True

    def shares(self) -> TimeShares | None:
        """The averages; None where no event has the parts. Those of the first count only if it is alone."""
        if self._first is None:
            return None
        steps, averages = self._first
        if self._steps:
            steps, averages = self._steps, [total / self._steps for total in self._sums]
        step_ms, *parts = averages
        return TimeShares(int(steps), step_ms, dict(zip(PARTS, parts, strict=True))) if step_ms > 0 else None


def time_at_end(end: EndEvent) -> TimeShares | None:
    """The times of the slowest rank; None where the event has none, as after a failure."""
    time = end.step_time
    if time is None or time.steps < 1 or not time.step_ms:
        return None
    parts_ms = {part: getattr(time, part) for part in PARTS}
    if not all(map(_is_time, (time.step_ms, time.waited_ms, *parts_ms.values()))):
        return None
    waits = time.waited_ms >= OTHERS_WAIT * time.step_ms
    rank = time.rank if waits else None
    return TimeShares(time.steps, time.step_ms, parts_ms, rank=rank, auto_share_gain=time.auto_share_gain)


def _is_time(value: float) -> bool:
    return 0 <= value < math.inf  # NaN is neither
