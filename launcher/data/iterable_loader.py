"""Batches of a stream: an iterable of unknown length, which may be larger than the disk.

Owns its division among ranks and loader processes, its position for a resume, and its end. Two kinds:

- Hugging Face's `IterableDataset` divides itself among ranks and processes, by shards where it can, and knows
  its own position. Ranks may come to their end at different steps.
- Any other iterable is read whole by every process, which keeps its share: the order then depends on neither
  the number of ranks nor that of processes.

A resume skips forward, unless the stream has a `state_dict()` of JSON values.
"""

from __future__ import annotations

import copy
import json
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import count, islice
from typing import Any

from torch.utils.data import IterableDataset, get_worker_info
from torch.utils.data._utils import worker as torch_worker

from launcher.data.batch_plan import BatchPlan
from launcher.data.loader import LoadedSet, LoaderConfig, WorkerPool
from launcher.data.reader import RAISED, BadSample, Collate, FetchedBatch, InStream, collated
from launcher.data.seeding import EVALUATION, derive_seed, seed_all, seed_transform
from launcher.data.tensors import Batch, Batches, Transform, transformed
from launcher.errors import ConfigError, counted

CATCH = "A stream ends with an error: catch it in the stream, and leave the sample out there."
REPORTED_S = 1.0  # a resume that skips for longer says so

log = logging.getLogger("launcher")


@dataclass(frozen=True)
class LoaderState:
    """Where one rank stands in a stream: its pass over it, the steps of that pass that are done."""

    ranks: int
    processes: int
    passes: int = 0  # that are complete
    step: int = 0
    next_process: int = 0  # that makes the next micro-batch
    # Of the processes: "at", the samples read, and "stream", its own state where it has one.
    states: dict[str, Any] = field(default_factory=dict)


@dataclass(eq=False)
class StreamReader(IterableDataset[FetchedBatch]):
    """Makes micro-batches of a stream in whatever process this is. A data set of torch's DataLoader.

    `parts(step)` are the positions of this rank's micro-batches in the stream, from that step of a pass on.
    `divided`: the stream divides itself among ranks and processes.
    """

    stream: Iterable[object]  # which may have set_epoch(), state_dict() and load_state_dict()
    collate: Collate | None
    seed: int
    rank: int
    divided: bool
    parts: Callable[[int], Iterator[range]]
    start: LoaderState  # of the first pass

    def __post_init__(self) -> None:
        if self.divided and self.start.ranks > 1:
            from datasets.distributed import split_dataset_by_node

            self.stream = split_dataset_by_node(self.stream, self.rank, self.start.ranks)
        self._pass = self._begun = self.start.passes
        self._process: tuple[int, int] | None = None  # number and how many, in a loader process
        self._reader = ""  # who draws the same random numbers for the same position

    def begin(self) -> None:
        """Begin a pass, in the worker. All loader processes share the epoch of a Hugging Face stream.

        Its set_epoch() adds the difference to a number in shared memory: of two processes that call it at
        once, both add.
        """
        if self.divided:
            self._set_epoch(self._begun)
        self._begun += 1

    def _set_epoch(self, epoch: int) -> None:
        if callable(set_epoch := getattr(self.stream, "set_epoch", None)):
            set_epoch(0 if self._pass == EVALUATION else epoch)

    def __iter__(self) -> Iterator[FetchedBatch]:
        if self._process is None and (info := get_worker_info()) is not None:
            self._process = info.id, info.num_workers
        start, self.start = self.start, LoaderState(0, 0)
        own, processes = self._process or (0, 1)
        number = (own + start.next_process) % processes  # the first process makes what was to come next
        current, self._pass = self._pass, self._pass if self._pass == EVALUATION else self._pass + 1
        self._reader = f"{self.rank}/{number}" if self.divided else "all"  # alike read alike
        if self._process is not None:
            present(number, processes, self.divided)
        parts = self.parts(start.step)
        if not self.divided:
            parts = islice(parts, own, None, processes)
        yield from self._micro_batches(parts, start.states.get(str(number)), number, current)

    def _micro_batches(
        self, parts: Iterator[range], state: dict[str, Any] | None, number: int, current_pass: int
    ) -> Iterator[FetchedBatch]:
        # What set_epoch() draws is the same on all ranks.
        seed_all(derive_seed("stream begins", self.seed, current_pass, self._reader))
        if not self.divided:
            self._set_epoch(current_pass)
        at = 0
        stood = 0 if state is None else int(state["at"])
        if state is not None and "stream" in state:
            self.stream.load_state_dict(state["stream"])  # type: ignore[attr-defined]
            at = stood
        # What it draws before its first sample: the same in every process that reads it whole.
        seed_all(derive_seed("stream begins", self.seed, current_pass, self._reader))
        source = iter(self.stream)
        for part in parts:
            goal = max(at, stood) if self.divided else part.start
            samples: list[object] = []
            while len(samples) < len(part):
                # For each sample, not each micro-batch: ranks, processes and a resume that skips forward read
                # other parts of it, and must find the same order where the stream shuffles by what it draws.
                seed_all(derive_seed("stream", self.seed, current_pass, self._reader, at))
                try:
                    sample = next(source)
                except StopIteration:
                    break
                except RAISED as error:  # a generator is over then
                    yield FetchedBatch(None, (), (BadSample.of(at, error),))
                    return
                if at >= goal:
                    samples.append(sample)
                at += 1
            if not samples:
                return
            try:
                made = FetchedBatch(collated(samples, self.collate), range(len(samples)))
            except RAISED as error:
                made = FetchedBatch.failed(f"samples {part.start} to {at - 1}", error)
            state_dict = getattr(self.stream, "state_dict", None)
            state = {"at": at, "stream": state_dict()} if callable(state_dict) else {"at": at}
            yield replace(made, stands=InStream(number, state))


class IterableData(LoadedSet):
    """A stream, how its samples are collated and how they are read."""

    def __init__(
        self, stream: Iterable[object], collate: Collate | None, how: LoaderConfig, kind: str
    ) -> None:
        # None of its samples may be left out: an iteration that raised is over.
        super().__init__(replace(how, max_bad_samples=0), kind, f"{kind} stream", CATCH)
        self.stream = stream
        self._collate = collate

    @property
    def self_sharding(self) -> bool:
        """Whether it is Hugging Face's, which divides itself among ranks and processes."""
        return type(self.stream).__module__.partition(".")[0] == "datasets"

    def pool(self, rank: int, parts: Callable[[int], Iterator[range]], start: LoaderState) -> WorkerPool:
        """Processes that make the micro-batches of one rank, from `start` on."""
        how, divided = self.how, self.self_sharding
        reader = StreamReader(self.stream, self._collate, how.seed, rank, divided, parts, start)
        return WorkerPool(reader, None, how, self.kind)

    def first(self, samples: int) -> FetchedBatch | None:
        """The first samples of the whole stream, read in this process; None of an empty one."""
        stream = copy.copy(self.stream)  # it may remember where it stands
        whole, start = [range(samples)], LoaderState(1, 0)
        reader = StreamReader(stream, self._collate, self.how.seed, 0, False, lambda step: iter(whole), start)
        return next(iter(reader), None)

    def usable(self, fetched: FetchedBatch) -> Batch:
        """The batch, on the device. Raises DataError where there is none."""
        batch = self.on_device(fetched)
        assert batch is not None, "without a failure there is one"
        return batch

    def first_batch(self, rank: int, world_size: int, batch_size: int, most: int) -> Batch | None:
        """At most `most` samples, the first of the whole stream, the same on all ranks; None without any."""
        fetched = self.first(min(batch_size, most))
        return None if fetched is None else self.usable(fetched)

    def evaluation_batches(
        self, rank: int, world_size: int, batch_size: int, shares: Sequence[int] = ()
    ) -> Iterator[tuple[int, Batch]]:
        """This rank's samples, as (how many, batch). Over all ranks, every sample occurs once.

        Ranks take batches in turn, whatever their `shares`: how many there are is not known.
        """

        def parts(step: int) -> Iterator[range]:
            for number in count(rank, world_size):
                yield range(number * batch_size, (number + 1) * batch_size)

        start = LoaderState(world_size, self.how.workers, passes=EVALUATION)
        key = (rank, world_size, batch_size)
        for fetched in self.evaluation_pool(key, lambda: self.pool(rank, parts, start)):
            yield len(fetched.kept), self.usable(fetched)


# A micro-batch of a stream as it was read, how many passes are complete, the position of its first sample.
Taken = tuple[FetchedBatch, int, int]


@dataclass(eq=False)
class IterableLoader(Batches):
    """Training batches of a stream, in order. Where it ends on all ranks it starts again."""

    data: IterableData
    plan: BatchPlan
    transform: Transform | None
    saved: Sequence[str] = ()  # the texts of `position()` of all ranks of a run that this one resumes

    def __post_init__(self) -> None:
        self._stands = self._resumed()
        self._pool: WorkerPool | None = None
        self._fetched: Iterator[FetchedBatch] = iter(())
        self._ahead: FetchedBatch | None = None
        self._recent: dict[int, list[Taken]] = {}  # of the latest two steps: a GPU's are read one step late
        self._latest = -1  # the step that was asked for last
        self._missing = 0

    def step(self, epoch: int, step: int) -> list[Batch]:
        """This rank's micro-batches: of the next step, or again of one of the two before."""
        if step not in self._recent:
            self._recent = dict([*self._recent.items()][-1:]) | {step: self._take()}
        self._latest = step
        return [self._finished(*taken) for taken in self._recent[step]]

    def trial(self, step: int, most: int) -> list[Batch]:
        """A micro-batch of the first samples of the whole stream, if there are any. Reads nothing ahead."""
        fetched = self.data.first(self.plan.largest_micro_batch)
        return [] if fetched is None else [self._finished(fetched, 0, 0)]

    def latest_indices(self) -> list[list[int]]:
        """Numbers of the samples that the latest `step` returned, within their micro-batch."""
        return [list(fetched.kept) for fetched, _, _ in self._recent.get(self._latest, [])]

    def missing(self) -> int:
        """How many samples of its share this rank lacks in the latest step."""
        return self._missing

    def exhausted(self) -> bool:
        """Whether this rank has nothing left in this pass."""
        ended = self._pool is not None and self._ahead is None
        return ended and self._stands.step < self.plan.steps_per_epoch  # else it is the run that ends

    def restart_epoch(self) -> None:
        """Start the next pass. To be called on all ranks after the same step."""
        stands = self._stands
        self._stands = LoaderState(stands.ranks, stands.processes, stands.passes + 1)
        self._read_ahead()

    def position(self) -> str:
        """Where this rank stands after the latest step, for `saved`."""
        try:
            return json.dumps(vars(self._stands))
        except TypeError:  # the states of the stream are no values of JSON: a resume skips forward
            states = {number: {"at": state["at"]} for number, state in self._stands.states.items()}
            return json.dumps(vars(replace(self._stands, states=states)))

    def _resumed(self) -> LoaderState:
        ranks, processes = self.plan.world_size, self.data.how.workers
        if not self.saved:
            return LoaderState(ranks, processes)
        found = [LoaderState(**json.loads(text)) for text in self.saved]
        if (found[0].ranks, found[0].processes) == (ranks, processes):
            return found[self.plan.rank]
        if self.data.self_sharding:
            before = f"{counted(found[0].ranks, 'rank')} with data.num_workers={found[0].processes}"
            raise ConfigError(
                f"the checkpoint is of {before}, among which the stream was divided. It cannot be resumed on "
                f"{ranks} with data.num_workers={processes}: start with as many, or afresh with "
                "checkpoint.resume=never."
            )
        return LoaderState(ranks, processes, found[0].passes, found[0].step)

    def _start(self) -> None:
        def parts(step: int) -> Iterator[range]:
            for number in range(step, self.plan.steps_per_epoch):
                yield from self.plan.micro_positions(number)

        self._pool = self.data.pool(self.plan.rank, parts, self._stands)
        began = time.monotonic()
        self._read_ahead()
        if self._stands.step and (took := time.monotonic() - began) > REPORTED_S:
            log.info("finding step %d of the stream again took %.0f s", self._stands.step, took)

    def _read_ahead(self) -> None:
        """Begin a pass of the pool."""
        assert self._pool is not None
        self._fetched = iter(self._pool)
        self._ahead = next(self._fetched, None)

    def _take(self) -> list[Taken]:
        if self._pool is None:
            self._start()
        stands = self._stands
        taken = []
        parts = self.plan.micro_positions(stands.step)
        for part in parts:
            if self._ahead is None:
                break
            taken.append((self._ahead, stands.passes, part.start))
            if made := self._ahead.stands:
                stands = replace(
                    stands,
                    next_process=(made.process + 1) % max(stands.processes, 1),
                    states={**stands.states, str(made.process): made.state},
                )
            self._ahead = next(self._fetched, None)
        self._stands = replace(stands, step=stands.step + 1)
        self._missing = sum(map(len, parts)) - sum(len(fetched.kept) for fetched, _, _ in taken)
        return taken

    def _finished(self, fetched: FetchedBatch, passes: int, position: int) -> Batch:
        batch, device = self.data.usable(fetched), self.data.how.device
        if self.transform is None:
            return batch
        seed_transform(self.plan.seed, passes, position, device)
        return transformed("train_transform", self.transform, batch)


def present(number: int, processes: int, self_sharding: bool) -> None:
    """What a stream finds where it asks torch which loader process this is.

    One that divides itself finds its number. To any other the processes are hidden: it would give each a
    part, of which we would take a part.
    """
    info = get_worker_info()
    if info is None or not self_sharding:
        torch_worker._worker_info = None
        return
    torch_worker._worker_info = torch_worker.WorkerInfo(
        id=number, num_workers=processes, seed=info.seed, dataset=info.dataset
    )
