"""How each rank of a job ended: its exit record, where it is kept, and which record is the cause.

A rank that ends writes one record: into memory that it shares with its parent, or into the store of the
ranks where there is no parent. In memory a rank writes its own row, without a lock, a file or a wait, so that
it can be read whatever killed the rank: a text counts only once its length is written, which comes last.
Imports no torch.
"""

from __future__ import annotations

import json
import mmap
import re
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING

from launcher.distributed import nccl
from launcher.distributed.store import ignore_store_errors, missing_ranks
from launcher.errors import LauncherError, OutOfMemoryError, described, whole_text
from launcher.os.oom import to_resource_error
from launcher.user_code import short_traceback

if TYPE_CHECKING:
    import torch.distributed as dist

OWN_RANK = re.compile(r"\brank ?\d+")
# Errors of a rank that failed because another one did: of Gloo, NCCL or the store.
OF_ANOTHER = re.compile(
    r"(?i)gloo|nccl|DistBackendError|DistNetworkError|DistStoreError|Wait timeout|Broken pipe|"
    r"Application timeout|Connection (closed|reset)"
)
POLL_S = 0.05
ROW_BYTES, _TEXT_AT = 1 << 20, 8  # memory is used only where it is written to


@dataclass(frozen=True)
class ExitRecord:
    """How one rank ended a job; `error` is empty if it ended well."""

    rank: int
    time_s: float  # unix seconds; of an error when it was raised, as explaining it takes time
    error: str = ""
    exit_code: int = 0
    shared: bool = False  # the error is not this rank's alone: its text names those whose it is, if any
    is_secondary: bool = False  # the error is that of a rank which lost another one: not the cause
    traceback: str = ""  # of an exception, to be printed before the error
    restart_helps: bool | None = None  # None: as the exit code says
    micro_batch: int | None = None  # the micro-batch to restart with, after a shortage of memory


class SharedExitRecords:
    """The records of a machine's ranks. Created before the ranks are forked, which inherit its memory."""

    def __init__(self, ranks: Iterable[int]) -> None:
        # Anonymous and shared.
        self._rows = {rank: memoryview(mmap.mmap(-1, ROW_BYTES)) for rank in ranks}

    def write(self, record: ExitRecord) -> None:
        """Record how a rank ends. The texts of errors are limited, so that there is room for each."""
        row, text = self._rows[record.rank], json.dumps(asdict(record)).encode()
        # The text first: a reader takes it for complete once there is a length.
        row[_TEXT_AT : _TEXT_AT + len(text)] = text
        self._length(record.rank)[0] = len(text)

    def read(self, rank: int) -> ExitRecord | None:
        """The record of a rank; None if it has none, or was killed before it was complete."""
        text = self._rows[rank][_TEXT_AT : _TEXT_AT + self._length(rank)[0]]
        return ExitRecord(**json.loads(bytes(text))) if text else None

    def read_others(self) -> list[ExitRecord]:
        """The records of all ranks but rank 0."""
        return [record for rank in self._rows if rank and (record := self.read(rank))]

    def _length(self, rank: int) -> memoryview[int]:
        """Where the length of a rank's text is; 0: it is not complete."""
        return self._rows[rank][:_TEXT_AT].cast("q")


class StoreExitRecords:
    """The same in the store of a job, of ranks without a parent. Raises DistError if the store is gone."""

    def __init__(self, store: dist.Store, job: str, world_size: int = 1) -> None:
        self._store, self._key, self._world_size = store, f"job/{job}/exit/{{}}", world_size

    def write(self, record: ExitRecord) -> None:
        """Record how a rank ends."""
        self._store.set(self._key.format(record.rank), json.dumps(asdict(record)))

    def read(self, ranks: Iterable[int]) -> list[ExitRecord]:
        """The records of those of the ranks that have one."""
        keys = [key for key in map(self._key.format, ranks) if self._store.check([key])]
        return [ExitRecord(**json.loads(self._store.get(key))) for key in keys]

    def read_others(self) -> list[ExitRecord]:
        """The records of all ranks but rank 0."""
        return self.read(range(1, self._world_size))

    def missing(self, ranks: Iterable[int], wait_s: float) -> list[int]:
        """Those of the ranks that have no record within the time."""
        return missing_ranks(self._store, self._key, ranks, wait_s)


def is_secondary(error: BaseException) -> bool:
    """Whether an exception, by its class and text, is that of a rank which lost another one."""
    text = f"{type(error).__name__}: {whole_text(error)}"
    return bool(OF_ANOTHER.search(text)) and not nccl.is_local(text)


def exit_record(rank: int, error: BaseException | None = None, failed_s: float | None = None) -> ExitRecord:
    """How this rank ends: the error as a sentence, and the traceback of one that needs it."""
    record = ExitRecord(rank, failed_s or time.time())
    if error is None:
        return record
    error = to_resource_error(error, f"rank {rank}") or error
    if isinstance(error, LauncherError):
        record = replace(record, error=str(error), exit_code=error.exit_code, traceback=error.traceback)
        record = replace(record, restart_helps=error.restart_helps, shared=error.shared)
        return (
            replace(record, micro_batch=error.micro_batch) if isinstance(error, OutOfMemoryError) else record
        )
    secondary = is_secondary(error)
    record = replace(record, error=described(error, with_notes=True), exit_code=1, is_secondary=secondary)
    return replace(record, traceback="" if secondary else short_traceback(error))


class JobFailed(LauncherError):
    """The job failed on some rank, which has recorded the reason."""

    def __init__(self, text: str, exit_code: int, traceback: str = "") -> None:
        super().__init__(text)
        self.exit_code, self.traceback = exit_code, traceback


def failure_of_another(records: SharedExitRecords | StoreExitRecords, wait_s: float) -> JobFailed | None:
    """What failed first on another rank than rank 0; None if none has recorded its own error in time."""
    until_s = time.monotonic() + wait_s
    with ignore_store_errors():
        while time.monotonic() < until_s:
            failed = [each for each in records.read_others() if each.error and not each.is_secondary]
            if failed:
                cause = min(failed, key=lambda each: each.time_s)
                return JobFailed(with_rank(cause, failed), cause.exit_code)
            time.sleep(POLL_S)
    return None


def with_rank(cause: ExitRecord, records: Sequence[ExitRecord]) -> str:
    """The error of `cause` with its rank, or without it if other ranks ended with the same message.

    `records` are those of all ranks that have one, including `cause`.
    """
    error, of_rank = cause.error, f"rank {cause.rank} "
    if cause.shared:
        return error
    alike = [each for each in records if _without_ranks(each.error) == _without_ranks(error)]
    if not cause.is_secondary and len(alike) > 1:
        # Parents of several machines may end with one error, of one rank.
        of_each = all(each.error.startswith(f"rank {each.rank} ") for each in alike)
        return f"each rank {error.removeprefix(of_rank)}" if of_each else error
    return error if error.startswith("rank ") else f"{of_rank}failed: {error}"


def _without_ranks(error: str) -> str:
    """The error without rank numbers, to compare errors of different ranks."""
    return OWN_RANK.sub("rank", error)
