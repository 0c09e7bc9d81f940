"""Batches of a map-style data set: in the order of the `BatchPlan`, read ahead by loader processes.

Owns what those processes are asked for, and what becomes of samples that cannot be read.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy
from numpy.typing import NDArray
from torch import Tensor

from launcher.data.batch_plan import BatchPlan, cut, share_of
from launcher.data.epochs import EVALUATION
from launcher.data.loader import LoadedSet, Loading, Pool
from launcher.data.reader import ByReference, Collate, Fetched, Indexed, Reader, Request
from launcher.data.tensors import Batch, Batches, Transform, batch_to_device, to_device, transformed

log = logging.getLogger("launcher")

CORRECT = "Correct or remove it, or set data.max_bad=N to leave out up to N of them."
LATEST = 16  # steps whose requests are kept: at least those that few loader processes read ahead


class IndexedData(LoadedSet):
    """A map-style data set, how its samples are collated and how they are read."""

    def __init__(self, dataset: Indexed, collate: Collate | None, how: Loading, kind: str) -> None:
        super().__init__(how, kind, f"{kind} set")
        self.dataset = dataset
        self._by_reference = dataset if collate is None and isinstance(dataset, ByReference) else None
        self._collate = collate if self._by_reference is None else self._by_reference.collate

    def __len__(self) -> int:
        return len(self.dataset)

    @property
    def name(self) -> str | None:
        """The name of a data set of the project; None of any other."""
        return getattr(self.dataset, "name", None)

    def pool(self, requests: Sequence[Request] | _Requests) -> Pool:
        """Processes that answer these requests in order."""
        return Pool(self._reader(), requests, self.how, self.kind)

    def fetch(self, request: Request) -> Fetched:
        """The answer to one request, read in this process."""
        reader = self._reader()
        reader.reading = self.how.reading
        return reader.read_here(request)

    def _reader(self) -> Reader:
        return Reader(self.dataset, self._collate, self.how.seed, self._by_reference)

    def usable(self, fetched: Fetched, request: Request) -> Batch | None:
        """The answer to the request, on the device. Raises DataError for what may not be left out."""
        batch = self.checked(fetched, request.indices)
        for bad in fetched.bad:
            if self.how.max_bad == 0:
                raise bad.refusal(self.name_in_errors, CORRECT)
            log.warning("the %s: left out %s\n%s", self.name_in_errors, bad, bad.details)
        if batch is not None and self._by_reference is not None:
            batch = self._by_reference.complete(batch, pinned=self.how.device.type == "cuda")
        return None if batch is None else batch_to_device(batch, self.how.device)

    def first_batch(self, rank: int, world_size: int, batch_size: int, most: int) -> Batch | None:
        """At most `most` samples of the first of `evaluation_batches`, read in this process."""
        for request in self._evaluation_requests(rank, world_size, batch_size)[:1]:
            request = replace(request, indices=request.indices[:most])
            return self.usable(self.fetch(request), request)
        return None

    def _evaluation_requests(self, rank: int, world_size: int, batch_size: int) -> list[Request]:
        pieces = cut(share_of(range(len(self)), rank, world_size), batch_size)
        return [Request(EVALUATION, piece.start, tuple(piece)) for piece in pieces]

    def evaluation_batches(
        self, rank: int, world_size: int, batch_size: int
    ) -> Iterator[tuple[int, Batch | None]]:
        """This rank's samples in order: (how many, batch), None for those that cannot be read."""
        key = (rank, world_size, batch_size)
        requests = self._evaluation_requests(*key)
        pool = self.evaluation_pool(key, lambda: self.pool(requests))
        for request, fetched in zip(requests, pool, strict=True):
            if (batch := self.usable(fetched, request)) is not None:
                yield len(fetched.kept), batch
            if fetched.bad:
                yield len(fetched.bad), None


@dataclass(eq=False)
class LoadedBatches(Batches):
    """Training batches of a map-style data set; asked for in order they are read ahead."""

    data: IndexedData
    plan: BatchPlan
    transform: Transform | None
    total_steps: int

    def __post_init__(self) -> None:
        self._pool: Pool | None = None
        self._ahead: tuple[_Requests, Iterator[Fetched]] | None = None
        self._next = 0  # the step, of all epochs, that is read ahead next
        self._bad = 0
        self._latest: list[tuple[Request, Sequence[int]]] = []  # with the offsets of what was kept
        self._noise: tuple[int, Tensor] | None = None

    def step(self, epoch: int, step: int) -> list[Batch]:
        """This rank's micro-batches, the same in whatever order they are asked for."""
        number = epoch * self.plan.steps_per_epoch + step
        if self._ahead is None or number > self._next:
            requests = _Requests(self.plan, number, self.total_steps)
            self._pool = self.data.pool(requests)
            self._ahead, self._next = (requests, iter(self._pool)), number
        requests, fetched = self._ahead
        found: list[Batch] = []
        self._latest = []
        for request in requests.of(number):
            answer = next(fetched) if number == self._next else self.data.fetch(request)
            batch = self.data.usable(answer, request)
            self._bad += len(answer.bad)
            if batch is not None:
                self._latest.append((request, answer.kept))
                found.append(self._finished(batch, request, answer.kept))
        self._next = max(self._next, number + 1)
        return found

    def read_here(self, number: int, most: int) -> list[Batch]:
        """At most `most` micro-batches of step `number`, read in this process. Nothing is read ahead."""
        requests = _Requests(self.plan, number, number + 1).of(number)[:most]
        answers = [(request, self.data.fetch(request)) for request in requests]
        return [
            self._finished(batch, request, answer.kept)
            for request, answer in answers
            if (batch := self.data.usable(answer, request)) is not None
        ]

    def latest_indices(self) -> list[list[int]]:
        """The indices of the samples that the latest `step` returned, one list per micro-batch."""
        return [[request.indices[offset] for offset in kept] for request, kept in self._latest]

    def take_bad(self) -> int:
        """The samples that were left out since the last call."""
        bad, self._bad = self._bad, 0
        return bad

    def divide(self, plan: BatchPlan, epoch: int, step: int) -> None:
        """Divide by another plan: what was read ahead is dropped, and other loader processes begin here."""
        self.plan = plan
        if self._pool is not None:
            self._pool.end()
        self._ahead = self._pool = None
        self._bad = 0

    def _finished(self, batch: Batch, request: Request, kept: Sequence[int]) -> Batch:
        if self.transform is None:
            return batch
        if self._noise is None or self._noise[0] != request.epoch:
            self._noise = request.epoch, self.plan.noise(request.epoch)
        noise = self._noise[1][request.position : request.position + len(request.indices)]
        if len(kept) < len(request.indices):
            noise = noise[list(kept)]
        return transformed("train_transform", self.transform, batch, to_device(noise, self.data.how.device))


class _Requests:
    """The micro-batches of this rank, from one step to the end of the run."""

    def __init__(self, plan: BatchPlan, start: int, total_steps: int) -> None:
        self._plan = plan
        self._start = start
        self._stop = max(total_steps, start + 1)
        self._order: tuple[int, NDArray[numpy.int64]] | None = None  # NumPy's: sliced in less time
        self.of = lru_cache(LATEST)(self._of)  # asked for twice: to be read, and when it was

    def __iter__(self) -> Iterator[Request]:
        for number in range(self._start, self._stop):
            yield from self.of(number)

    def _of(self, number: int) -> list[Request]:
        """The requests of one step, counted from 0 over all epochs."""
        epoch, step = divmod(number, self._plan.steps_per_epoch)
        if self._order is None or self._order[0] != epoch:
            self._order = epoch, self._plan.order(epoch).numpy()
        order = self._order[1]
        return [
            Request(epoch, part.start, tuple(order[part.start : part.stop].tolist()))
            for part in self._plan.micro_positions(step)
        ]
