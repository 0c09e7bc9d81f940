"""The loader processes of a rank: torch's DataLoader, with failures that say what to do.

Owns their start, their signals, the meaning of their failures, and their end. What they read is in
`map_loader` and `iterable_loader`.
"""

from __future__ import annotations

import functools
import logging
import multiprocessing.queues
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
from typing import Any, NoReturn

import torch
from torch.utils.data import DataLoader
from torch.utils.data._utils import signal_handling

from launcher.data.labels import Labels
from launcher.data.reader import FetchedBatch
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


class WorkerPool:
    """The processes that read a data set; may be iterated again. None for 0 workers.

    `reader` is a data set of torch's DataLoader, which makes `FetchedBatch`: a map-style one is given
    `requests`, in this order; a stream has none.
    """

    def __init__(self, reader: Any, requests: Iterable[Any] | None, how: LoaderConfig, kind: str) -> None:
        self.kind = kind
        self._reader = reader
        self._requests = requests
        self._how = how
        self._iterator: Any = None  # torch's; None without processes
        _pools.append(self)

    @functools.cached_property
    def _loader(self) -> DataLoader[object]:
        how = self._how
        return DataLoader(
            self._reader,
            batch_size=None,
            sampler=self._requests,
            num_workers=how.workers,
            prefetch_factor=PREFETCHED,
            persistent_workers=True,
            pin_memory=how.device.type == "cuda",
            timeout=how.timeout_s,
            worker_init_fn=_begin,
            # A recipe's data set need not be pickled, and no process imports torch again.
            multiprocessing_context="fork",
            generator=torch.Generator(),  # or it would draw from that of the dropout
        )

    def __iter__(self) -> Iterator[FetchedBatch]:
        reader, requests = self._reader, self._requests
        if requests is None:
            reader.begin()
        if not self._how.workers:  # without torch's loader, which would only add its own time
            answers = iter(reader) if requests is None else map(reader.__getitem__, requests)
            yield from map(FetchedBatch.pin_memory, answers) if self._how.device.type == "cuda" else answers
            return
        with _starting():
            self._iterator = iter(self._loader)
        # The first batch may take as long as it likes: the user's data set may only now open its files.
        self._iterator._timeout, limit_s = 0, self._iterator._timeout
        try:
            for fetched in self._iterator:
                self._iterator._timeout = limit_s
                yield fetched
        except (
            RuntimeError,
            OSError,
            EOFError,
        ) as error:  # a lost process's sockets close before it has ended
            if failure := self.explain(error):
                raise failure from error
            raise

    def explain(self, error: Exception) -> LauncherError | None:
        """The error for a lost process or a long wait."""
        if "DataLoader timed out" in str(error):
            return StalledError(
                f"no batch of the {self.kind} set came from the loader processes for "
                f"{self._how.timeout_s:g} s. Check what these read from, set data.num_workers=0 if their "
                f"data set does not work in a forked process, or raise {self._how.timeout_key}."
            )
        if isinstance(error, RuntimeError) and not is_of_loader_process(error):
            return None
        if self._iterator is None:
            return None
        workers = self._iterator._workers
        for sentinel in wait([worker.sentinel for worker in workers], END_S):
            next(worker for worker in workers if worker.sentinel == sentinel).join(END_S)
        codes = [worker.exitcode for worker in workers if worker.exitcode is not None]
        if not codes:
            return None
        # Torch names the signal only where its handler of SIGCHLD saw the end before its wait did.
        killed = "killed by signal" in str(error) or any(code < 0 for code in codes)
        return (LoaderKilledError if killed else DataError)(
            f"a loader process of the {self.kind} set ended: exit code {', '.join(map(str, codes))}, seen as "
            f"{first_sentence(error)} Its traceback, if it has one, is in the log. If it was killed for "
            "memory, lower data.num_workers or data.micro_batch_size; if /dev/shm is full, start docker with "
            "--shm-size=1g. If a sample crashes a library, data.num_workers=0 shows where."
        )

    def close(self) -> None:
        """End the processes, also those that hang."""
        if self._iterator is None:
            return
        iterator = self._iterator
        # First, so that torch does not take their end for a failure.
        if iterator._worker_pids_set:
            signal_handling._remove_worker_pids(id(iterator))
            iterator._worker_pids_set = False
        for child in iterator._workers:
            child.kill()  # they ignore all signals that may be ignored
        # A process that ended while it held the lock of torch's event would make torch wait without end.
        iterator._workers_done_event = threading.Event()
        with suppress(RuntimeError):  # of one that has failed meanwhile
            iterator._shutdown_workers()

    def end(self) -> None:
        """End the processes of a pool that nothing will be read from again."""
        self.close()
        self._iterator = None
        _pools.remove(self)


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
            log.warning("the %s: left out %s\n%s", self._name, bad, bad.traceback)
        return None if fetched.batch is None else batch_to_device(fetched.batch, self.how.device)

    def evaluation_pool(self, key: object, make: Callable[[], WorkerPool]) -> WorkerPool:
        """The pool of this key, kept from one evaluation to the next; the one of another key is ended."""
        if self._evaluation is None or self._evaluation[0] != key:
            if self._evaluation is not None:
                self._evaluation[1].end()
            self._evaluation = key, make()
        return self._evaluation[1]


def _begin(number: int) -> None:
    """Set up a loader process, once. A signal to all processes of a job is for the worker to act on."""
    signal.set_wakeup_fd(-1)  # it is the worker's
    for each in HANDLED:
        signal.signal(each, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, HANDLED)
    # Else the thread that sends batches prints the exception, and the batch is awaited in vain.
    multiprocessing.queues.Queue._on_queue_feeder_error = staticmethod(  # type: ignore[attr-defined]
        _end_after_failed_send
    )


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
    """End the loader processes started within the context; raise a lost one's failure as a LauncherError.

    Their sockets are in a folder that is removed after them; in /tmp, because a path in TMPDIR may be longer
    than the 107 bytes that a socket's may have.
    """
    config = multiprocessing.current_process()._config  # type: ignore[attr-defined]
    with tempfile.TemporaryDirectory(prefix="pymp-", dir="/tmp") as config["tempdir"]:
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
            # Of a loader that was not whole yet: they ignore SIGTERM, and an exit of Python waits for them.
            for child in multiprocessing.active_children():
                if child.daemon:
                    child.kill()
            config.pop("tempdir", None)


def is_of_loader_process(error: BaseException) -> bool:
    """Whether it is of a lost loader process: torch raises it wherever the main thread then is."""
    return isinstance(error, RuntimeError) and LOST in str(error)
