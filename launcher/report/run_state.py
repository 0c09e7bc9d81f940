"""The state of a run as its files show it: the one judgement that `report`, `watch` and comparisons share.

A run that ended by itself has written its end to status.json. A run that was killed has not: what remains of
it is its lock, which names its process, and the time of its last sign of life. Pure: contents of files in,
words out.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from launcher.config.messages import directory_override
from launcher.errors import TO_RESUME
from launcher.run_dir.lock import Holder
from launcher.run_dir.status import Status
from launcher.telemetry.formatting import duration

BLANK = Status(state="")  # of a file that says nothing
GOING = ("starting", "running")
ENDED = ("done", "failed", "stopped", "preempted", "pruned")
KILLED, NO_RESULT = "killed", "ended without a result"
EXIT_KILLED = 1  # the exit code of a run that could not report one
SILENT_S = 60.0  # without a change of status.json, which is due every 10 s: a run shows no sign of life


@dataclass(frozen=True)
class RunState:
    """What the files of a run say at one moment, `now` in unix seconds."""

    now: float
    status: Status = BLANK  # where the file is missing or damaged
    last_event_time: float | None = None
    holder: Holder | None = None  # the process that the run belongs to; None if unknown
    holder_has_ended: bool | None = None  # None if unknown; true only if it had before the files were read

    @property
    def name(self) -> str:
        """One of ENDED, killed, running, starting, or that the run ended without a result."""
        if self.status.state in ENDED:
            return self.status.state
        if self.holder_has_ended:
            return KILLED
        # Every run holds a lock, and writes its status soon after.
        if self.holder is None and self.status.state not in GOING:
            return NO_RESULT
        return self.status.state if self.status.state in GOING else "running"

    @property
    def exit_code(self) -> int:
        """The exit code of a run that has ended; `EXIT_KILLED` if it could not write one."""
        code = self.status.exit if self.name in ENDED else None
        return code if code is not None and 0 <= code < 256 else EXIT_KILLED

    @property
    def age_s(self) -> float | None:
        """Seconds since the last sign of life; None without a recorded one."""
        times = [time for time in (self.status.updated, self.last_event_time) if time]
        return max(0.0, self.now - max(times)) if times else None

    @property
    def silent_s(self) -> float:
        """Seconds for which a run that should be going shows no sign of life; 0 below `SILENT_S`."""
        age_s = self.age_s
        return age_s if self.name in GOING and age_s is not None and age_s >= SILENT_S else 0.0

    def note(self, directory: Path) -> str:
        """A sentence on a run in `directory` that ended without its end, or may have; "" for others."""
        resume = f"{TO_RESUME} {directory_override('run.dir', directory)}"
        wrote = "wrote nothing" if self.age_s is None else f"last wrote {duration(self.age_s)} ago"
        if self.name == KILLED and self.holder is not None:
            gone = f"process {self.holder.pid} of this run no longer exists"
            return f"{gone}, and {wrote}: it was killed. {resume}"
        if self.name == NO_RESULT:
            return f"no process holds this run, which {wrote}: it ended without a result. {resume}"
        if self.holder_has_ended is None and self.silent_s:
            whose = "of another machine" if self.holder is not None else "not known"
            return f"its process is {whose}, and {wrote}: it is not known whether it still runs."
        return ""
