"""When each rank failed and how it left, in memory shared with the process that started the ranks.

Owns the table. A rank writes its own row, without a lock, a file or a wait, so that it can be read whatever
killed the rank: a text counts only once its length is written, which comes last. A FileStore would not do: it
reads a record that was cut short by a kill or a full disk for ever, in C++. Imports no torch.
"""

from __future__ import annotations

import mmap
import struct
import time

_FAILED_S = struct.Struct("=d")  # of the machine's monotonic clock; 0: it has not failed
_LENGTH = struct.Struct("=q")  # of the text in bytes; 0: there is none
_TEXT_AT = _FAILED_S.size + _LENGTH.size
ROW_BYTES = 1 << 20  # memory is used only where it is written to


class LastWords:
    """The rows of all ranks of a machine. Created before the ranks are forked, which inherit its memory."""

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._memory = mmap.mmap(-1, num_ranks * ROW_BYTES)  # anonymous and shared

    def clear(self) -> None:
        """Forget all ranks, before they are started again."""
        for rank in range(self._num_ranks):
            self._write(rank, 0, bytes(_TEXT_AT))

    def fail(self, rank: int) -> None:
        """Record that a rank fails now, unless it has done so before."""
        if not self._failed_s(rank):
            self._write(rank, 0, _FAILED_S.pack(time.monotonic()))

    def first_failure(self) -> int | None:
        """The rank that failed first, if any has failed."""
        failed = {rank: at_s for rank in range(self._num_ranks) if (at_s := self._failed_s(rank))}
        return min(failed, key=lambda rank: failed[rank], default=None)

    def leave(self, rank: int, text: str) -> bool:
        """Record how a rank leaves; returns whether there was room for the text."""
        said = text.encode()
        if fits := len(said) <= ROW_BYTES - _TEXT_AT:
            # The text first: a reader takes it for complete once there is a length.
            self._write(rank, _TEXT_AT, said)
            self._write(rank, _FAILED_S.size, _LENGTH.pack(len(said)))
        return fits

    def of(self, rank: int) -> str:
        """What a rank recorded as it left; empty if it has not, or was killed before it was done."""
        (length,) = _LENGTH.unpack_from(self._memory, rank * ROW_BYTES + _FAILED_S.size)
        start = rank * ROW_BYTES + _TEXT_AT
        return self._memory[start : start + length].decode()

    def _failed_s(self, rank: int) -> float:
        failed_s: float = _FAILED_S.unpack_from(self._memory, rank * ROW_BYTES)[0]
        return failed_s

    def _write(self, rank: int, offset: int, data: bytes) -> None:
        start = rank * ROW_BYTES + offset
        self._memory[start : start + len(data)] = data
