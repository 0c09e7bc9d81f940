"""What ended a set of workers: one sentence from exit codes, recorded errors and heartbeats.

Owns the choice of the rank at fault. Pure: it reads no clock, no file and no process.
"""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from launcher.distributed.failures import Departure, attributed
from launcher.distributed.heartbeat import FINISHING, Beat, where
from launcher.errors import ON_REQUEST, LauncherError, PreemptedError, StalledError

DONE, ASKED, FAILED, HANGING = "done", "asked", "failed", "hanging"  # how the ranks of a machine have ended
UNEXPECTED, STALLED = 1, StalledError.exit_code
PREEMPTED = PreemptedError.exit_code
# Gloo aborts the rank that receives more than it expects, whichever of the two was wrong.
OTHER_SIZES = (
    "If Gloo says there that sizes differ, or nothing says why: look for a collective in the recipe that not "
    "every rank calls, or not with the same sizes."
)


@dataclass(frozen=True)
class Fate:
    """What is known of one rank at the end of its generation."""

    rank: int
    pid: int
    beat: Beat
    exit_code: int | None = None  # negative: the signal that killed it; None: alive until then
    departure: Departure | None = None  # how it ended, if it had time to record it
    stopped: bool = False  # by SIGSTOP, a terminal or a debugger
    host: str = ""  # its name, where there are several

    @property
    def silent(self) -> bool:
        return self.exit_code is not None and self.departure is None

    @property
    def failure(self) -> Departure | None:
        """How it left, if with an error. A run that ended as asked has not failed."""
        left = self.departure
        return left if left is not None and left.exit_code not in (0, *ON_REQUEST) else None

    @property
    def blames_another(self) -> bool:
        """Whether its error is that it lost another rank, or waited for one without success."""
        departure = self.departure
        return departure is not None and (departure.exit_code == STALLED or departure.lost)


@dataclass(frozen=True)
class AttemptVerdict:
    """How a generation ended; `exit_code` is the run's if there is no restart."""

    exit_code: int
    text: str = ""
    hint: str = ""  # printed after the text
    last_step: int | None = None  # of a run that was ended while it wrote its result and report
    traceback: str = ""  # of the exception behind it, printed before the text
    restart_helps: bool = False  # whatever the exit code
    halved: int | None = None  # the micro-batch to restart with, after a shortage of memory


@dataclass(frozen=True)
class GenerationReport:
    """What is known of the ranks of one machine at the end of their generation."""

    fates: Sequence[Fate]
    first_failure: int | None = None  # the rank that claimed to be the first
    hanging: bool = False  # some have shown no sign of life for too long

    @property
    def end(self) -> str:
        """How these ranks have ended, and so how those of other machines are to end."""
        codes = {fate.exit_code for fate in self.fates}
        if codes == {0}:
            return DONE
        return HANGING if self.hanging else ASKED if codes <= {0, *ON_REQUEST} else FAILED


def verdict_of(reports: Sequence[GenerationReport], stall_s: float, stacks: Path) -> AttemptVerdict:
    """The verdict on the ranks of all machines."""
    fates = sorted((fate for report in reports for fate in report.fates), key=lambda fate: fate.rank)
    if any(report.hanging for report in reports):
        verdict = hang(fates)
        return replace(verdict, text=f"{verdict.text}; stacks of all ranks: {stacks}")
    # Each machine knows which of its ranks failed first; between machines their clocks have to decide.
    claims = {report.first_failure for report in reports}
    left_s = {fate.rank: fate.departure.time_s for fate in fates if fate.departure and fate.rank in claims}
    return judge(fates, min(left_s, key=left_s.__getitem__, default=None), stall_s)


class RunFailed(LauncherError):
    """The workers of a run have ended without a result."""

    def __init__(self, verdict: AttemptVerdict) -> None:
        super().__init__(f"{verdict.text}. {verdict.hint}".strip() if verdict.hint else verdict.text)
        self.exit_code = verdict.exit_code
        self.traceback = verdict.traceback


def judge(fates: Sequence[Fate], first_failure: int | None, stall_s: float) -> AttemptVerdict:
    """The verdict on a generation that has ended, or was ended after the first of its ranks had failed.

    `first_failure` is the rank that claimed to be the first, if one did. `stall_s` is the longest time that
    a rank may stay in one phase: who fails because it waited so long for another is not the culprit.
    """
    blamed = min(fates, key=lambda fate: _innocence(fate, fates, first_failure, stall_s))
    if blamed.silent:
        return _of_silent(blamed)
    if left := blamed.failure:
        text = _said_by(left, fates)
        if blamed.host and text.startswith(f"rank {blamed.rank} "):
            text = f"{text} (on {blamed.host})"
        verdict = AttemptVerdict(left.exit_code, text, traceback=left.traceback)
        return replace(verdict, restart_helps=left.restart_helps, halved=left.halved)
    alive = [fate for fate in fates if fate.exit_code is None]
    if any(fate.failure for fate in fates):
        return hang([blamed])
    if alive:
        finishing = all(fate.beat.phase in FINISHING for fate in fates)
        text = "; ".join(f"{_name(fate)} did not stop, {where(fate.beat)}" for fate in alive)
        return AttemptVerdict(UNEXPECTED, text, last_step=alive[0].beat.step if finishing else None)
    asked = [fate.departure for fate in fates if fate.departure and fate.departure.exit_code in ON_REQUEST]
    return AttemptVerdict(asked[0].exit_code, asked[0].error) if asked else AttemptVerdict(0)


def hang(fates: Sequence[Fate]) -> AttemptVerdict:
    """The verdict on a generation in which some ranks, or all, have shown no sign of life for too long."""
    alive = [fate for fate in fates if fate.exit_code is None]
    behind = min(fate.beat.order for fate in alive)
    last = [fate for fate in alive if fate.beat.order == behind]
    waited_for = [fate for fate in alive if fate.stopped] or last
    hanging = (
        f"{_name(fate)} hangs: {where(fate.beat)} for {fate.beat.age_s:.0f} s"
        f"{' (stopped by SIGSTOP)' if fate.stopped else ''}"
        for fate in waited_for
    )
    return AttemptVerdict(STALLED, "; ".join(hanging))


def _innocence(
    fate: Fate, fates: Sequence[Fate], first_failure: int | None, stall_s: float
) -> tuple[int, float, int]:
    """A value to compare ranks by: the one with the lowest value is the most likely cause.

    SIGABRT is often a consequence: NCCL's watchdog and Gloo's threads abort a process when another rank is
    lost. SIGSEGV and similar signals are a rank's own fault.
    """
    if fate.silent:
        return (4 if fate.exit_code == -signal.SIGABRT else 0), 0.0, fate.rank
    failure = fate.failure
    if failure is not None and not fate.blames_another:
        own = 1 if fate.rank == first_failure else 2
        return (3 if failure.shared else own), failure.time_s, fate.rank
    if fate.exit_code is None and _is_waited_for(fate, fates, stall_s):
        return 5, -fate.beat.age_s, fate.rank
    if failure is not None:
        return (6 if fate.rank == first_failure else 7), failure.time_s, fate.rank
    return 8, 0.0, fate.rank


def _is_waited_for(fate: Fate, fates: Sequence[Fate], stall_s: float) -> bool:
    """Whether a live rank has kept others waiting so long that they have given up."""
    gave_up = [other for other in fates if other.blames_another]
    # About as long as those have waited that gave up after stall_s.
    long = fate.beat.age_s >= max(stall_s - 2, stall_s / 2)
    return long and bool(gave_up) and all(fate.beat.order < other.beat.order for other in gave_up)


def _said_by(blamed: Departure, fates: Sequence[Fate]) -> str:
    """The error of a rank, without its number if other ranks have raised the same one."""
    if len(fates) == 1 and not blamed.lost:
        of_rank, error = f"rank {blamed.rank} ", blamed.error
        return f"this process {error.removeprefix(of_rank)}" if error.startswith(of_rank) else error
    return attributed(blamed, [fate.departure for fate in fates if fate.departure is not None])


def _of_silent(fate: Fate) -> AttemptVerdict:
    assert fate.exit_code is not None
    place = where(fate.beat)
    if fate.exit_code >= 0:
        text = f"{_name(fate)} ended with exit code {fate.exit_code} and no error, {place}"
        return AttemptVerdict(UNEXPECTED, text)
    number = -fate.exit_code
    hint = {
        signal.SIGKILL: "If nothing else sent it, the kernel did because memory ran out: see dmesg.",
        signal.SIGSEGV: f"Its stack is on stderr above. {OTHER_SIZES}",
        signal.SIGABRT: f"Its message is on stderr above. {OTHER_SIZES}",
    }.get(number, "")  # type: ignore[call-overload]  # a Signals is an int
    name = {each.value: each.name for each in signal.Signals}.get(number, f"signal {number}")
    text = f"rank {fate.rank} was killed by {name} ({_process(fate)}) {place}"
    return AttemptVerdict(UNEXPECTED, text, hint)


def _name(fate: Fate) -> str:
    return f"rank {fate.rank} ({_process(fate)})"


def _process(fate: Fate) -> str:
    return f"pid {fate.pid}{f' on {fate.host}' if fate.host else ''}"
