"""The time of this rank's steps by part, and which rank the others wait for.

Owns the sums over steps, and the exchange of those of a process at the end of a run: a rank that waits for a
slower one shows that as time of communication, so only the slowest rank shows what bounds the run.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from launcher.distributed.collectives import all_gather_str
from launcher.distributed.env import WorkerEnv
from launcher.engine.step_timer import COMMUNICATION, COMPUTE, PARTS, UPDATE


def phase_ms(spans_ms: Mapping[str, float], world_size: int) -> dict[str, float]:
    """Milliseconds by part, as events have them. On one rank, reading the gradient is part of the update."""
    parts = {f"{part}_ms": spans_ms.get(part, 0.0) for part in PARTS}
    if world_size == 1:
        parts[f"{UPDATE}_ms"] += parts[f"{COMMUNICATION}_ms"]
        parts[f"{COMMUNICATION}_ms"] = 0.0
    return parts


@dataclass
class StepTimeTotals:
    """Sums over steps: their number, their time on the host, and its parts.

    With `skip_first` the first step counts only while it is the only one: it compiles, chooses algorithms and
    touches memory for the first time.
    """

    world_size: int
    skip_first: bool = False
    steps: int = 0
    seconds: float = 0.0
    spans_ms: dict[str, float] = field(default_factory=dict)

    def add(self, seconds: float, spans_ms: Mapping[str, float]) -> None:
        """A step that took so long on the host, and its spans."""
        if self.skip_first and self.steps == 1:
            self.skip_first, self.steps, self.seconds, self.spans_ms = False, 0, 0.0, {}
        self.steps += 1
        self.seconds += seconds
        sums = self.spans_ms
        for part, milliseconds in spans_ms.items():
            sums[part] = sums.get(part, 0.0) + milliseconds

    def mean_ms(self, part: str) -> float:
        """The mean time of one part of a step."""
        return self.spans_ms.get(part, 0.0) / self.steps

    def means(self) -> dict[str, float]:
        """`steps`, `step_ms` and the parts of a step; empty before the first."""
        if not self.steps:
            return {}
        parts = phase_ms({part: self.mean_ms(part) for part in self.spans_ms}, self.world_size)
        return {"steps": self.steps, "step_ms": 1e3 * self.seconds / self.steps, **parts}


def slowest_rank_times(
    env: WorkerEnv, times: StepTimeTotals, shares: Sequence[int] = ()
) -> dict[str, Any] | None:
    """The means of the rank that waits least for the others, and its `rank`; None without steps.

    A collective. `waited_ms` is how much longer another rank waits per step, in the exchange of gradients;
    `auto_share_gain` how many times as fast a step would be if the ranks, which have had these `shares` of a
    batch or equal ones, had shares in proportion to their speeds.
    """
    ranks = [json.loads(text) for text in all_gather_str(env, json.dumps(times.means()))]
    if not all(ranks):
        return None
    waits = [means[f"{COMMUNICATION}_ms"] for means in ranks]
    slowest = waits.index(min(waits))
    compute = [means[f"{COMPUTE}_ms"] for means in ranks]
    saved_ms = max(compute) - statistics.harmonic_mean(compute, shares or None)
    step_ms = ranks[slowest]["step_ms"]
    gain = step_ms / (step_ms - saved_ms) if saved_ms < step_ms else 1.0
    waited_ms = max(waits) - min(waits)
    return {**ranks[slowest], "rank": slowest, "waited_ms": waited_ms, "auto_share_gain": gain}
