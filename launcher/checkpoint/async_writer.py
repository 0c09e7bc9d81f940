"""When a checkpoint is due, and how it is written beside the training.

Owns the schedule, the pauses of the thread that writes, and what it returns: a failed write is a value and is
not raised, so that no rank leaves the others in a collective.

The thread writes in pieces with pauses in between, so that it takes little time from the training beside it.
Without pauses one or two steps beside a write took 2.1 to 2.5 times as long (ResNet-18, two ranks on two
cores, n = 8). A low scheduling priority does not serve. Beside threads that wait without sleeping, as those
of OpenMP, such a thread is not run for seconds; and one that loses its processor while it holds Python's lock
stops all the others.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from launcher.checkpoint.catalog import apply_retention
from launcher.checkpoint.manifest import step_name
from launcher.checkpoint.run_state import Snapshot
from launcher.checkpoint.storage import publish
from launcher.errors import LauncherError

SHARE = 0.025  # of one processor's time that a write takes: after 1 ms of work a pause of 39 ms
LONGEST_S = 5.0  # with pauses; a crash before the checkpoint is complete resumes from the one before
RETRY_S = 60.0  # after a checkpoint that could not be written: each try copies the whole state


class WriteThrottle:
    """Pauses a write: 39 ms after each ms of work, for 5 s. What is left then is written without pauses.

    No pauses while `hurry` is set. Made and called by the thread that writes.
    """

    def __init__(self, hurry: threading.Event) -> None:
        self._hurry = hurry
        self._ends_s = time.monotonic() + LONGEST_S
        self._began_s = time.thread_time()

    def pause(self) -> None:
        """Pause after a piece."""
        used_s = time.thread_time() - self._began_s
        left_s = max(0.0, self._ends_s - time.monotonic())
        self._hurry.wait(min(used_s * (1 / SHARE - 1), left_s))
        self._began_s = time.thread_time()


@dataclass(frozen=True)
class SaveResult:
    """The outcome of writing one checkpoint.

    `path` is None where it was not written. With a path, `error` concerns the deletion of older checkpoints.
    """

    step: int
    path: Path | None
    seconds: float
    size_bytes: int
    error: LauncherError | None = None


class SaveSchedule:
    """When a checkpoint is due: every so many steps, so many seconds after the last, and after a failure."""

    def __init__(self, every_steps: int | None, every_s: float | None) -> None:
        self._every_steps = every_steps
        self._every_s = every_s
        self._last_s = time.monotonic()  # a wall clock may go backwards
        self._retry_s = math.inf  # when to try again

    def after_step(self, step: int) -> bool:
        """The same on all ranks."""
        return self._every_steps is not None and step % self._every_steps == 0

    def by_clock(self) -> bool:
        """Whether this rank's clock says to save. Only rank 0's value counts; send it to all ranks."""
        now_s = time.monotonic()
        return now_s >= self._retry_s or (self._every_s is not None and now_s - self._last_s >= self._every_s)

    def mark_started(self) -> None:
        """A checkpoint is being taken."""
        self._last_s, self._retry_s = time.monotonic(), math.inf

    def mark_failed(self) -> None:
        """The latest checkpoint could not be written."""
        self._retry_s = time.monotonic() + RETRY_S


def write_checkpoint(directory: Path, keep: int, snapshot: Snapshot, hurry: threading.Event) -> SaveResult:
    """Write the snapshot into `directory`, and delete all checkpoints but the `keep` newest and the best.

    With pauses, unless `hurry` is set. A failure is in the result.
    """
    began, step, path = time.perf_counter(), snapshot.progress.step, None
    error, size_bytes = None, 0
    try:
        path = publish(directory, snapshot, WriteThrottle(hurry).pause)
        with contextlib.suppress(OSError):  # of a shared disk; the checkpoint is there
            size_bytes = sum(file.stat().st_size for file in path.iterdir())
        best = snapshot.extra.best
        apply_retention(directory, keep, None if best is None else directory / step_name(best.step))
    except LauncherError as failure:
        error = failure
    return SaveResult(step, path, time.perf_counter() - began, size_bytes, error)
