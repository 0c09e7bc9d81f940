"""The micro-batch of a run, and what happens where a rank runs out of memory in a training step.

Owns the choice of the size before the first step, and the agreement of the ranks to end: a rank that runs out
in a forward or backward pass abandons the step, so that no other rank waits for it, and all ranks raise the
same OutOfMemoryError. The error has half the micro-batch, with which a parent process restarts the run
(train.on_oom=halve). Never changes the micro-batch of a run that is training.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from launcher.config.messages import directory_override
from launcher.distributed.collectives import exchange_texts
from launcher.engine import StepReport
from launcher.errors import TO_RESUME, LauncherError, OutOfMemoryError
from launcher.process import frames
from launcher.process.shortage import TO_LOWER, ran_out, shortage_of
from launcher.run_dir.result import Result
from launcher.trainer.builders.trials import half_of, search
from launcher.trainer.callback import Callback
from launcher.trainer.device import free_memory
from launcher.trainer.errors.rank_failure import at_shortage
from launcher.trainer.job import Job
from launcher.trainer.progress import Position

log = logging.getLogger("launcher")


class MicroBatch(Callback):
    """Chooses the micro-batch, and ends the run on all ranks where it does not fit in memory."""

    name = "micro_batch"

    def __init__(self, job: Job) -> None:
        self._job, self._run = job, job.run
        # The value of data.micro_batch_size, and the size per rank that the run uses in its place, if any.
        self._chosen: tuple[str | int | None, int] | None = None
        # With batch norms that are synchronised a rank that abandons a pass leaves the others waiting in it.
        self._agrees = not job.run.config.model.sync_bn
        self._shortage = ""  # of this rank, once it has abandoned a step

    def state_dict(self) -> dict[str, Any]:
        return {"micro_batch": self._chosen and dict(zip(("wish", "size"), self._chosen, strict=True))}

    def load_state_dict(self, values: dict[str, Any]) -> None:
        if (saved := values["micro_batch"]) is not None:
            self._chosen = saved["wish"], saved["size"]

    def add_to_result(self, result: Result) -> Result:
        return replace(result, micro_batch=self._job.batches.plan.largest_micro_batch)

    def choose(self, steps_left: bool, halved: int | None = None) -> None:
        """Divide the batches as data.micro_batch_size says, as in the run so far, or as found by trying.

        `halved` is the size with which the parent has restarted this run, if it has. A collective. Raises
        OutOfMemoryError, on all ranks, where not even one sample fits.
        """
        job, run, wish = self._job, self._run, self._run.config.data.micro_batch_size
        # Of any rank: the parent of another machine may start its ranks before it has read the decision.
        sizes = [int(text) for text in exchange_texts(run.env, str(halved or "")) if text]
        if sizes:
            size = min(sizes)
            text = f"{size} per rank: the run was restarted with half, because it had run out of memory"
            run.telemetry.decision("micro-batch", text, micro_batch=size)
        elif self._chosen is not None and self._chosen[0] == wish:
            size = self._chosen[1]
            run.telemetry.decision("micro-batch", f"{size} per rank, as in the run so far")
        elif wish == "auto" and steps_left:
            size = search(job)
        else:
            self._chosen = None
            return
        job.plan = replace(job.plan, micro_batch=size)
        run.stepper.set_micro_batches(job.plan.micro_batches)
        self._chosen = (wish, size)
        run.record(data=replace(run.config.data, micro_batch_size=size))

    @property
    def abandons(self) -> bool:
        """Whether this rank abandons the coming step too, because it has abandoned the one before.

        Ranks read the report of a step while the next one runs: until then they wait for this one.
        """
        return bool(self._shortage)

    def abandons_after(self, error: Exception) -> bool:
        """Whether this rank abandons the step that raised `error`, for all ranks to end together.

        False for an error that is no shortage of memory, and for one that only this rank can report: the
        other ranks may have applied the step.
        """
        run, shortage = self._run, ran_out(error)
        if run.env.group is None or not (shortage and self._agrees and run.stepper.can_abandon):
            return False
        log.warning("step %d: this rank ran out of %s", run.heartbeat.latest.step, shortage, exc_info=error)
        self._shortage = shortage
        frames.release(error)  # what the abandoned step needs must find room
        free_memory(run.env.device)
        return True

    def on_step_metrics(self, position: Position, report: StepReport) -> None:
        """End the run where a rank has abandoned the step. All ranks read so in the same step."""
        if not report.abandoned_ranks:
            return
        texts = exchange_texts(self._run.env, self._shortage)
        short = [f"rank {rank} ran out of {text}" for rank, text in enumerate(texts) if text]
        place = f"in the forward or backward pass of step {position.step}"
        raise OutOfMemoryError(f"{'; '.join(short)}, {place}.")

    @contextmanager
    def explained(self) -> Iterator[None]:
        """Raise an OutOfMemoryError with what to do now, for a shortage of memory within the context."""
        try:
            yield
        except Exception as error:
            run, found = self._run, error
            if not isinstance(error, LauncherError) and ran_out(error):
                place, advice = at_shortage(run.heartbeat.latest, run.config, run.env.world_size)
                advice = "" if advice == TO_LOWER else advice  # which is what `_failure` says
                found = shortage_of(error, f"rank {run.env.rank}", place, advice) or error
            if not isinstance(found, OutOfMemoryError):
                raise
            raise self._failure(str(found).strip()) from error

    def _failure(self, text: str) -> OutOfMemoryError:
        """The error with this text, and with what a smaller micro-batch makes of the run."""
        run, plan = self._run, self._job.batches.plan
        half = half_of(plan)
        text = f"{text} The micro-batch is {plan.largest_micro_batch} per rank and forward pass"
        if half is None:
            text = f"{text}, which cannot be halved: choose a smaller model or smaller samples."
            return OutOfMemoryError(text)
        text = f"{text}; data.micro_batch_size={half} needs less memory for the same update."
        halves = run.config.train.on_oom == "halve"
        if halves and not run.heartbeat.watched:
            run_dir = directory_override("run.dir", Path(run.config.run.dir))
            text = (
                f"{text} No parent process restarts this run with it (train.on_oom=halve). {TO_RESUME} "
                f"{run_dir} data.micro_batch_size={half}"
            )
        failure = OutOfMemoryError(text)
        if halves:
            failure.halved, failure.restart_helps = half, True
        return failure
