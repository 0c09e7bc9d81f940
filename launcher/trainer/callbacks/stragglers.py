"""Which rank the others wait for, by how much, and why, over the last steps.

Owns the numbers that travel with the counts of a step, so that they cost no collective: in each step one
rank, in turn, sends how long it has waited for the exchange of gradients, by its own clock, in the window of
steps before. The rank that arrives last waits least. For a slow link all ranks wait alike, and none is named.
All ranks receive the same numbers; rank 0 records them.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from launcher.engine.step_timer import DATA, WIRE
from launcher.telemetry.events import StragglerEvent
from launcher.trainer.callback import Callback, StepMetrics
from launcher.trainer.context import TrainContext
from launcher.trainer.progress import Position
from launcher.trainer.step_flags import DATA_SLOT, WAIT_SLOT
from launcher.trainer.step_times import StepTimeTotals
from launcher.trainer.warning_log import PowerOfTenThrottle

# Steps, or as many as there are ranks: long enough that the mean of a rank is not that of one slow read, and
# short enough that a rank which became slow is named within minutes. One rank sends in each step.
WINDOW = 50
LAG = 2  # steps after the end of a window until each rank has read its last one
LATE_SHARE = 0.25  # of a step: less varies by itself, and is worth no look at another machine
LATE_MS = 1.0  # in steps of some milliseconds a quarter is what the scheduler of one host already takes


class Stragglers(Callback):
    """Compares the ranks' times. All ranks call the same methods at the same steps."""

    name = "stragglers"

    def __init__(self, context: TrainContext, hosts: Sequence[str]) -> None:
        self._context = context
        self._hosts = hosts  # by rank
        self._ranks = len(hosts)
        self._length = max(WINDOW, self._ranks + LAG)
        self._window = StepTimeTotals(self._ranks)
        self._done: StepTimeTotals | None = None  # the window before, where all its steps were measured
        self._received: dict[int, tuple[float, float]] = {}  # by rank: waited, and read data, in ms per step
        self._late = PowerOfTenThrottle()  # by rank: windows in which it was late

    def on_step_start(self, position: Position) -> None:
        """Send this rank's times with the coming step, if it is its turn."""
        if self._done is not None and self._turn(position.step) == self._context.env.rank:
            self._context.stepper.vote(WAIT_SLOT, self._done.mean_ms(WIRE))
            self._context.stepper.vote(DATA_SLOT, self._done.mean_ms(DATA))

    def on_step_metrics(self, position: Position, metrics: StepMetrics) -> None:
        report = metrics.report
        turn, votes = self._turn(position.step), report.votes
        if 0 <= turn < self._ranks and votes[WAIT_SLOT]:
            self._received[turn] = votes[WAIT_SLOT], votes[DATA_SLOT]
        if turn == self._ranks - 1 and len(self._received) == self._ranks and self._done is not None:
            first_step = position.step - position.step % self._length - self._length
            self._conclude(position.step, first_step, self._done)
        self._window.add(metrics.seconds, report.spans_ms)
        if position.step % self._length == self._length - 1:
            is_whole = self._window.steps == self._length
            self._done, self._window = self._window if is_whole else None, StepTimeTotals(self._ranks)
            self._received = {}

    def _turn(self, step: int) -> int:
        """The rank whose turn it is; others than those that exist in the rest of a window."""
        return step % self._length - LAG

    def _conclude(self, step: int, first_step: int, own: StepTimeTotals) -> None:
        """All ranks have sent their times of the window before, of which `own` are those of this rank."""
        latest = min(range(self._ranks), key=lambda rank: self._received[rank][0])
        own_wait_ms, own_data_ms = self._received.pop(latest)
        wait_ms, data_ms = map(statistics.median, zip(*self._received.values(), strict=True))
        late_ms, step_ms = wait_ms - own_wait_ms, sum(own.spans_ms.values()) / own.steps
        if late_ms < max(LATE_MS, LATE_SHARE * step_ms):
            return
        cause = "compute"
        advice = "Its forward and backward take longer: look for other processes on it, or a low clock."
        if own_data_ms - data_ms > late_ms / 2:
            cause, advice = "data", "It waits for its data: look at its disk, or raise data.num_workers."
        self._context.telemetry.emit(
            StragglerEvent(
                step,
                rank=latest,
                host=self._hosts[latest],
                late_ms=late_ms,
                step_ms=step_ms,
                first_step=first_step,
                last_step=first_step + self._length - 1,
                cause=cause,
            )
        )
        if times := self._late.add(latest):
            often, host = "" if times == 1 else f", {times} times so far", self._hosts[latest]
            plan = self._context.plan
            of_batch = f" with {plan.shares[latest]} of {plan.batch_size} samples" if plan.shares else ""
            self._context.telemetry.warn(
                f"rank {latest} on {host}{of_batch} arrives last{often}: the other ranks waited "
                f"{late_ms:.1f} of the {step_ms:.1f} ms of a step for it, over {self._length} steps. {advice}"
            )
