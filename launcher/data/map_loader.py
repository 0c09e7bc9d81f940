"""Batches of a map-style data set: in the order of the `BatchPlan`, read ahead by loader processes.

Owns what those processes are asked for, and what becomes of samples that cannot be read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any

from launcher.data.batch_plan import BatchPlan, cut, rank_part
from launcher.data.loader import LoadedSet, LoaderConfig, WorkerPool
from launcher.data.reader import BatchIndices, Collate, FetchedBatch, Indexed, Reader
from launcher.data.seeding import EVALUATION, seed_transform
from launcher.data.tensors import Batch, Batches, Transform, transformed

CORRECT = "Correct or remove it, or set data.max_bad_samples=N to leave out up to N of them."
LATEST = 16  # steps whose requests are kept: at least those that few loader processes read ahead


class MapDataset(LoadedSet):
    """A map-style data set, how its samples are collated and how they are read."""

    def __init__(self, dataset: Indexed, collate: Collate | None, how: LoaderConfig, kind: str) -> None:
        super().__init__(how, kind, f"{kind} set", CORRECT)
        self.dataset = dataset
        self._reader = Reader(dataset, collate, how.seed)

    def __len__(self) -> int:
        return len(self.dataset)

    def pool(self, requests: Iterable[BatchIndices]) -> WorkerPool:
        """Processes that answer these requests in order."""
        return WorkerPool(self._reader, requests, self.how, self.kind)

    def fetch(self, request: BatchIndices) -> FetchedBatch:
        """The answer to one request, read in this process."""
        return self._reader[request]

    def first_batch(self, rank: int, world_size: int, batch_size: int, most: int) -> Batch | None:
        """At most `most` samples of the first of `evaluation_batches`, read in this process."""
        for request in self._evaluation_requests(rank, world_size, batch_size)[:1]:
            request = replace(request, indices=request.indices[:most])
            return self.on_device(self.fetch(request), request.indices)
        return None

    def _evaluation_requests(
        self, rank: int, world_size: int, batch_size: int, shares: Sequence[int] = ()
    ) -> list[BatchIndices]:
        pieces = cut(rank_part(range(len(self)), rank, world_size, shares), batch_size)
        return [BatchIndices(EVALUATION, piece.start, tuple(piece)) for piece in pieces]

    def evaluation_batches(
        self, rank: int, world_size: int, batch_size: int, shares: Sequence[int] = ()
    ) -> Iterator[tuple[int, Batch | None]]:
        """This rank's samples in order: (how many, batch), None for those that cannot be read.

        `shares` are those of `BatchPlan`.
        """
        key = (rank, world_size, batch_size, tuple(shares))
        requests = self._evaluation_requests(*key)
        pool = self.evaluation_pool(key, lambda: self.pool(requests))
        for request, fetched in zip(requests, pool, strict=True):
            if (batch := self.on_device(fetched, request.indices)) is not None:
                yield len(fetched.kept), batch
            if fetched.bad:
                yield len(fetched.bad), None


@dataclass(eq=False)
class MapLoader(Batches):
    """Training batches of a map-style data set; asked for in order they are read ahead."""

    data: MapDataset
    plan: BatchPlan
    transform: Transform | None
    total_steps: int

    def __post_init__(self) -> None:
        self._pool: WorkerPool | None = None
        self._ahead: Iterator[FetchedBatch] = iter(())
        self._next = -1  # the step, of all epochs, that is read ahead next; -1 before the first
        self._bad = 0
        self._latest: list[tuple[BatchIndices, Sequence[int]]] = []  # with the offsets of what was kept
        plan = self.plan
        self._order = lru_cache(1)(lambda epoch: plan.order(epoch).numpy())  # NumPy's: sliced in less time
        self._requests = lru_cache(LATEST)(
            partial(_requests_of, plan, self._order)
        )  # asked for twice: to be read, and when it was

    def step(self, epoch: int, step: int) -> list[Batch]:
        """This rank's micro-batches, the same in whatever order they are asked for."""
        number = epoch * self.plan.steps_per_epoch + step
        if self._pool is None or number > self._next:
            steps = range(number, max(self.total_steps, number + 1))
            self._pool = self.data.pool(request for each in steps for request in self._requests(each))
            self._ahead, self._next = iter(self._pool), number
        asked = self._requests(number)
        found = self._made_of(asked, self._ahead if number == self._next else map(self.data.fetch, asked))
        self._next = max(self._next, number + 1)
        return found

    def trial(self, step: int, most: int) -> list[Batch]:
        """At most `most` micro-batches of a step of the first epoch. Nothing is read ahead."""
        asked = self._requests(step)[:most]
        return self._made_of(asked, map(self.data.fetch, asked))

    def _made_of(self, requests: Sequence[BatchIndices], answers: Iterator[FetchedBatch]) -> list[Batch]:
        """The micro-batches of these requests, whose answers come next."""
        found: list[Batch] = []
        self._latest, self._bad = [], 0
        for request in requests:
            answer = next(answers)
            batch = self.data.on_device(answer, request.indices)
            self._bad += len(answer.bad)
            if batch is not None:
                self._latest.append((request, answer.kept))
                found.append(self._finished(batch, request))
        return found

    def divide(self, plan: BatchPlan) -> None:
        """Take the coming steps from `plan`. What was read ahead by the one before is dropped."""
        if self._pool is not None:
            self._pool.end()
        self.plan = plan
        self.__post_init__()

    def latest_indices(self) -> list[list[int]]:
        """The indices of the samples that the latest `step` returned, one list per micro-batch."""
        return [[request.indices[offset] for offset in kept] for request, kept in self._latest]

    def latest_bad(self) -> int:
        return self._bad

    def _finished(self, batch: Batch, request: BatchIndices) -> Batch:
        if self.transform is None:
            return batch
        seed_transform(self.plan.seed, request.epoch, request.position, self.data.how.device)
        return transformed("train_transform", self.transform, batch)


def _requests_of(plan: BatchPlan, order: Callable[[int], Any], number: int) -> list[BatchIndices]:
    """The micro-batches of this rank in one step, counted from 0 over all epochs."""
    epoch, step = divmod(number, plan.steps_per_epoch)
    parts = [slice(each.start, each.stop) for each in plan.micro_positions(step)]
    return [BatchIndices(epoch, part.start, tuple(order(epoch)[part].tolist())) for part in parts]
