"""What ended a set of workers: one sentence from exit codes, exit records and heartbeats.

Owns the choice of the rank at fault. Pure: it reads no clock, no file and no process.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from launcher.distributed.exit_records import ExitRecord, with_rank
from launcher.distributed.heartbeat import FINISHING, Beat, where
from launcher.errors import ON_REQUEST, LauncherError, PreemptedError, StalledError

DONE, ASKED, FAILED, HANGING = "done", "asked", "failed", "hanging"  # how the ranks of a machine have ended
UNEXPECTED, STALLED, SAVED = 1, StalledError.exit_code, PreemptedError.exit_code
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
    record: ExitRecord | None = None  # how it ended, if it had time to record it
    stopped: bool = False  # by SIGSTOP, a terminal or a debugger
    host: str = ""  # its name, where there are several

    @property
    def is_silent(self) -> bool:
        """Whether it has ended without a record."""
        return self.exit_code is not None and self.record is None

    @property
    def failure(self) -> ExitRecord | None:
        """Its record, if of an error. A run that ended as asked has not failed."""
        record = self.record
        return record if record is not None and record.exit_code not in (0, *ON_REQUEST) else None


@dataclass(frozen=True)
class AttemptVerdict:
    """How a generation ended; `exit_code` is the run's if there is no restart."""

    exit_code: int
    text: str = ""
    hint: str = ""  # printed after the text
    last_step: int | None = None  # of a run that was ended while it wrote its result and report
    traceback: str = ""  # of the exception behind it, printed before the text
    restart_helps: bool | None = None  # None: as the exit code says
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


class RunFailed(LauncherError):
    """The workers of a run have ended without a result."""

    def __init__(self, verdict: AttemptVerdict) -> None:
        text = verdict.text
        super().__init__(f"{text.removesuffix('.')}. {verdict.hint}" if verdict.hint else text)
        self.exit_code = verdict.exit_code
        self.traceback = verdict.traceback


def verdict_of(reports: Sequence[GenerationReport], stacks: Path) -> AttemptVerdict:
    """The verdict on the ranks of all machines."""
    fates = sorted((fate for report in reports for fate in report.fates), key=lambda fate: fate.rank)
    if any(report.hanging for report in reports):
        verdict = hang(fates)
        return replace(verdict, text=f"{verdict.text}; stacks of all ranks: {stacks}")
    # Each machine knows which of its ranks failed first; between machines their clocks have to decide.
    claims = {report.first_failure for report in reports}
    ended_s = {fate.rank: fate.record.time_s for fate in fates if fate.record and fate.rank in claims}
    return judge(fates, min(ended_s, key=ended_s.__getitem__, default=None))


def judge(fates: Sequence[Fate], first_failure: int | None) -> AttemptVerdict:
    """The verdict on a generation that has ended, or was ended after the first of its ranks had failed.

    `first_failure` is the rank that claimed to be the first, if one did.
    """
    blamed = rank_at_fault(fates, first_failure)
    if blamed.is_silent:
        return _of_silent(blamed)
    if record := blamed.failure:
        text = _said_by(record, fates)
        if blamed.host and text.startswith(f"rank {blamed.rank} "):
            text = f"{text} (on {blamed.host})"
        verdict = AttemptVerdict(record.exit_code, text, traceback=record.traceback)
        return replace(verdict, restart_helps=record.restart_helps, halved=record.halved)
    if alive := [fate for fate in fates if fate.exit_code is None]:
        finishing = all(fate.beat.phase in FINISHING for fate in fates)
        text = "; ".join(f"{_name(fate)} did not stop, {where(fate.beat)}" for fate in alive)
        return AttemptVerdict(UNEXPECTED, text, last_step=alive[0].beat.step if finishing else None)
    asked = [fate.record for fate in fates if fate.record and fate.record.exit_code in ON_REQUEST]
    return AttemptVerdict(asked[0].exit_code, asked[0].error) if asked else AttemptVerdict(0)


def rank_at_fault(fates: Sequence[Fate], first_failure: int | None) -> Fate:
    """The rank to blame: of the first rule that holds for any, the one that ended first."""

    def failed_itself(fate: Fate) -> bool:
        return fate.failure is not None and not fate.failure.is_secondary

    rules: tuple[Callable[[Fate], bool], ...] = (
        # Killed, or gone without a word: nothing that another rank does ends a rank so, but an abort.
        lambda fate: fate.is_silent and fate.exit_code != -signal.SIGABRT,
        lambda fate: failed_itself(fate) and fate.rank == first_failure,
        failed_itself,
        # NCCL's watchdog and Gloo's threads abort a process when another rank is lost.
        lambda fate: fate.is_silent,
        # It lost another rank, and none has said why.
        lambda fate: fate.failure is not None and fate.rank == first_failure,
        lambda fate: fate.failure is not None,
        lambda fate: True,
    )
    blamed = next(found for rule in rules if (found := [fate for fate in fates if rule(fate)]))
    return min(blamed, key=lambda fate: (fate.failure.time_s if fate.failure else 0.0, fate.rank))


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


def _said_by(cause: ExitRecord, fates: Sequence[Fate]) -> str:
    """The error of a rank, without its number if other ranks have raised the same one."""
    if len(fates) == 1 and not cause.is_secondary:
        of_rank, error = f"rank {cause.rank} ", cause.error
        return f"this process {error.removeprefix(of_rank)}" if error.startswith(of_rank) else error
    return with_rank(cause, [fate.record for fate in fates if fate.record is not None])


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
