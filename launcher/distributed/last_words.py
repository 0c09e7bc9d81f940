"""When each rank failed and how it left, in memory shared with the process that started the ranks.

Owns the table. A rank writes its own row, without a lock, a file or a wait, so that it can be read whatever
killed the rank: a text counts only once its length is written, which comes last. A FileStore would not do: it
reads a record that was cut short by a kill or a full disk for ever, in C++. Imports no torch.
"""

from __future__ import annotations

import json
import mmap
import struct
import time
from dataclasses import asdict, dataclass, replace

from launcher.errors import visible

_FAILED_S = struct.Struct("=d")  # of the machine's monotonic clock; 0: it has not failed
_LENGTH = struct.Struct("=q")  # of the text in bytes; 0: there is none
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
        self._num_ranks = num_ranks
        self.first_rank = 0  # of this machine
        self._memory = mmap.mmap(-1, num_ranks * ROW_BYTES)  # anonymous and shared

    def clear(self) -> None:
        """Forget all ranks, before they are started again."""
        for rank in self._ranks:
            self._write(rank, 0, bytes(_TEXT_AT))

    def fail(self, rank: int) -> None:
        """Record that a rank fails now, unless it has done so before."""
        if not self._failed_s(rank):
            self._write(rank, 0, _FAILED_S.pack(time.monotonic()))

    def first_failure(self) -> int | None:
        """The rank that failed first, if any has failed."""
        failed = {rank: at_s for rank in self._ranks if (at_s := self._failed_s(rank))}
        return min(failed, key=lambda rank: failed[rank], default=None)

    def leave(self, departure: Departure) -> None:
        """Record how a rank leaves. Without room: no traceback, and an error without its middle."""
        said = departure.as_text().encode()
        if len(said) > ROW_BYTES - _TEXT_AT:
            # Or it would be written over the row of the next rank.
            said = replace(departure, error=visible(departure.error), traceback="").as_text().encode()
        # The text first: a reader takes it for complete once there is a length.
        self._write(departure.rank, _TEXT_AT, said)
        self._write(departure.rank, _FAILED_S.size, _LENGTH.pack(len(said)))

    def of(self, rank: int) -> Departure | None:
        """What a rank recorded as it left; None if it has not, or was killed before it was done."""
        (length,) = _LENGTH.unpack_from(self._memory, self._row(rank) + _FAILED_S.size)
        start = self._row(rank) + _TEXT_AT
        return Departure.of_text(self._memory[start : start + length]) if length else None

    @property
    def _ranks(self) -> range:
        return range(self.first_rank, self.first_rank + self._num_ranks)

    def _row(self, rank: int) -> int:
        return (rank - self.first_rank) * ROW_BYTES

    def _failed_s(self, rank: int) -> float:
        failed_s: float = _FAILED_S.unpack_from(self._memory, self._row(rank))[0]
        return failed_s

    def _write(self, rank: int, offset: int, data: bytes) -> None:
        start = self._row(rank) + offset
        self._memory[start : start + len(data)] = data
