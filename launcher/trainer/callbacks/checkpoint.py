"""When a run is saved, and when it stops on request.

Owns the flags by which the ranks agree on both, the comparison of the replicas before each checkpoint, and
what is reported of one. Every method is called by all ranks at the same point of the run.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
from dataclasses import asdict

from launcher.checkpoint.async_writer import SaveResult, SaveSchedule
from launcher.checkpoint.checkpointer import Checkpointer
from launcher.checkpoint.run_state import RunExtras, TrainProgress
from launcher.config.messages import command_name
from launcher.distributed.collectives import all_gather_str
from launcher.errors import TO_RESUME, PreemptedError, PrunedError, StorageError
from launcher.os.signals import is_preemption
from launcher.run_dir.differences import settings_of
from launcher.run_dir.discarding import overrides_to_resume
from launcher.run_dir.pruning import PruneRequest
from launcher.run_dir.records import JOB
from launcher.telemetry.events import CheckpointEvent
from launcher.trainer.callback import Callback
from launcher.trainer.context import TrainContext
from launcher.trainer.progress import EvalOutcome, StepFlag, StepIndex
from launcher.trainer.pruning import request_of_agent
from launcher.trainer.replica_consistency import check_replicas


class CheckpointCallback(Callback):
    """Decides after each step whether the run is saved and whether it ends there."""

    name = "checkpoint"

    def __init__(self, context: TrainContext, checkpointer: Checkpointer) -> None:
        config = context.config.checkpoint
        self._context, self._checkpointer = context, checkpointer
        # Once: it takes 1 ms, for which each checkpoint would wait.
        self._settings = settings_of(context.config)
        self.due = SaveSchedule(config.every_steps, config.every_s)
        self._failure = ""  # of the latest checkpoint, on rank 0
        self._best_step = -1  # of the latest checkpoint that is the best so far

    def close(self) -> None:
        """Report the checkpoint that is still being written, also where an error ends the run."""
        try:
            self._report(self._checkpointer.wait())
        finally:
            self._checkpointer.close()

    def on_train_start(self, step: int) -> None:
        self.due.mark_started()  # the time until the next one counts from here

    def on_step_start(self, index: StepIndex) -> None:
        """Set this rank's flags before a step; they are sent with the counts of the step."""
        context = self._context
        self._report(self._checkpointer.poll())
        by_clock = context.env.is_rank0 and self.due.by_clock()
        if context.stop_signal.pop_save() or by_clock:
            self.due.mark_started()  # requested now, saved after the next step
            context.stepper.vote(StepFlag.SAVE)
        if self._failure and context.config.checkpoint.on_error == "stop":
            context.stepper.vote(StepFlag.ABORT)

    def on_step_end(self, index: StepIndex, measured: EvalOutcome | None) -> None:
        """Decide, save, and end the run, the same on all ranks.

        `measured` is from this step; None if there was no evaluation, or an interrupted one. Raises
        PreemptedError for a run that was asked to stop, PrunedError for one that a sweep has given up, and
        StorageError for one that cannot be saved.
        """
        due = self.due.after_step(index.global_step)
        if measured is None and not (self._context.flags or due):
            return
        agreed = set(self._context.flags)
        self._context.flags.clear()
        at_end = measured is not None and measured.is_last
        is_best = measured is not None and measured.is_best
        stops = StepFlag.STOP in agreed and not at_end
        if StepFlag.ABORT in agreed:
            self._raise_failure(self._failure)  # empty if a later one was written
        pruned = self._request_to_prune() if stops else None
        if pruned is not None and not pruned.keep_checkpoint:
            self._delete_checkpoints()
            raise PrunedError(f"after step {index.global_step}: {pruned.reason}; no checkpoint was kept.")
        if stops or at_end or due or is_best or StepFlag.SAVE in agreed:
            self._save(index, measured)
        if stops or at_end:
            self._refuse_unsaved()
        if stops:
            self._context.step_reader.flush_all()
            raise self._stopped(index.global_step, pruned)

    def _refuse_unsaved(self) -> None:
        """Raise StorageError, on all ranks, for a run that ends here and whose last checkpoint failed."""
        self._report(self._checkpointer.wait())
        self._raise_failure(
            self._failure
            and f"the run is not saved: {self._failure} After freeing space, the same command with "
            f"{self._overrides_to_resume} resumes from the newest checkpoint."
        )

    def _raise_failure(self, text: str) -> None:
        """Raise StorageError, on all ranks, where rank 0 has this text. A collective."""
        if failure := self._from_rank0(text):
            raise StorageError(failure)

    def _stopped(self, step: int, pruned: PruneRequest | None) -> PreemptedError:
        """The error with which a run ends that was asked to, and is saved."""
        if pruned is not None:
            directory = self._checkpointer.directory.parent
            of_sweep = f"{command_name()} job {shlex.quote(str(directory))}"
            again = (
                of_sweep
                if (directory / JOB).exists()
                else f"the same command with {self._overrides_to_resume}"
            )
            saved = f"checkpoint saved. To train it further: {again}"
            return PrunedError(f"after step {step}: {pruned.reason}; {saved}")
        text = f"after step {step}, on request; checkpoint saved. {TO_RESUME} {self._overrides_to_resume}"
        stopped = PreemptedError(text)
        stopped.by_scheduler = is_preemption(self._context.stop_signal.stop)
        return stopped

    @property
    def _overrides_to_resume(self) -> str:
        return overrides_to_resume(self._checkpointer.directory.parent)

    def _request_to_prune(self) -> PruneRequest | None:
        """The request that rank 0 has found, the same on all ranks. A collective."""
        found = self._context.pruning.request or request_of_agent(self._context.stop_signal.stop, os.environ)
        text = self._from_rank0("" if found is None else json.dumps(asdict(found)))
        return PruneRequest(**json.loads(text)) if text else None

    def _delete_checkpoints(self) -> None:
        """Remove the checkpoints of a run that is given up; the last one is not written."""
        self._context.step_reader.flush_all()
        self._report(self._checkpointer.wait())
        if self._context.env.is_rank0:
            shutil.rmtree(self._checkpointer.directory, ignore_errors=True)

    def _save(self, index: StepIndex, measured: EvalOutcome | None) -> None:
        self._context.step_reader.flush()  # raises if the run has diverged, which is then not saved
        self._context.telemetry.flush()
        self._context.heartbeat.beat("consistency check")
        # Before anything is copied: a difference between the ranks ends the run, and is never saved.
        check_replicas(self._context.stepper, self._context.ema)
        self._context.heartbeat.beat("checkpoint")
        metric = None if measured is None else measured.metric
        place = self._context.batches.position()
        extra = RunExtras(
            self._context.callbacks.state_dict(),
            best=self._context.best,
            evaluated=metric is not None,
            data=self._context.data_fingerprint,
            settings=self._settings,
            stream=all_gather_str(self._context.env, place) if place else None,
        )
        progress = TrainProgress(index.epoch, index.global_step, round(self._context.samples))
        self._report(self._checkpointer.save(progress, metric, extra))  # how the one before has ended
        if measured is not None and measured.is_best:
            self._best_step = index.global_step
        self.due.mark_started()
        self._context.step_reader.restart_timer()

    def _from_rank0(self, text: str) -> str:
        """Rank 0's text on all ranks: only rank 0 writes files. A collective."""
        return all_gather_str(self._context.env, text)[0]

    def _report(self, result: SaveResult | None) -> None:
        if result is None:
            return
        if result.path is not None:
            self._failure = ""
            size, seconds = result.size_bytes, result.seconds
            self._context.telemetry.emit(
                CheckpointEvent(
                    result.step,
                    path=str(result.path),
                    seconds=seconds,
                    size_bytes=size,
                    best=result.step == self._best_step,
                )
            )
        if result.error is None:
            return
        if result.path is None:
            self.due.mark_failed()
        if result.path is not None or not self._failure:  # of several in a row the first is a warning
            self._context.telemetry.warn(str(result.error))
        self._failure = self._failure if result.path else str(result.error)
