"""Whether the workers of a run that has failed are started again.

Owns which failures a restart can fix, and the count of restarts and of those without progress. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from launcher.errors import NoProgressError, ReplicaError
from launcher.launch.root_cause import STALLED, UNEXPECTED, RunOutcome

RECOVERABLE = frozenset({UNEXPECTED, STALLED, ReplicaError.exit_code})
# Attempts in a row that crash without a new checkpoint: two may be bad luck, a third is the run itself.
MOST_WITHOUT_PROGRESS = 3


@dataclass
class RestartPolicy:
    """How often the workers of a run have been restarted, and how often without progress."""

    allowed: int
    newest_step: int = 0  # of the newest checkpoint before the present attempt
    used: int = 0
    restarts_without_progress: int = 0

    def record_or_raise(self, outcome: RunOutcome, newest_step: int, advice: str = "") -> None:
        """Count a restart after this outcome; `newest_step` is that of the newest checkpoint now, 0 if none.

        `advice` ends the error where a restart might help but is not allowed.

        Raises if no further one is allowed: JobFailed, or NoProgressError after three attempts in a row
        that have published no new checkpoint. One that is restarted with half the micro-batch is not the
        same again, so it counts as progress; the size, which halves, bounds how often.
        """
        progress = newest_step > self.newest_step or outcome.micro_batch is not None
        self.restarts_without_progress = 0 if progress else self.restarts_without_progress + 1
        self.newest_step = newest_step
        can_help = outcome.restart_helps
        if can_help is None:
            can_help = outcome.exit_code in RECOVERABLE
        if not can_help:
            raise outcome.error()
        if self.used == self.allowed and self.restarts_without_progress < MOST_WITHOUT_PROGRESS:
            raise replace(outcome, hint=f"{outcome.hint} {advice}".strip()).error()
        if self.restarts_without_progress == MOST_WITHOUT_PROGRESS:
            error = NoProgressError(
                f"the workers were started {MOST_WITHOUT_PROGRESS} times in a row and have failed each time "
                f"before they had written a new checkpoint. The last time {outcome.text.rstrip('.')}. "
                f"{outcome.hint}".rstrip()
            )
            error.traceback = outcome.traceback
            raise error
        self.used += 1
