"""The loader processes of a rank: torch's DataLoader, with failures that name the sample.

Owns their start, their signals, the meaning of their failures, and their end. What they read is in
`map_loader` and `iterable_loader`.
"""

from __future__ import annotations

import functools
import logging
import mmap
import multiprocessing.queues
import multiprocessing.util
import operator
import os
import signal
import tempfile
import threading
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import wait
from typing import Any, NoReturn, Protocol

import numpy
import torch
from torch.utils.data import DataLoader

from launcher.data.labels import Labels
from launcher.data.reader import TOGETHER, FetchedBatch
from launcher.data.tensors import Batch, batch_to_device
from launcher.errors import (
    DataError,
    LauncherError,
    LoaderKilledError,
    StalledError,
    first_sentence,
)
from launcher.os.signals import HANDLED

log = logging.getLogger("launcher")

PREFETCHED = 2  # micro-batches per loader process
END_S = 1.0  # for a loader process to end by itself
LOST = "DataLoader worker (pid"  # in torch's errors for a process that ended
READING, ENDS = 0, 1  # columns of what a pool shares with its processes
LONGEST_TMPDIR = 107 - len("/pymp-12345678/listener-12345678")  # bytes: a socket's path has at most 107

_pools: list[WorkerPool] = []  # of this process, for their failures to be named


@dataclass(frozen=True)
class LoaderConfig:
    """How samples are read: by how many processes of this rank, to which device, and how many may be bad."""

    workers: int
    device: torch.device
    seed: int
    max_bad_samples: int = 0
    timeout_s: float = 0.0  # longest wait for a batch; 0: without a limit
    timeout_key: str = ""  # of the config, that sets it
    labels: Labels | None = None  # None: there are no classes


class Noting(Protocol):
    """What makes `FetchedBatch`, and calls `reading` before each sample, with -1 after the last of a batch.

    With TOGETHER before several samples at once.
    """

    reading: Callable[[int], None]

    def begin(self) -> None:
        """Called before each iteration, in the process that starts the loader processes."""


class WorkerPool:
    """The processes that read a data set; may be iterated again. None for 0 workers.

    `reader` is a data set of torch's DataLoader; a map-style one is given `requests`, in this order.
    """

    def __init__(self, reader: Noting, requests: Iterable[Any] | None, how: LoaderConfig, kind: str) -> None:
        self.kind = kind
        self._reader = reader
        self._requests = requests
        self._how = how
        # 16 bytes: two int64 per process, in memory that a forked process shares.
        self._shared = numpy.frombuffer(mmap.mmap(-1, 16 * max(how.workers, 1)), numpy.int64).reshape(-1, 2)
        self._shared[:, READING] = -1
        self._number = -1  # of this loader process; -1 in any other
        self._iterator: Any = None  # torch's; None without processes
        _pools.append(self)

    @functools.cached_property
    def _loader(self) -> DataLoader[object]:
        how = self._how
        return DataLoader(
            self._reader,  # type: ignore[arg-type]  # whose keys, if any, are requests
            batch_size=None,
            sampler=self._requests,
            num_workers=how.workers,
            prefetch_factor=PREFETCHED,
            persistent_workers=True,
            pin_memory=how.device.type == "cuda",
            timeout=how.timeout_s,
            worker_init_fn=self._begin,
            # A recipe's data set need not be pickled, and no process imports torch again.
            multiprocessing_context="fork",
            generator=torch.Generator(),  # or it would draw from that of the dropout
        )

    def __iter__(self) -> Iterator[FetchedBatch]:
        reader: Any = self._reader  # a stream's, or one that is given requests
        requests = self._requests
        reader.begin()
        if not self._how.workers:  # without torch's loader, which would only add its own time
            answers = iter(reader) if requests is None else map(reader.__getitem__, requests)
            yield from map(FetchedBatch.pin_memory, answers) if self._how.device.type == "cuda" else answers
            return
        with _starting():
            self._iterator = iter(self._loader)
        # The first batch may take as long as it likes: the user's data set may only now open its files.
        self._iterator._timeout, limit_s = 0, self._iterator._timeout
        with self._failures_explained():
            for fetched in self._iterator:
                self._iterator._timeout = limit_s
                yield fetched

    @contextmanager
    def _failures_explained(self) -> Iterator[None]:
        """Explain what is raised while a batch of this pool is awaited: no other pool's samples are meant."""
        try:
            try:
                yield
            except (OSError, EOFError) as error:  # its sockets close before a process counts as ended
                raise self._ended(error) or error from error
        except RuntimeError as error:  # torch's, also while an end is awaited
            if failure := self.explain(error):
                raise failure from error
            raise

    def explain(self, error: RuntimeError) -> LauncherError | None:
        """The error for a lost process or a long wait, naming the sample that was being read."""
        if is_of_loader_process(error):
            return self._ended(error)
        if "DataLoader timed out" not in str(error):
            return None
        busy = [row for row in self._shared if row[READING] != -1]
        return StalledError(
            f"no batch came from the loader processes for {self._how.timeout_s:g} s; they were "
            f"{self._at(busy, 'reading')}. Check what these read from, set data.num_workers=0 if their data "
            f"set does not work in a forked process, or raise {self._how.timeout_key}."
        )

    def _ended(self, error: Exception) -> DataError | None:
        """The error for processes that are ending, awaited for END_S; None where none ends."""
        if self._iterator is None:
            return None
        workers = self._iterator._workers
        for sentinel in wait([worker.sentinel for worker in workers], END_S):
            next(worker for worker in workers if worker.sentinel == sentinel).join(END_S)
        codes = {number: each.exitcode for number, each in enumerate(workers) if each.exitcode is not None}
        if not codes:
            return None
        # Torch names the signal only where its handler of SIGCHLD saw the end before its wait did.
        killed = "killed by signal" in str(error) or any(code < 0 for code in codes.values())
        code = ", ".join(map(str, codes.values()))
        where = self._at([self._shared[number] for number in codes], "while it read")
        return (LoaderKilledError if killed else DataError)(
            f"a loader process ended {where}: exit code {code}, seen as "
            f"{first_sentence(error)} If it was killed for memory, lower data.num_workers or "
            "data.micro_batch_size. If the sample crashes a library, data.num_workers=0 shows where."
        )

    def close(self) -> None:
        """End the processes, also those that hang."""
        if self._iterator is None:
            return
        # First: a loader process ignores SIGTERM unless its pool ends.
        self._shared[:, ENDS] = 1
        children = self._iterator._workers
        for child in children:
            child.terminate()
        # A process that ended while it held the lock of torch's event would make torch wait without end.
        self._iterator._workers_done_event = threading.Event()
        with suppress(RuntimeError):  # of one that has failed meanwhile
            self._iterator._shutdown_workers()  # so torch does not take their end for a failure
        for child in children:
            child.join(END_S)
            if child.is_alive():
                child.kill()
                child.join()

    def end(self) -> None:
        """End the processes of a pool that nothing will be read from again."""
        self.close()
        self._iterator = None
        _pools.remove(self)

    def _at(self, rows: Sequence[Any], reading: str) -> str:
        """Which samples processes were `reading`; if none, that they were collating or sending a batch."""
        indices = [int(row[READING]) for row in rows if row[READING] >= 0]
        if indices:
            return f"{reading} sample {', '.join(map(str, indices))} of the {self.kind} set"
        if any(row[READING] == TOGETHER for row in rows):
            return f"{reading} samples of the {self.kind} set together, by its __getitems__"
        return (
            f"between samples of the {self.kind} set (collating or sending a batch: is /dev/shm full? "
            "docker: --shm-size=1g; its traceback, if it has one, is in the log)"
        )

    def _begin(self, number: int) -> None:
        """Set up a loader process, once. A signal to all processes of a job is for the worker to act on."""
        signal.set_wakeup_fd(-1)  # it is the worker's
        for each in HANDLED:
            signal.signal(each, self._end if each == signal.SIGTERM else signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, HANDLED)
        self._number = number
        # Else the thread that sends batches prints the exception, and the batch is awaited in vain.
        multiprocessing.queues.Queue._on_queue_feeder_error = staticmethod(  # type: ignore[attr-defined]
            _end_after_failed_send
        )
        # Sockets get a directory of its own, which `_end` removes: not that of the process before the fork.
        multiprocessing.current_process()._config.pop("tempdir", None)  # type: ignore[attr-defined]
        _use_a_short_directory()
        # Called for each sample: without a function in Python it takes a third of the time.
        self._reader.reading = functools.partial(operator.setitem, memoryview(self._shared[number]), READING)

    def _end(self, *signal_and_frame: object) -> None:
        if self._shared[self._number, ENDS]:
            os._exit(0)


class LoadedSet:
    """A set that loader processes read. `kind` and `name` ("training set", say) are for messages.

    `advice` ends the error for a sample that cannot be read and may not be left out.
    """

    def __init__(self, how: LoaderConfig, kind: str, name: str, advice: str) -> None:
        self.how, self.kind, self._name, self._advice = how, kind, name, advice
        self._evaluation: tuple[object, WorkerPool] | None = None

    def on_device(self, fetched: FetchedBatch, indices: Sequence[int] = ()) -> Batch | None:
        """The batch, on the device. Raises DataError for what may not be left out, and for unknown labels."""
        fetched.refuse_failure(self._name)
        if self.how.labels is not None:
            self.how.labels.refuse_others(fetched, self._name, indices)
        for bad in fetched.bad:
            if self.how.max_bad_samples == 0:
                raise bad.refusal(self._name, self._advice)
            log.warning("the %s: left out %s\n%s", self._name, bad, bad.details)
        return None if fetched.batch is None else batch_to_device(fetched.batch, self.how.device)

    def evaluation_pool(self, key: object, make: Callable[[], WorkerPool]) -> WorkerPool:
        """The pool of this key, kept from one evaluation to the next; the one of another key is ended."""
        if self._evaluation is None or self._evaluation[0] != key:
            if self._evaluation is not None:
                self._evaluation[1].end()
            self._evaluation = key, make()
        return self._evaluation[1]


def _use_a_short_directory() -> None:
    """Put the sockets of this process into /tmp where a path in TMPDIR is too long for them."""
    if len(os.fsencode(tempfile.gettempdir())) > LONGEST_TMPDIR:
        before, tempfile.tempdir = tempfile.tempdir, "/tmp"
        multiprocessing.util.get_temp_dir()  # made once per process
        tempfile.tempdir = before


def _end_after_failed_send(error: Exception, batch: object) -> NoReturn:
    """End this loader process, whose batch cannot be sent: it cannot be pickled, or memory is full."""
    traceback.print_exception(error)
    os._exit(1)


@contextmanager
def _starting() -> Iterator[None]:
    """Context in which processes are started: a signal waits until they can ignore it."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, HANDLED)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12: of a fork beside threads
            warnings.filterwarnings("ignore", "This DataLoader will create")  # more than cores: as was asked
            yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def loader_processes() -> Iterator[None]:
    """End the loader processes started within the context; raise a lost one's failure as a LauncherError."""
    try:
        yield
    except RuntimeError as error:  # torch's, wherever this process was when its child ended
        failure = next((found for pool in _pools if (found := pool.explain(error))), None)
        if failure is None:
            raise
        raise failure from error
    finally:
        while _pools:
            _pools.pop().close()


def is_of_loader_process(error: BaseException) -> bool:
    """Whether it is of a lost loader process: torch raises it wherever the main thread then is."""
    return isinstance(error, RuntimeError) and LOST in str(error)
