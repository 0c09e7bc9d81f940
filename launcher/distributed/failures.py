"""How the ranks of a job fail: which failed first, and why.

Owns the patterns that tell the error of a rank which has lost another one from a rank's own, and the
sentences that name a rank. Imports no torch.
"""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from launcher.config.user_code import short_traceback
from launcher.distributed import nccl
from launcher.distributed.env import LaunchEnv, numbered
from launcher.distributed.flight_recorder import last_call, latest_calls
from launcher.distributed.last_words import Departure, Words
from launcher.distributed.store import awaited_in_vain, no_store, unless_lost
from launcher.errors import ON_REQUEST, CollectiveError, LauncherError, StalledError, described, whole_text
from launcher.process.shortage import shortage_of

if TYPE_CHECKING:
    import torch.distributed as dist

ASSEMBLE_S = 2.0  # between the first and the last rank that give up on a collective
OWN_RANK = re.compile(r"\brank ?\d+")
TIMED_OUT = re.compile(r"timed out|(wait|application) timeout", re.IGNORECASE)  # in Gloo's words
# Errors of a rank that failed because another one did: of Gloo, NCCL or the store. Matched against the
# error's message only.
OF_ANOTHER = re.compile(
    r"gloo|nccl|DistBackendError|DistNetworkError|DistStoreError|Wait timeout|Broken pipe|"
    r"Application timeout|Connection (closed|reset)",
    re.IGNORECASE,
)


def is_of_another(error: BaseException) -> bool:
    """Whether an exception, by its class and text, is that of a rank which lost another one."""
    text = f"{type(error).__name__}: {whole_text(error)}"
    return bool(OF_ANOTHER.search(text)) and not nccl.is_own(text)


def is_loss(error: BaseException) -> bool:
    """Whether an error of Gloo or NCCL says that another rank has closed its connection."""
    text = whole_text(error)
    lost = OF_ANOTHER.search(text) and not nccl.is_own(text)
    return isinstance(error, RuntimeError) and bool(lost) and not TIMED_OUT.search(text)


def departure_of(rank: int, error: BaseException | None = None) -> Departure:
    """How this rank left: the error as a sentence, and the traceback of one that needs it."""
    if error is None:
        return Departure(rank, time.time())
    error = shortage_of(error, f"rank {rank}") or error
    if isinstance(error, LauncherError):
        shared = isinstance(error, CollectiveError)
        return Departure(
            rank,
            time.time(),
            str(error),
            error.exit_code,
            shared,
            traceback=error.traceback,
            restart_helps=error.restart_helps,
        )
    text, lost = described(error, with_notes=True), is_of_another(error)
    called = last_call(latest_calls()) if is_loss(error) else ""
    trace = "" if lost else short_traceback(error)
    return Departure(rank, time.time(), text, 1, last_call=called, lost=lost, traceback=trace)


class JobFailed(LauncherError):
    """The job failed on some rank, whose departure gives the reason."""

    def __init__(self, text: str, departure: Departure) -> None:
        super().__init__(text)
        self.exit_code = departure.exit_code
        self.traceback = departure.traceback


def attributed(blamed: Departure, departures: Sequence[Departure]) -> str:
    """The error of `blamed` with its rank, or without it if other ranks left with the same message.

    `departures` are those of all ranks that recorded one, including `blamed`.
    """
    error, of_rank = blamed.error, f"rank {blamed.rank} "
    if blamed.shared:
        return error
    alike = [each for each in departures if _without_ranks(each.error) == _without_ranks(error)]
    if not blamed.lost and len(alike) > 1:
        # Parents of several machines may leave with one error, of one rank.
        of_each = all(each.error.startswith(f"rank {each.rank} ") for each in alike)
        return f"each rank {error.removeprefix(of_rank)}" if of_each else error
    return error if error.startswith(of_rank) else f"{of_rank}failed: {error}"


def _without_ranks(error: str) -> str:
    """The error without rank numbers, to compare errors of different ranks."""
    return OWN_RANK.sub("rank", error)


def failure_of_another(words: Words, rank: int) -> LauncherError | None:
    """The failure that ended the job, with its rank and exit code, if another rank than `rank` had it.

    Waits briefly for the departure of the rank that failed first. None if there is none.
    """
    with unless_lost(), suppress(ValueError):
        first = words.first_failure()
        if first is None or first == rank:
            return None
        left, deadline = None, time.monotonic() + ASSEMBLE_S
        while left is None and time.monotonic() < deadline:
            time.sleep(0.02)  # rank 0 alone asks
            left = words.of(first)
        if left and left.error and not left.lost and left.exit_code not in ON_REQUEST:
            return JobFailed(attributed(left, [left]), left)
    return None


def give_reason(words: Words, rank: int, error: BaseException) -> None:
    """Record why this rank fails, for ranks whose main thread cannot find out: see `reason_of`."""
    with unless_lost():
        words.leave(departure_of(rank, error))


def reason_of(words: Words, rank: int) -> tuple[str, int]:
    """Why a rank that has claimed the first failure failed, and its exit code. Raises DistError."""
    left = words.of(rank)
    if left is None:
        return f"rank {rank} failed. Its log and its stderr say why.", LauncherError.exit_code
    # The error may be another rank's, as that of one which did not join a collective.
    return left.error if left.error.startswith("rank ") else attributed(left, [left]), left.exit_code


def stall_of(
    error: BaseException, store: dist.Store | None, job: str, launch: LaunchEnv
) -> StalledError | None:
    """The ranks that did not join a collective, if `error` is a timeout; None for other errors.

    Ranks that waited record it in the store; those that have not done so shortly after are the ones that
    hang.
    """
    if store is None or not (isinstance(error, RuntimeError) and TIMED_OUT.search(whole_text(error))):
        return None
    from torch.distributed import DistError

    gave_up = f"job/{job}/gave_up/{{}}"
    try:
        store.set(gave_up.format(launch.rank), "")
        missing = awaited_in_vain(store, gave_up, range(launch.world_size), ASSEMBLE_S)
    except DistError:
        waited = f"rank {launch.rank} waited too long for a collective"
        return StalledError(f"{waited}, and {no_store()} launch.stall_s says how long a collective may take.")
    if not missing:
        return StalledError("a collective took too long although all ranks joined it: the network stalls.")
    return StalledError(
        f"{numbered(missing)} did not join a collective in time: it hangs or has been "
        "stopped. launch.stall_s (before the first step launch.init_timeout_s) says how long others wait."
    )
