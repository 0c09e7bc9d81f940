"""The bottleneck of a step, in one sentence with advice.

Owns the averages over a run's `step` events and the verdict. Reads no clock and prints nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from launcher.distributed.heartbeat import STEP_PARTS
from launcher.telemetry.stream import Record

PARTS = tuple(f"{part}_ms" for part in STEP_PARTS)
LIMIT = 0.3  # a part with this share is reported, even where computing takes longer

ADVICE = {
    "data_ms": (
        "input-bound: {share} of the step waits for data: "
        "make the data set's transform cheaper, or raise data.batch_size"
    ),
    "wire_ms": (
        "wire-bound: {share} of the step waits for the exchange of gradients: "
        "raise data.batch_size, or use fewer ranks"
    ),
    "update_ms": "update-bound: {share} of the step updates the weights: raise data.batch_size",
    "compute_ms": "compute-bound: {share} of the step is forward and backward",
}


@dataclass(frozen=True)
class TimeShares:
    """Average milliseconds of a step and of its parts, over `num_steps` steps."""

    num_steps: int
    step_ms: float
    parts_ms: dict[str, float]

    def share(self, part: str) -> float:
        return self.parts_ms[part] / self.step_ms

    @property
    def verdict(self) -> str:
        """The largest of data, wire and update from `LIMIT` on, otherwise the computation."""
        slow = [part for part in PARTS if part != "compute_ms" and self.share(part) >= LIMIT]
        worst = max(slow, key=self.share, default="compute_ms")
        return ADVICE[worst].format(share=f"{self.share(worst):.0%}".replace("%", " %"))


def time_shares(steps: Iterable[Record]) -> TimeShares | None:
    """Averages, each `step` event weighted by its number of steps; None where no event has the parts.

    The first of several events is ignored, because it contains compilation and the first touch of memory.
    """
    timed = [record for record in steps if all(_is_time(record.get(key)) for key in ("step_ms", *PARTS))]
    if not timed:
        return None
    before = [0, *(record["step"] for record in timed)]
    weights = [max(1, record["step"] - earlier) for record, earlier in zip(timed, before, strict=False)]
    if len(timed) > 1:
        timed, weights = timed[1:], weights[1:]
    total = sum(weights)

    def average(key: str) -> float:
        weighed = (float(record[key]) * weight for record, weight in zip(timed, weights, strict=True))
        return math.fsum(weighed) / float(total)

    step_ms = average("step_ms")
    if step_ms <= 0:
        return None
    return TimeShares(total, step_ms, {part: average(part) for part in PARTS})


def _is_time(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value >= 0
