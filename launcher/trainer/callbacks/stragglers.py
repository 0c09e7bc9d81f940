"""Which rank the others wait for, by how much, and why, over the last steps.

Owns the comparison: at the end of each window the ranks exchange how long each has waited, by its own clock,
for the others' gradients. The rank that arrives last waits least. For a slow link all ranks wait alike, and
none is named. All ranks receive the same numbers; rank 0 records them.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence

from launcher.distributed.collectives import all_gather_str
from launcher.engine.step_timer import COMMUNICATION, DATA
from launcher.telemetry.events import StragglerEvent
from launcher.trainer.callback import Callback, StepMetrics
from launcher.trainer.context import TrainContext
from launcher.trainer.progress import StepIndex
from launcher.trainer.step_times import StepTimeTotals

# Steps: long enough that the mean of a rank is not that of one slow read and that the exchange costs nothing,
# and short enough that a rank which became slow is named within minutes.
WINDOW = 50
LATE_SHARE = 0.25  # of a step: less varies by itself, and is worth no look at another machine
LATE_MS = 1.0  # in steps of some milliseconds a quarter is what the scheduler of one host already takes
ADVICE = {
    "compute": "Its forward and backward take longer: look for other processes on it, or a low clock.",
    "data": "It waits for its data: look at its disk, or raise data.num_workers.",
}


def latest_rank(times: Sequence[tuple[float, float]]) -> tuple[int, float, str]:
    """The rank that waits least, by how many ms per step it is late, and its slow part.

    `times`, by rank: how long it has waited for the others, and for its data, in ms per step.
    """
    latest = min(range(len(times)), key=lambda rank: times[rank][0])
    others = [each for rank, each in enumerate(times) if rank != latest]
    wait_ms, data_ms = map(statistics.median, zip(*others, strict=True))
    late_ms = wait_ms - times[latest][0]
    waits_for_data = times[latest][1] - data_ms > late_ms / 2
    return latest, late_ms, "data" if waits_for_data else "compute"


class Stragglers(Callback):
    """Compares the ranks' times after every WINDOW steps."""

    name = "stragglers"

    def __init__(self, context: TrainContext, hosts: Sequence[str]) -> None:
        self._context = context
        self._hosts = hosts  # by rank
        # None before the first whole window: the first steps of a process compile and touch memory.
        self._window: StepTimeTotals | None = None
        self._warned_of: set[int] = set()  # ranks, in this process

    def on_step_metrics(self, index: StepIndex, metrics: StepMetrics) -> None:
        if self._window is not None:
            self._window.add(metrics.seconds, metrics.report.spans_ms)
        if index.global_step % WINDOW == 0:
            if self._window is not None:
                self._compare(index.global_step, self._window)
            self._window = StepTimeTotals(len(self._hosts))

    def _compare(self, step: int, own: StepTimeTotals) -> None:
        """Compare the ranks' times of the window that ends with `step`. A collective."""
        texts = all_gather_str(self._context.env, json.dumps([own.mean_ms(COMMUNICATION), own.mean_ms(DATA)]))
        latest, late_ms, cause = latest_rank([json.loads(text) for text in texts])
        step_ms = sum(own.spans_ms.values()) / own.steps
        if late_ms < max(LATE_MS, LATE_SHARE * step_ms):
            return
        self._context.telemetry.emit(
            StragglerEvent(
                step,
                rank=latest,
                host=self._hosts[latest],
                late_ms=late_ms,
                step_ms=step_ms,
                first_step=step - WINDOW + 1,
                last_step=step,
                cause=cause,
            )
        )
        if latest not in self._warned_of:
            self._warned_of.add(latest)
            plan = self._context.plan
            share = f", with {plan.shares[latest]} of {plan.batch_size} samples," if plan.shares else ""
            self._context.telemetry.warn(
                f"rank {latest} on {self._hosts[latest]}{share} arrives last: the other ranks "
                f"waited {late_ms:.1f} of the {step_ms:.1f} ms of a step for it, over {WINDOW} steps. "
                f"{ADVICE[cause]}"
            )
