"""The time of this rank's steps by part, and which rank the others wait for.

Owns the sums since this process has started, and their exchange at the end of a run: a rank that waits for a
slower one shows that as time on the wire, so only the slowest rank shows what bounds the run.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from launcher.distributed.collectives import exchange_texts
from launcher.distributed.env import WorkerEnv
from launcher.engine.diagnostics.step_timer import PARTS, UPDATE, WIRE

AROUND_THE_LAYERS = 3  # loss, its scaling, and what is counted take as long as so many small layers
UPDATE_BYTES, SLOW_MEMORY = 40, 4e9  # per parameter; bytes per second


def parts_of(spans_ms: Mapping[str, float], world_size: int) -> dict[str, float]:
    """Milliseconds by part, as events have them. On one rank, reading the gradient is part of the update."""
    parts = {f"{part}_ms": spans_ms.get(part, 0.0) for part in PARTS}
    if world_size == 1:
        parts[f"{UPDATE}_ms"] += parts[f"{WIRE}_ms"]
        parts[f"{WIRE}_ms"] = 0.0
    return parts


class StepTimes:
    """Sums over the steps of this process. The first step counts only while it is the only one.

    It compiles, chooses algorithms and touches memory for the first time.
    """

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._steps = 0
        self._seconds = 0.0
        self._spans_ms: dict[str, float] = {}

    def add(self, seconds: float, spans_ms: Mapping[str, float]) -> None:
        """A step that took so long on the host, and its spans."""
        self._steps += 1
        if self._steps <= 2:
            self._seconds, self._spans_ms = seconds, dict(spans_ms)
            return
        self._seconds += seconds
        sums = self._spans_ms
        for part, milliseconds in spans_ms.items():
            sums[part] = sums.get(part, 0.0) + milliseconds

    def means(self) -> dict[str, float]:
        """`steps`, `step_ms` and the parts of a step; empty before the first."""
        if not self._steps:
            return {}
        counted = max(1, self._steps - 1)
        means = {part: total / counted for part, total in self._spans_ms.items()}
        step_ms = 1e3 * self._seconds / counted
        return {"steps": counted, "step_ms": step_ms, **parts_of(means, self._world_size)}


def of_the_slowest(env: WorkerEnv, times: StepTimes) -> dict[str, Any] | None:
    """The means of the rank that waits least for the others, and its `rank`; None without steps.

    A collective. `waited_ms` is how much longer another rank waits per step, in the exchange of gradients.
    """
    ranks = [json.loads(text) for text in exchange_texts(env, json.dumps(times.means()))]
    if not all(ranks):
        return None
    waits = [means[f"{WIRE}_ms"] for means in ranks]
    slowest = waits.index(min(waits))
    return {**ranks[slowest], "rank": slowest, "waited_ms": max(waits) - min(waits)}


def overhead_ms(
    means: Mapping[str, float], per_layer_ms: float, layers: int, passes: int, numel: int
) -> float:
    """What of a step's parts the host would spend on a model and a batch of any size, as far as it is known.

    Of `passes` forward and backward passes, the cost of the `layers` and of what surrounds them; of the
    update, what it takes beyond moving the memory of `numel` parameters.
    """
    compute = min(means["compute_ms"], per_layer_ms * (layers + AROUND_THE_LAYERS) * passes)
    moving_ms = 1e3 * numel * UPDATE_BYTES / SLOW_MEMORY
    return compute + max(0.0, means["update_ms"] - moving_ms)
