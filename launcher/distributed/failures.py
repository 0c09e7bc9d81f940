"""How the ranks of a job fail: which failed first, how each left, and why.

Owns where they record it: memory shared with their parent, or the store of the ranks; the patterns that tell
the error of a rank which has lost another one from a rank's own; and the sentences that name a rank. In
memory a rank writes its own row, without a lock, a file or a wait, so that it can be read whatever killed the
rank: a text counts only once its length is written, which comes last. A FileStore would not do: it reads a
record that was cut short by a kill or a full disk for ever, in C++. Imports no torch.
"""

from __future__ import annotations

import json
import mmap
import re
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING

from launcher.config.user_code import short_traceback
from launcher.distributed import nccl
from launcher.distributed.env import LaunchEnv, numbered
from launcher.distributed.store import LEAVE_S, awaited_in_vain, limit_silence, no_store, unless_lost
from launcher.errors import (
    ON_REQUEST,
    LauncherError,
    OutOfMemoryError,
    StalledError,
    described,
    visible,
    whole_text,
)
from launcher.process.shortage import shortage_of

if TYPE_CHECKING:
    import torch.distributed as dist

ASSEMBLE_S = 2.0  # between the first and the last rank that give up on a collective
OWN_RANK = re.compile(r"\brank ?\d+")
TIMED_OUT = re.compile(r"timed out|(wait|application) timeout", re.IGNORECASE)  # in Gloo's words
# Errors of a rank that failed because another one did: of Gloo, NCCL or the store.
OF_ANOTHER = re.compile(
    r"(?i)gloo|nccl|DistBackendError|DistNetworkError|DistStoreError|Wait timeout|Broken pipe|"
    r"Application timeout|Connection (closed|reset)"
)
ROW_BYTES, _TEXT_AT = 1 << 20, 16  # memory is used only where it is written to


@dataclass(frozen=True)
class Departure:
    """How one rank left a job; `error` is empty if it ended well."""

    rank: int
    time_s: float
    error: str = ""
    exit_code: int = 0
    shared: bool = False  # the error is not this rank's alone: its text names those whose it is, if any
    lost: bool = False  # the error is that of a rank which lost another one: not the origin
    traceback: str = ""  # of an exception, to be printed before the error
    restart_helps: bool = False  # whatever the exit code
    halved: int | None = None  # the micro-batch to restart with, after a shortage of memory


class LastWords:
    """The rows of all ranks of a machine. Created before the ranks are forked, which inherit its memory."""

    def __init__(self, num_ranks: int) -> None:
        # Anonymous and shared.
        self._rows = {rank: memoryview(mmap.mmap(-1, ROW_BYTES)) for rank in range(num_ranks)}
        self.restart()

    def restart(self, first_rank: int = 0) -> None:
        """Forget all ranks, before they are started again; `first_rank` is the lowest of this machine."""
        self._rows = dict(enumerate(self._rows.values(), first_rank))
        for row in self._rows.values():
            row[:_TEXT_AT] = bytes(_TEXT_AT)

    def fail(self, rank: int) -> None:
        """Record that a rank fails now, unless it has done so before."""
        head = self._head(rank)
        head[0] = head[0] or time.monotonic()

    def first_failure(self) -> int | None:
        """The rank that failed first, if any has failed."""
        failed_s = {rank: self._head(rank)[0] for rank in self._rows}
        return min(filter(failed_s.get, failed_s), key=failed_s.__getitem__, default=None)

    def leave(self, departure: Departure) -> None:
        """Record how a rank leaves. Without room: no traceback, and an error without its middle."""
        row, said = self._rows[departure.rank], json.dumps(asdict(departure)).encode()
        if len(said) > len(row) - _TEXT_AT:
            short = visible(departure.error, ROW_BYTES // 16)  # a character of JSON takes up to 12 bytes
            said = json.dumps(asdict(replace(departure, error=short, traceback=""))).encode()
        # The text first: a reader takes it for complete once there is a length.
        row[_TEXT_AT : _TEXT_AT + len(said)] = said
        self._head(departure.rank)[1] = len(said)

    def of(self, rank: int) -> Departure | None:
        """What a rank recorded as it left; None if it has not, or was killed before it was done."""
        text = self._rows[rank][_TEXT_AT : _TEXT_AT + int(self._head(rank)[1])]
        return Departure(**json.loads(bytes(text))) if text else None

    def _head(self, rank: int) -> memoryview[float]:
        """When the rank failed, by the machine's monotonic clock, and the bytes of its text; 0: not yet."""
        return self._rows[rank][:_TEXT_AT].cast("d")


class StoredWords:
    """The same in the store of a job: of ranks without a parent that could read their memory.

    Every method but `fail` raises DistError if the store is gone.
    """

    def __init__(self, store: dist.Store, job: str) -> None:
        self._store, self._left = store, f"job/{job}/left/{{}}"
        self._first = f"job/{job}/first_failure"

    def fail(self, rank: int) -> None:
        """Record that a rank fails now. The first claim counts, because the clocks of machines differ."""
        limit_silence(LEAVE_S)
        with unless_lost():  # the other ranks notice by themselves
            self._store.compare_set(self._first, "", str(rank))

    def first_failure(self) -> int | None:
        """The rank that failed first, if any has failed."""
        return int(self._store.get(self._first)) if self._store.check([self._first]) else None

    def leave(self, departure: Departure) -> None:
        """Record how a rank leaves, or what it fails of and will leave with."""
        self._store.set(self._left.format(departure.rank), json.dumps(asdict(departure)))

    def of(self, rank: int) -> Departure | None:
        """What a rank has recorded, if it has."""
        key = self._left.format(rank)
        return Departure(**json.loads(self._store.get(key))) if self._store.check([key]) else None

    def absent(self, ranks: Iterable[int], wait_s: float) -> list[int]:
        """Those of the ranks that have recorded nothing within the time."""
        return awaited_in_vain(self._store, self._left, ranks, wait_s)


Words = LastWords | StoredWords


def words_of(store: dist.Store | None, job: str) -> StoredWords:
    """The last words of a job without a parent."""
    from torch.distributed import HashStore

    return StoredWords(HashStore() if store is None else store, job)


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
    left = Departure(rank, time.time())
    if error is None:
        return left
    error = shortage_of(error, f"rank {rank}") or error
    if isinstance(error, LauncherError):
        left = replace(left, error=str(error), exit_code=error.exit_code, traceback=error.traceback)
        left = replace(left, restart_helps=error.restart_helps, shared=error.shared)
        return replace(left, halved=error.halved) if isinstance(error, OutOfMemoryError) else left
    left = replace(left, error=described(error, with_notes=True), exit_code=1, lost=is_of_another(error))
    return replace(left, traceback="" if left.lost else short_traceback(error))


class JobFailed(LauncherError):
    """The job failed on some rank, which has recorded the reason."""

    def __init__(self, text: str, exit_code: int, traceback: str = "") -> None:
        super().__init__(text)
        self.exit_code, self.traceback = exit_code, traceback


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
            return JobFailed(attributed(left, [left]), left.exit_code, left.traceback)
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
