"""Divides each batch among the ranks in proportion to their measured speeds: `data.share=auto`.

Owns the measurement and the decision. A rank's speed is the samples that it computes in the time of its
forward and backward passes; what it waits for is not counted. All ranks decide alike, from the same numbers.

Windows of measurement follow each other without a gap. The first has few steps, so that a run begins with
unequal shares only for that long; each window after which nothing is changed is followed by one of twice the
length, up to MOST_STEPS, so that noise is averaged out and a rank that changes its speed is followed.
"""

from __future__ import annotations

import json
from typing import Any

from launcher.data.shares import proportional_shares, step_time
from launcher.distributed.collectives import all_gather_str
from launcher.engine.step_timer import COMPUTE
from launcher.trainer.callback import Callback, StepMetrics
from launcher.trainer.context import TrainContext
from launcher.trainer.progress import Position

# Steps after a start or a change that are not measured: they choose algorithms, fill caches, and on a GPU one
# of them was launched before the change.
WARM_UP = 3
FIRST_STEPS = 5  # of the first window: two windows and their warm-up end before step 20
MOST_STEPS = 500
LEAST_GAIN = 0.05  # of a step: less varies by itself, and a change reads the coming batches anew


class DataShare(Callback):
    """Measures the ranks, and changes their shares where a step becomes shorter by it."""

    name = "data_share"

    def __init__(self, context: TrainContext) -> None:
        self._context = context
        plan = context.plan
        # In a single sample BatchNorm finds no variance.
        self._least = 2 if plan.batch_size >= 2 * plan.world_size else 1
        self._next: tuple[int, ...] = ()  # shares that the next step begins with
        self._begin(after=0, steps=FIRST_STEPS)

    def _begin(self, after: int, steps: int) -> None:
        """Begin a window of so many steps after that one."""
        self._after, self._steps = after, steps
        self._compute_ms, self._step_ms, self._samples = 0.0, 0.0, 0

    def state_dict(self) -> dict[str, Any]:
        return {"shares": self._next or self._context.plan.shares}

    def load_state_dict(self, values: dict[str, Any]) -> None:
        """Begin with the shares of the checkpoint; of other ranks, or another batch, with equal ones."""
        shares, plan = tuple(values["shares"]), self._context.plan
        if len(shares) == plan.world_size and sum(shares) == plan.batch_size:
            self._context.divide(shares)

    def on_train_start(self, step: int) -> None:
        self._begin(step + WARM_UP, FIRST_STEPS)

    def on_step_start(self, position: Position) -> None:
        if self._next:
            self._context.divide(self._next)
            self._context.batches.divide(self._context.plan)
            self._next = ()

    def on_step_metrics(self, position: Position, metrics: StepMetrics) -> None:
        if position.step <= self._after:
            return
        self._compute_ms += metrics.report.spans_ms.get(COMPUTE, 0.0)
        self._step_ms += 1e3 * metrics.seconds
        self._samples += sum(map(len, self._context.plan.micro_positions(position.step_of_epoch)))
        if position.step >= self._after + self._steps:
            self._decide(position.step)

    def _decide(self, step: int) -> None:
        """Choose the shares of the coming steps by the window that ends. A collective."""
        env, plan = self._context.env, self._context.plan
        own = [self._compute_ms, self._samples, self._step_ms / self._steps]
        ranks = [json.loads(text) for text in all_gather_str(env, json.dumps(own))]
        self._begin(step, min(2 * self._steps, MOST_STEPS))
        if not all(compute_ms and samples for compute_ms, samples, _ in ranks):
            return  # of less than one sample per rank nothing is known
        times = [compute_ms / samples for compute_ms, samples, _ in ranks]
        step_ms = ranks[0][2]  # of one rank for all, so that all decide alike
        before = plan.shares or proportional_shares([1.0] * plan.world_size, plan.batch_size)
        shares = proportional_shares([1 / time for time in times], plan.batch_size, self._least)
        gained_ms = step_time(before, times) - step_time(shares, times)
        if gained_ms < LEAST_GAIN * step_ms:
            return
        self._next = shares
        self._begin(step + WARM_UP, FIRST_STEPS)
        self._context.telemetry.decision(
            "shares",
            f"{', '.join(map(str, shares))} of {plan.batch_size} samples by rank from step {step + 1} on, by "
            f"{', '.join(f'{time:.3g}' for time in times)} ms per sample: a step of {step_ms:.3g} ms becomes "
            f"{gained_ms:.3g} ms shorter",
            shares=shares,
            from_step=step + 1,
        )
