"""Divides each batch among the ranks in proportion to their measured speeds: `data.share=auto`.

Owns the measurement and the decision. A rank's speed is the samples that it computes in the time of its
forward and backward passes; what it waits for is not counted. All ranks decide alike, from the same numbers.

Windows of measurement follow each other without a gap. The first has few steps, so that a run begins with
unsuitable shares only for that long; each window after which nothing is changed is followed by one of twice
the length, up to MOST_STEPS, so that noise is averaged out and a rank that changes its speed is followed.
"""

from __future__ import annotations

import json
from typing import Any

from launcher.data.shares import compute_time, proportional_shares
from launcher.distributed.collectives import all_gather_str
from launcher.engine.step_timer import COMPUTE
from launcher.os.oom import oom_text
from launcher.trainer.callback import Callback, StepMetrics
from launcher.trainer.context import TrainContext
from launcher.trainer.progress import StepIndex

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
        self._most = [plan.batch_size] * plan.world_size  # lower for a rank that has lacked memory for more
        self._saved_most: tuple[list[int], int | None] = [], None  # of the checkpoint, and its most_per_pass
        self._next: tuple[tuple[int, ...], str] | None = None  # shares of the coming steps, and why
        self._begin_window(warm_up=WARM_UP, steps=FIRST_STEPS)

    def _begin_window(self, warm_up: int, steps: int) -> None:
        """Measure `steps` steps, after `warm_up` that are not measured."""
        self._warm_up, self._steps, self._measured = warm_up, steps, 0
        self._compute_ms, self._step_ms, self._samples = 0.0, 0.0, 0

    def state_dict(self) -> dict[str, Any]:
        shares = self._next[0] if self._next else self._context.plan.shares
        return {"shares": shares, "most": self._most, "most_per_pass": self._context.plan.most_per_pass}

    def load_state_dict(self, values: dict[str, Any]) -> None:
        """Begin with the shares of the checkpoint; of other ranks, or another batch, with equal ones.

        Which ranks have lacked memory is known only for the same ranks and micro-batch.
        """
        shares, plan = tuple(values["shares"]), self._context.plan
        if len(shares) == plan.world_size and sum(shares) == plan.batch_size:
            self._next = (shares, "as in the run so far")
        self._saved_most = values["most"], values.get("most_per_pass")

    def on_train_start(self, step: int) -> None:
        plan, (saved, limit) = self._context.plan, self._saved_most
        # Only now has the plan the micro-batch that the run uses.
        if len(saved) == plan.world_size and limit == plan.most_per_pass:
            self._most = [limit if most == limit else plan.batch_size for most in saved]

    def on_step_start(self, index: StepIndex) -> None:
        """Divide the coming batches anew, if that was decided, unless a rank lacks memory for it."""
        if self._next is None:
            return
        context, ((shares, reason), self._next) = self._context, (self._next, None)
        before = context.plan.shares
        # Several passes are summed in fp32: a rank that has had one needs 4 more bytes per parameter.
        texts = all_gather_str(context.env, self._try_shares(shares))
        if short := [rank for rank, text in enumerate(texts) if text]:
            self._try_shares(before)  # back, on all ranks
            limit = context.plan.most_per_pass
            for rank in short:
                self._most[rank] = limit
            who = "; ".join(f"rank {rank} ran out of {texts[rank]} with {shares[rank]}" for rank in short)
            text = f"at most {limit} samples for a rank that lacks memory for more: {who}"
            context.telemetry.decision("shares", text, most=self._most)
            return
        context.batches.divide(context.plan)
        of_ranks = f"{', '.join(map(str, shares))} of {context.plan.batch_size} samples by rank"
        text = f"{of_ranks} from step {index.global_step} on, {reason}"
        context.telemetry.decision("shares", text, shares=shares, from_step=index.global_step)

    def _try_shares(self, shares: tuple[int, ...]) -> str:
        """Set these shares. Returns what this rank ran out of in doing so; empty if nothing."""
        try:
            self._context.divide(shares)
        except Exception as error:
            if text := oom_text(error):
                return text
            raise
        return ""

    def on_step_metrics(self, index: StepIndex, metrics: StepMetrics) -> None:
        plan = self._context.plan
        if plan.samples_of(index.batch_idx) < plan.batch_size:
            return  # the last batch of an epoch, which is divided equally
        if self._warm_up:
            self._warm_up -= 1
            return
        self._measured += 1
        self._compute_ms += metrics.report.spans_ms.get(COMPUTE, 0.0)
        self._step_ms += 1e3 * metrics.seconds
        self._samples += sum(map(len, plan.micro_positions(index.batch_idx)))
        if self._measured == self._steps:
            self._decide()

    def _decide(self) -> None:
        """Choose the shares of the coming steps by the window that ends. A collective."""
        env, plan = self._context.env, self._context.plan
        own = [self._compute_ms / self._samples, self._step_ms / self._measured]
        ranks = [json.loads(text) for text in all_gather_str(env, json.dumps(own))]
        times = [ms_per_sample for ms_per_sample, _ in ranks]
        step_ms = ranks[0][1]  # nearly that of all, as steps end together; all must decide by the same
        self._begin_window(warm_up=0, steps=min(2 * self._steps, MOST_STEPS))
        if min(times) <= 0:
            return
        before = plan.shares or proportional_shares([1.0] * plan.world_size, plan.batch_size)
        speeds = [1 / time for time in times]
        shares = proportional_shares(speeds, plan.batch_size, self._least, self._most)
        saved_ms = compute_time(before, times) - compute_time(shares, times)
        if saved_ms < LEAST_GAIN * step_ms:
            return
        by = ", ".join(f"{time:.3g}" for time in times)
        why = f"by {by} ms per sample: a step of {step_ms:.0f} ms becomes {saved_ms:.0f} ms shorter"
        self._next = shares, why
        self._begin_window(WARM_UP, FIRST_STEPS)
