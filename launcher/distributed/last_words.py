"""When each rank failed and how it left: in memory shared with their parent, or in the store of the ranks.

Owns the table and the keys. In memory a rank writes its own row, without a lock, a file or a wait, so that it
can be read whatever killed the rank: a text counts only once its length is written, which comes last. A
FileStore would not do: it reads a record that was cut short by a kill or a full disk for ever, in C++.
Imports no torch.
"""

from __future__ import annotations

import json
import mmap
import struct
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING

from launcher.distributed.store import LEAVE_S, awaited_in_vain, limit_silence, unless_lost
from launcher.errors import visible

if TYPE_CHECKING:
    import torch.distributed as dist

_FAILED_S = struct.Struct("=d")  # of the machine's monotonic clock; 0: it has not failed
_LENGTH = struct.Struct("=q")  # after it: of the text in bytes; 0: there is none
_TEXT_AT = _FAILED_S.size + _LENGTH.size
ROW_BYTES = 1 << 20  # memory is used only where it is written to


@dataclass(frozen=True)
class Departure:
    """How one rank left a job; `error` is empty if it ended well."""

    rank: int
    time_s: float
    error: str = ""
    exit_code: int = 0
    shared: bool = False  # the error is about other ranks, which its text names
    last_call: str = ""  # the collective in which it lost another rank
    lost: bool = False  # the error is that of a rank which lost another one: not the origin
    traceback: str = ""  # of an exception, to be printed before the error
    restart_helps: bool = False  # whatever the exit code

    def as_text(self) -> str:
        """The departure as JSON, for `of_text`."""
        return json.dumps(asdict(self))

    @classmethod
    def of_text(cls, text: str | bytes) -> Departure:
        """What `as_text` was called on. Raises ValueError for a text that was cut short."""
        return cls(**json.loads(text))


class LastWords:
    """The rows of all ranks of a machine. Created before the ranks are forked, which inherit its memory."""

    def __init__(self, num_ranks: int) -> None:
        self._memory = memoryview(mmap.mmap(-1, num_ranks * ROW_BYTES))  # anonymous and shared
        self.restart()

    def restart(self, first_rank: int = 0) -> None:
        """Forget all ranks, before they are started again; `first_rank` is the lowest of this machine."""
        starts = range(0, len(self._memory), ROW_BYTES)
        self._rows = {
            rank: self._memory[start : start + ROW_BYTES] for rank, start in enumerate(starts, first_rank)
        }
        for row in self._rows.values():
            row[:_TEXT_AT] = bytes(_TEXT_AT)

    def fail(self, rank: int) -> None:
        """Record that a rank fails now, unless it has done so before."""
        if not self._failed_s(rank):
            self._rows[rank][: _FAILED_S.size] = _FAILED_S.pack(time.monotonic())

    def first_failure(self) -> int | None:
        """The rank that failed first, if any has failed."""
        return min(filter(self._failed_s, self._rows), key=self._failed_s, default=None)

    def leave(self, departure: Departure) -> None:
        """Record how a rank leaves. Without room: no traceback, and an error without its middle."""
        row, said = self._rows[departure.rank], departure.as_text().encode()
        if len(said) > len(row) - _TEXT_AT:
            said = replace(departure, error=visible(departure.error), traceback="").as_text().encode()
        # The text first: a reader takes it for complete once there is a length.
        row[_TEXT_AT : _TEXT_AT + len(said)] = said
        row[_FAILED_S.size : _TEXT_AT] = _LENGTH.pack(len(said))

    def of(self, rank: int) -> Departure | None:
        """What a rank recorded as it left; None if it has not, or was killed before it was done."""
        row = self._rows[rank]
        (length,) = _LENGTH.unpack_from(row, _FAILED_S.size)
        return Departure.of_text(bytes(row[_TEXT_AT : _TEXT_AT + length])) if length else None

    def _failed_s(self, rank: int) -> float:
        failed_s: float = _FAILED_S.unpack_from(self._rows[rank])[0]
        return failed_s


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
        self._store.set(self._left.format(departure.rank), departure.as_text())

    def of(self, rank: int) -> Departure | None:
        """What a rank has recorded, if it has."""
        key = self._left.format(rank)
        return Departure.of_text(self._store.get(key)) if self._store.check([key]) else None

    def absent(self, ranks: Iterable[int], wait_s: float) -> list[int]:
        """Those of the ranks that have recorded nothing within the time."""
        return awaited_in_vain(self._store, self._left, ranks, wait_s)


Words = LastWords | StoredWords


def words_of(store: dist.Store | None, job: str) -> Words:
    """The last words of a job without a parent."""
    return LastWords(1) if store is None else StoredWords(store, job)
