"""The micro-batch of a run, chosen before its first step, and the end of a run whose ranks lack memory.

Never changes the micro-batch of a run that is training.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

from launcher.distributed.collectives import all_gather_str
from launcher.errors import OutOfMemoryError
from launcher.run_dir.result import Result
from launcher.trainer.builders.micro_batch_finder import search
from launcher.trainer.callback import Callback, StepMetrics
from launcher.trainer.context import TrainContext
from launcher.trainer.progress import StepIndex

log = logging.getLogger("launcher")


class MicroBatch(Callback):
    """Chooses the micro-batch, and ends the run on all ranks where it does not fit in memory."""

    name = "micro_batch"

    def __init__(self, context: TrainContext) -> None:
        self._context = context
        # The value of data.micro_batch_size, and the size per rank that the run uses in its place, if any.
        self._chosen: tuple[str | int | None, int] | None = None

    def state_dict(self) -> dict[str, Any]:
        return {"micro_batch": self._chosen and dict(zip(("wish", "size"), self._chosen, strict=True))}

    def load_state_dict(self, values: dict[str, Any]) -> None:
        if (saved := values["micro_batch"]) is not None:
            self._chosen = saved["wish"], saved["size"]

    def add_to_result(self, result: Result) -> Result:
        return replace(result, micro_batch=self._context.plan.largest_micro_batch)

    def choose(self, steps_left: bool, of_restart: int | None = None) -> None:
        """Divide the batches as data.micro_batch_size says, as in the run so far, or as found by trying.

        `of_restart` is the size with which the parent has restarted this run, if it has. A collective. Raises
        OutOfMemoryError, on all ranks, where not even one sample fits.
        """
        context, micro_batch_size = self._context, self._context.config.data.micro_batch_size
        # Of any rank: the parent of another machine may start its ranks before it has read the decision.
        sizes = [int(text) for text in all_gather_str(context.env, str(of_restart or "")) if text]
        if sizes:
            size = min(sizes)
            text = f"{size} per rank: the run was restarted with half, because it had run out of memory"
            context.telemetry.decision("micro-batch", text, micro_batch=size)
        elif self._chosen is not None and self._chosen[0] == micro_batch_size:
            size = self._chosen[1]
            context.telemetry.decision("micro-batch", f"{size} per rank, as in the run so far")
        elif micro_batch_size == "auto" and steps_left:
            size = search(context)
        else:
            self._chosen = None
            return
        context.plan = replace(context.plan, micro_batch=size)
        context.stepper.set_micro_batches(context.plan.own_micro_batches)
        self._chosen = (micro_batch_size, size)
        context.persist_config(data=replace(context.config.data, micro_batch_size=size))

    def on_step_metrics(self, index: StepIndex, metrics: StepMetrics) -> None:
        """End the run where a rank has abandoned the step. All ranks read so in the same step."""
        if not metrics.report.abandoned_ranks:
            return
        texts = all_gather_str(self._context.env, self._context.oom_message)
        short = [f"rank {rank} ran out of {text}" for rank, text in enumerate(texts) if text]
        place = f"in the forward or backward pass of step {index.global_step}"
        raise OutOfMemoryError(f"{'; '.join(short)}, {place}.")
