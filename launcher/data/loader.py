"""Batches of a map-style data set, read ahead by processes of torch's DataLoader.

Owns those processes: what they are asked for and in which order, how their failures are named, and their end.
The order is that of the `BatchPlan`; nothing here decides it.
"""

from __future__ import annotations

import functools
import logging
import mmap
import multiprocessing
import os
import re
import signal
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import numpy
import torch
from torch import Tensor
from torch.utils.data import DataLoader, get_worker_info

from launcher.data.batch_plan import BatchPlan, cut, share_of
from launcher.data.reader import (
    EVALUATION,
    BadSample,
    Collate,
    Fetched,
    Indexed,
    Reader,
    Request,
    generators_kept,
)
from launcher.data.tensors import Batch, transformed
from launcher.errors import DataError, LauncherError, StalledError

PREFETCHED = 2  # micro-batches per loader process
END_S = 1.0  # for a loader process to end by itself
LOST = re.compile(r"DataLoader worker \(pid\(?s?\)?[ (]*([\d, ]+)\)")
OF_THE_JOB = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
PID, READING, ENDS = 0, 1, 2  # columns of what a pool shares with its processes

log = logging.getLogger("launcher")
_pools: list[_Pool] = []  # of this process, for their failures to be named


@dataclass(frozen=True)
class Loading:
    """How samples are read: by how many processes of this rank, to which device, and how many may be bad."""

    workers: int
    device: torch.device
    seed: int
    max_bad: int = 0
    timeout_s: float = 0.0  # longest wait for a batch; 0: without a limit


class IndexedData:
    """A map-style data set, how its samples are collated and how they are read. `kind` is for messages."""

    def __init__(self, dataset: Indexed, collate: Collate | None, how: Loading, kind: str) -> None:
        self.dataset = dataset
        self.how = how
        self.kind = kind
        self._collate = collate
        self._evaluation: tuple[tuple[int, int, int], _Pool] | None = None

    def __len__(self) -> int:
        return len(self.dataset)

    @property
    def name(self) -> str | None:
        """Of a data set of the project."""
        return getattr(self.dataset, "name", None)

    def pool(self, requests: Sequence[Request] | _Requests) -> _Pool:
        """Processes that answer these requests in order."""
        return _Pool(self.dataset, self._collate, requests, self.how, self.kind)

    def fetch(self, request: Request) -> Fetched:
        """The answer to one request, read in this process."""
        with generators_kept():
            return Reader(self.dataset, self._collate, self.how.seed)[request]

    def usable(self, fetched: Fetched) -> Batch | None:
        """The batch, on the device. Raises DataError for what may not be left out."""
        if fetched.failure:
            raise DataError(f"the {self.kind} set: {fetched.failure}")
        for bad in fetched.bad:
            if self.how.max_bad == 0:
                raise refusal(bad, self.kind)
            log.warning("the %s set: left out %s\n%s", self.kind, bad, bad.details)
        if fetched.batch is None:
            return None
        return {name: _to_device(column, self.how.device) for name, column in fetched.batch.items()}

    def evaluation_batches(
        self, rank: int, world_size: int, batch_size: int
    ) -> Iterator[tuple[Tensor, Batch | None]]:
        """This rank's samples in order: (indices int64 [n], batch), None for those that cannot be read."""
        key = (rank, world_size, batch_size)
        if self._evaluation is None or self._evaluation[0] != key:
            pieces = cut(share_of(range(len(self)), rank, world_size), batch_size)
            requests = [Request(EVALUATION, piece.start, tuple(piece)) for piece in pieces]
            self._evaluation = key, self.pool(requests)
        pool = self._evaluation[1]
        for request, fetched in zip(pool.requests, pool, strict=True):
            batch = self.usable(fetched)
            indices = torch.tensor(request.indices, device=self.how.device)
            good = torch.zeros(len(indices), dtype=torch.bool, device=self.how.device)
            good[list(fetched.kept)] = True
            if batch is not None:
                yield indices[good], batch
            if fetched.bad:
                yield indices[~good], None


class LoadedBatches:
    """Training batches of a map-style data set; asked for in order they are read ahead."""

    def __init__(
        self,
        data: IndexedData,
        plan: BatchPlan,
        transform: Callable[[Batch, Tensor], Batch] | None,
        total_steps: int,
    ) -> None:
        self.plan = plan
        self._data = data
        self._transform = transform
        self._total_steps = total_steps
        self._ahead: tuple[_Requests, Iterator[Fetched]] | None = None
        self._next = 0  # the step, of all epochs, that is read ahead next
        self._bad = 0
        self._latest: list[list[int]] = []
        self._noise: tuple[int, Tensor] | None = None

    def step(self, epoch: int, step: int) -> list[Batch]:
        """This rank's micro-batches, the same in whatever order they are asked for."""
        number = epoch * self.plan.steps_per_epoch + step
        if self._ahead is None or number > self._next:
            requests = _Requests(self.plan, number, self._total_steps)
            self._ahead, self._next = (requests, iter(self._data.pool(requests))), number
        requests, fetched = self._ahead
        found: list[Batch] = []
        self._latest = []
        for request in requests.of(number):
            answer = next(fetched) if number == self._next else self._data.fetch(request)
            batch = self._data.usable(answer)
            self._bad += len(answer.bad)
            if batch is not None:
                self._latest.append([request.indices[offset] for offset in answer.kept])
                found.append(self._finished(batch, request, answer.kept))
        self._next = max(self._next, number + 1)
        return found

    def latest_indices(self) -> list[list[int]]:
        """The indices of the samples that the latest `step` returned, one list per micro-batch."""
        return self._latest

    def take_bad(self) -> int:
        """The samples that were left out since the last call."""
        bad, self._bad = self._bad, 0
        return bad

    def _finished(self, batch: Batch, request: Request, kept: Sequence[int]) -> Batch:
        if self._transform is None:
            return batch
        if self._noise is None or self._noise[0] != request.epoch:
            self._noise = request.epoch, self.plan.noise(request.epoch)
        noise = self._noise[1][[request.position + offset for offset in kept]]
        return transformed(
            "train_transform", self._transform, batch, _to_device(noise, self._data.how.device)
        )


class _Requests:
    """The micro-batches of this rank, from one step to the end of the run."""

    def __init__(self, plan: BatchPlan, start: int, total_steps: int) -> None:
        self._plan = plan
        self._start = start
        self._stop = max(total_steps, start + 1)
        self._order: tuple[int, Tensor] | None = None

    def __iter__(self) -> Iterator[Request]:
        for number in range(self._start, self._stop):
            yield from self.of(number)

    def of(self, number: int) -> list[Request]:
        """Those of one step, counted from 0 over all epochs."""
        epoch, step = divmod(number, self._plan.steps_per_epoch)
        if self._order is None or self._order[0] != epoch:
            self._order = epoch, self._plan.order(epoch)
        order = self._order[1]
        return [
            Request(epoch, part.start, tuple(order[part.start : part.stop].tolist()))
            for part in self._plan.micro_positions(step)
        ]


class _Pool:
    """The processes that answer requests, in their order; may be iterated again. None for 0 workers."""

    def __init__(
        self,
        dataset: Indexed,
        collate: Collate | None,
        requests: Sequence[Request] | _Requests,
        how: Loading,
        kind: str,
    ) -> None:
        self.requests = requests
        self.kind = kind
        self._how = how
        self._shared = numpy.frombuffer(mmap.mmap(-1, 24 * max(how.workers, 1)), numpy.int64).reshape(-1, 3)
        self._shared[:, READING] = -1
        self._reader = Reader(dataset, collate, how.seed, self._note)
        self._iterator: Any = None  # torch's, where it has processes
        _pools.append(self)

    @functools.cached_property
    def _loader(self) -> DataLoader[Any]:
        how = self._how
        return DataLoader(
            self._reader,  # type: ignore[arg-type]  # whose keys are requests
            batch_size=None,
            sampler=self.requests,
            collate_fn=_as_it_is,  # type: ignore[arg-type]  # of one item
            num_workers=how.workers,
            prefetch_factor=PREFETCHED if how.workers else None,
            persistent_workers=how.workers > 0,
            pin_memory=how.device.type == "cuda",
            timeout=how.timeout_s if how.workers else 0,
            worker_init_fn=self._begin,
            multiprocessing_context="fork" if how.workers else None,
            generator=torch.Generator(),  # or it would draw from that of the dropout
        )

    def __iter__(self) -> Iterator[Fetched]:
        with _starting():
            iterator = iter(self._loader)
        if self._how.workers:
            self._iterator = iterator
            yield from iterator
            return
        while True:
            with generators_kept():
                fetched = next(iterator, None)
            if fetched is None:
                return
            yield fetched

    def explain(self, error: RuntimeError) -> LauncherError | None:
        """What a loss of a process or a long wait means, with the sample that was being read."""
        if lost := LOST.search(str(error)):
            pids = {int(pid) for pid in lost[1].replace(" ", "").split(",") if pid}
            mine = [row for row in self._shared if int(row[PID]) in pids]
            if not mine:
                return None
            return DataError(
                f"a loader process ended while it read {self._samples(mine)}: {_first_line(error)} If it "
                "was killed for memory, lower data.workers or data.micro_batch. If the sample crashes a "
                "library, data.workers=0 shows where."
            )
        if "DataLoader timed out" not in str(error):
            return None
        busy = [row for row in self._shared if row[READING] >= 0]
        return StalledError(
            f"no batch came from the loader processes for {self._how.timeout_s:g} s; they were reading "
            f"{self._samples(busy)}. Check what these read from, or raise launch.stall_s."
        )

    def close(self) -> None:
        """End the processes, also those that hang."""
        if self._iterator is None:
            return
        self._shared[:, ENDS] = 1
        pids = set(self._shared[:, PID].tolist()) - {0}
        children = [child for child in multiprocessing.active_children() if child.pid in pids]
        for child in children:
            child.terminate()
        with suppress(RuntimeError):  # of one that has failed meanwhile
            self._iterator._shutdown_workers()  # so torch does not take their end for a failure
        for child in children:
            child.join(END_S)
            if child.is_alive():
                child.kill()
                child.join()

    def _samples(self, rows: Sequence[Any]) -> str:
        indices = [int(row[READING]) for row in rows if row[READING] >= 0]
        return f"sample {', '.join(map(str, indices))} of the {self.kind} set" if indices else "no sample"

    def _begin(self, number: int) -> None:
        """In a loader process, once. A signal to all processes of a job is for the worker to act on."""
        signal.set_wakeup_fd(-1)  # it is the worker's
        for each in OF_THE_JOB:
            signal.signal(each, self._end if each == signal.SIGTERM else signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, OF_THE_JOB)
        self._shared[number, PID] = os.getpid()

    def _end(self, *signal_and_frame: Any) -> None:
        info = get_worker_info()
        if info is not None and self._shared[info.id, ENDS]:
            os._exit(0)

    def _note(self, index: int) -> None:
        info = get_worker_info()
        if info is not None:
            self._shared[info.id, READING] = index


@contextmanager
def _starting() -> Iterator[None]:
    """While processes are started. A signal that one gets before it ignores it waits until then."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, OF_THE_JOB)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12: of a fork beside threads
            warnings.filterwarnings("ignore", "This DataLoader will create")  # more than cores: as was asked
            yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def loader_processes() -> Iterator[None]:
    """Ends the loader processes that were started within, and names what the loss of one means."""
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


def refusal(bad: BadSample, kind: str) -> DataError:
    """The error for a sample that could not be read and may not be left out."""
    error = DataError(
        f"the {kind} set: {bad}{'' if bad.error.endswith('.') else '.'} Correct or remove it, or set "
        "data.max_bad=N to leave out up to N of them."
    )
    error.add_note(bad.details)
    return error


def _to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """On a stream of its own, so that the copy does not wait for what the device is still computing."""
    if device.type != "cuda":
        return tensor.to(device)
    stream = _streams.setdefault(device, torch.cuda.Stream(device))  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        moved = tensor.pin_memory().to(device, non_blocking=True)
    current = torch.cuda.current_stream(device)
    current.wait_stream(stream)
    moved.record_stream(current)
    return moved


_streams: dict[torch.device, torch.cuda.Stream] = {}


def _as_it_is(fetched: Fetched) -> Fetched:
    return fetched


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
