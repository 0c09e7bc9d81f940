"""What ended a set of workers: one sentence from exit codes, exit records and heartbeats.

Owns the choice of the rank at fault. Pure: it reads no clock, no file and no process.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from launcher.distributed.exit_records import ExitRecord, JobFailed, with_rank
from launcher.distributed.heartbeat import HeartbeatRecord, describe
from launcher.errors import ON_REQUEST, PreemptedError, StalledError

# How the ranks of a machine have ended.
DONE, STOPPED_ON_REQUEST, FAILED, HANGING = "done", "stopped_on_request", "failed", "hanging"
UNEXPECTED, STALLED, SAVED = 1, StalledError.exit_code, PreemptedError.exit_code
# Gloo aborts the rank that receives more than it expects, whichever of the two was wrong.
OTHER_SIZES = (
    "If Gloo says there that sizes differ, or nothing says why: look for a collective in the recipe that not "
    "every rank calls, or not with the same sizes."
)


@dataclass(frozen=True)
class RankResult:
    """What is known of one rank at the end of its attempt."""

    rank: int
    pid: int
    beat: HeartbeatRecord
    exit_code: int | None = None  # negative: the signal that killed it; None: alive until then
    record: ExitRecord | None = None  # how it ended, if it had time to record it
    is_sigstopped: bool = False  # by SIGSTOP, a terminal or a debugger
    host: str = ""  # its name, where there are several
    place: str = ""  # the line of the user's that it is in, of a rank that hangs

    @property
    def died_without_record(self) -> bool:
        """Whether it has ended without a record."""
        return self.exit_code is not None and self.record is None

    @property
    def failure(self) -> ExitRecord | None:
        """Its record, if of an error. A run that ended as asked has not failed."""
        record = self.record
        return record if record is not None and record.exit_code not in (0, *ON_REQUEST) else None


@dataclass(frozen=True)
class RunOutcome:
    """How an attempt ended; `exit_code` is the run's if there is no restart."""

    exit_code: int
    text: str = ""
    hint: str = ""  # printed after the text
    traceback: str = ""  # of the exception behind it, printed before the text
    restart_helps: bool | None = None  # None: as the exit code says
    micro_batch: int | None = None  # the micro-batch to restart with, after a shortage of memory
    crashed: bool = False  # of its own error or signal: not by SIGKILL, nor because another was lost
    stop: int = 0  # the signal by which the run was asked to stop, on whichever machine

    def error(self) -> JobFailed:
        """The error that ends the run."""
        text = f"{self.text.removesuffix('.')}. {self.hint}" if self.hint else self.text
        return JobFailed(text, self.exit_code, self.traceback)


@dataclass(frozen=True)
class GroupResult:
    """What is known of the ranks of one machine at the end of their attempt."""

    results: Sequence[RankResult]
    stop: int = 0  # the signal by which this machine's parent was asked to stop
    limit: str = ""  # the config key of the limit, where they were stopped for lack of progress

    @property
    def end(self) -> str:
        """How these ranks have ended, and so how those of other machines are to end."""
        codes = {result.exit_code for result in self.results}
        if codes == {0}:
            return DONE
        return HANGING if self.limit else STOPPED_ON_REQUEST if codes <= {0, *ON_REQUEST} else FAILED


def outcome_of(group_results: Sequence[GroupResult], stacks: Path) -> RunOutcome:
    """How the ranks of all machines have ended."""
    results = sorted(
        (result for group_result in group_results for result in group_result.results),
        key=lambda result: result.rank,
    )
    # Texts: "" where none hangs; if machines differ, launch.init_timeout_s, which sorts last.
    if limit := max(group_result.limit for group_result in group_results):
        outcome = hang_outcome(results)
        text = f"{outcome.text}; stacks of all ranks: {stacks}"
        outcome = replace(outcome, text=f"{text}. {limit} says how long a rank may be without progress")
    else:
        outcome = find_root_cause(results)
    return replace(outcome, stop=max(group_result.stop for group_result in group_results))


def find_root_cause(results: Sequence[RankResult]) -> RunOutcome:
    """The outcome of an attempt that has ended, or was ended after the first of its ranks had failed."""
    blamed = rank_at_fault(results)
    if blamed.died_without_record:
        return _outcome_without_record(blamed)
    if record := blamed.failure:
        records = [result.record for result in results if result.record is not None]
        is_alone = len(results) == 1 and not record.is_secondary
        text = record.error if is_alone else with_rank(record, records)
        if blamed.host and text.startswith(f"rank {blamed.rank} "):
            text = f"{text} (on {blamed.host})"
        outcome = RunOutcome(
            record.exit_code, text, traceback=record.traceback, crashed=not record.is_secondary
        )
        return replace(outcome, restart_helps=record.restart_helps, micro_batch=record.micro_batch)
    if alive := [result for result in results if result.exit_code is None]:
        text = "; ".join(f"{_name(result)} did not stop, {describe(result.beat)}" for result in alive)
        return RunOutcome(UNEXPECTED, text)
    asked = [result.record for result in results if result.record and result.record.exit_code in ON_REQUEST]
    return RunOutcome(asked[0].exit_code, asked[0].error) if asked else RunOutcome(0)


def rank_at_fault(results: Sequence[RankResult]) -> RankResult:
    """The rank to blame.

    The first rule that holds for some rank decides. Of several such ranks it is that with the earliest
    record, or without records the lowest.
    """

    rules: tuple[Callable[[RankResult], bool], ...] = (
        # Killed, or gone without a word: nothing that another rank does ends a rank so, but an abort.
        lambda result: result.died_without_record and result.exit_code != -signal.SIGABRT,
        lambda result: result.failure is not None and not result.failure.is_secondary,
        # NCCL's watchdog and Gloo's threads abort a process when another rank is lost.
        lambda result: result.died_without_record,
        # It lost another rank, and none has said why.
        lambda result: result.failure is not None,
        lambda result: True,
    )
    blamed = next(found for rule in rules if (found := [result for result in results if rule(result)]))
    return min(blamed, key=lambda result: (result.failure.time_s if result.failure else 0.0, result.rank))


def hang_outcome(results: Sequence[RankResult]) -> RunOutcome:
    """The outcome of an attempt in which some ranks, or all, have shown no sign of life for too long."""
    alive = [result for result in results if result.exit_code is None]
    behind = min(result.beat.order for result in alive)
    last = [result for result in alive if result.beat.order == behind]
    waited_for = [result for result in alive if result.is_sigstopped] or last
    hanging = (
        f"{_name(result)} hangs: {describe(result.beat)} for {result.beat.age_s:.0f} s"
        f"{' (stopped by SIGSTOP)' if result.is_sigstopped else ''}"
        f"{f' at {result.place}' if result.place else ''}"
        for result in waited_for
    )
    return RunOutcome(STALLED, "; ".join(hanging))


def _outcome_without_record(result: RankResult) -> RunOutcome:
    assert result.exit_code is not None
    place = describe(result.beat)
    if result.exit_code >= 0:
        text = f"{_name(result)} ended with exit code {result.exit_code} and no error, {place}"
        return RunOutcome(UNEXPECTED, text, crashed=True)
    number = -result.exit_code
    hint = {
        signal.SIGKILL: "If nothing else sent it, the kernel did because memory ran out: see dmesg.",
        signal.SIGSEGV: f"Its stack is on stderr above. {OTHER_SIZES}",
        signal.SIGABRT: f"Its message is on stderr above. {OTHER_SIZES}",
    }.get(number, "")  # type: ignore[call-overload]  # a Signals is an int
    name = {each.value: each.name for each in signal.Signals}.get(number, f"signal {number}")
    text = f"rank {result.rank} was killed by {name} ({_process(result)}) {place}"
    return RunOutcome(UNEXPECTED, text, hint, crashed=number != signal.SIGKILL)


def _name(result: RankResult) -> str:
    return f"rank {result.rank} ({_process(result)})"


def _process(result: RankResult) -> str:
    return f"pid {result.pid}{f' on {result.host}' if result.host else ''}"
