"""The checkpoints of one run, behind one object: find the one to resume from, load it, save new ones.

All ranks make the same calls. Only rank 0 reads and writes files, the latter on a thread of its own. When a
checkpoint is due, and what a failure means for the run, belongs to the caller.
"""

from __future__ import annotations

import threading
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from launcher.checkpoint import catalog, run_state
from launcher.checkpoint.async_writer import SaveResult, write_checkpoint
from launcher.checkpoint.catalog import ResumeChoice
from launcher.checkpoint.run_state import (
    MonitoredMetric,
    RunExtras,
    RunIdentity,
    Snapshot,
    TrainProgress,
)
from launcher.distributed.env import WorkerEnv
from launcher.engine import ExponentialMovingAverage, Stepper
from launcher.engine.precision.loss_scale import ScaleStart


class Checkpointer:
    """Keeps the `keep` newest checkpoints of a run and the best."""

    def __init__(
        self,
        directory: Path,
        keep: int,
        env: WorkerEnv,
        stepper: Stepper,
        average: ExponentialMovingAverage | None,
        identity: RunIdentity,
    ) -> None:
        self.directory, self._keep = directory, keep
        self._env, self._stepper, self._average = env, stepper, average
        self._identity = identity
        self._pending: Future[SaveResult] | None = None
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._hurry = threading.Event()  # set while somebody waits for the write

    def close(self) -> None:
        """Wait for the checkpoint that is being written, and end the thread that writes."""
        self._hurry.set()
        self._thread.shutdown(wait=True)

    def find(self, resume_from: str) -> ResumeChoice:
        """The checkpoint to resume from, as `checkpoint.resume` says, read by rank 0. A collective.

        Raises on all ranks: see `catalog.resume`.
        """
        return catalog.resume(self._env, self.directory, resume_from, self._identity)

    def load(self, saved: Snapshot) -> ScaleStart:
        """Continue from what `find` has read. A collective; raises ConfigError for that of another model."""
        return run_state.restore(self._stepper, saved, self._env, self._average)

    def save(
        self, progress: TrainProgress, metric: MonitoredMetric | None, extra: RunExtras
    ) -> SaveResult | None:
        """Copy the state of the run and begin to write it. A collective.

        Waits for the checkpoint before this one, and returns its result, unless it was returned before.
        """
        previous = self.wait()  # first: host memory never holds two snapshots
        snapshot = run_state.take_snapshot(
            self._stepper, self._env, self._identity, progress, self._average, metric, extra
        )
        if snapshot is not None:
            self._hurry.clear()
            self._pending = self._thread.submit(
                write_checkpoint, self.directory, self._keep, snapshot, self._hurry
            )
        return previous

    def poll(self) -> SaveResult | None:
        """The result of a checkpoint that has been written, once; None where there is none."""
        return self.wait() if self._pending is not None and self._pending.done() else None

    def wait(self) -> SaveResult | None:
        """The result of the checkpoint that is being written, once it is; None where there is none."""
        self._hurry.set()
        pending, self._pending = self._pending, None
        return None if pending is None else pending.result()
