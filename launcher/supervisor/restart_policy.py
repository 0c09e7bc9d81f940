"""Whether the workers of a run that has failed are started again.

Owns which failures a restart can fix, and the count of restarts and of those without progress. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from launcher.errors import NoProgressError
from launcher.supervisor.root_cause import STALLED, UNEXPECTED, AttemptVerdict, RunFailed

REPLICAS_DIFFER = 9  # exit code of a ReplicaError
RECOVERABLE = frozenset({UNEXPECTED, STALLED, REPLICAS_DIFFER})
FRUITLESS = 3  # generations in a row without a new checkpoint that end a run


@dataclass
class Restarts:
    """How often the workers of a run have been restarted, and how often without progress."""

    allowed: int
    newest_step: int = 0  # of the newest checkpoint before the present generation
    used: int = 0
    fruitless: int = 0

    def allow(self, verdict: AttemptVerdict, newest_step: int, advice: str = "") -> None:
        """Count a restart after this verdict; `newest_step` is that of the newest checkpoint now, 0 if none.

        `advice` ends the error where a restart might help but is not allowed.

        Raises if no further one is allowed: RunFailed, or NoProgressError after three generations in a row
        that have published no new checkpoint. One that is restarted with half the micro-batch is not the
        same again, so it counts as progress; the size, which halves, bounds how often.
        """
        progress = newest_step > self.newest_step or verdict.halved is not None
        self.fruitless = 0 if progress else self.fruitless + 1
        self.newest_step = newest_step
        can_help = verdict.restart_helps
        if can_help is None:
            can_help = verdict.exit_code in RECOVERABLE
        if not can_help:
            raise RunFailed(verdict)
        if self.used == self.allowed and self.fruitless < FRUITLESS:
            raise RunFailed(replace(verdict, hint=f"{verdict.hint} {advice}".strip()))
        if self.fruitless == FRUITLESS:
            error = NoProgressError(
                f"the workers were started {FRUITLESS} times in a row and have failed each time before they "
                f"had written a new checkpoint. The last time {verdict.text}. {verdict.hint}".rstrip()
            )
            error.traceback = verdict.traceback
            raise error
        self.used += 1
