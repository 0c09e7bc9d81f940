"""One micro-batch of a map-style data set, read and collated in whatever process this runs.

Owns what becomes of a sample that cannot be read. Never raises for one: a loader process hands over what was
wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from torch import Tensor
from torch.utils.data import default_collate

from launcher.data.seeding import derive_seed, seed_all, seed_reading
from launcher.data.tensors import Batch
from launcher.errors import DataError, LauncherError, counted, described, listed
from launcher.user_code import short_traceback, user_location

# By a user's data set. Those that are no Exception end a loader process without a word.
RAISED = (Exception, GeneratorExit, KeyboardInterrupt, SystemExit)
SHOWN_SAMPLES = 8  # in an error

Collate = Callable[[Sequence[Any]], Mapping[str, Tensor]]


class Indexed(Protocol):
    """A map-style data set, as torch's and Hugging Face's are."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> object: ...


@dataclass(frozen=True)
class BatchIndices:
    """Samples of one micro-batch: `indices`, the first of which is at `position` of the epoch's order."""

    epoch: int
    position: int
    indices: tuple[int, ...]


@dataclass(frozen=True)
class BadSample:
    """A sample that could not be read, and why."""

    index: int
    error: str  # "ValueError: text"
    place: str  # file:line of the user's, empty where there is none
    traceback: str  # a short one, of an exception that nobody has foreseen

    @classmethod
    def of(cls, index: int, error: BaseException) -> BadSample:
        return cls(index, in_words(error), user_location(error), unforeseen(error))

    def refusal(self, name: str, advice: str) -> DataError:
        """The error for a sample that may not be left out. `name` is that of the data."""
        end = "" if self.error.endswith(".") else "."
        return _data_error(f"the {name}: {self}{end} {advice}", self.traceback)

    def __str__(self) -> str:
        return f"sample {self.index}{f' at {self.place}' if self.place else ''}: {self.error}"


@dataclass(frozen=True)
class InStream:
    """Where a stream stands after a micro-batch, in the process that made it."""

    process: int
    state: dict[str, object]  # "at" and, of a stream that has state_dict(), "stream"


@dataclass(frozen=True)
class FetchedBatch:
    """What came of a request. `kept` are the offsets in it of the samples that the batch holds."""

    batch: Batch | None  # on the CPU; None where no sample could be read
    kept: Sequence[int]
    bad: tuple[BadSample, ...] = ()
    failure: str = ""  # of the collation; empty if there was none
    traceback: str = ""  # of the failure, short, where nobody has foreseen it
    stands: InStream | None = None  # of a stream whose samples could be read

    @classmethod
    def failed(cls, what: str, error: BaseException, bad: tuple[BadSample, ...] = ()) -> FetchedBatch:
        """A request that came to nothing because of this error."""
        return cls(None, (), bad, f"{what}: {in_words(error)}", unforeseen(error))

    def refuse_failure(self, name: str) -> None:
        """Raise DataError where the batch could not be collated. `name` is that of the data."""
        if self.failure:
            raise _data_error(f"the {name}: {self.failure}", self.traceback)

    def pin_memory(self) -> FetchedBatch:
        """The same in memory that a GPU copies from by itself; torch's DataLoader calls it."""
        if self.batch is None:
            return self
        return replace(self, batch={name: column.pin_memory() for name, column in self.batch.items()})


SMALL_SHM = (
    "/dev/shm has no room for a batch of a loader process. Start docker with --shm-size=1g or --ipc=host, or "
    "set data.num_workers=0"
)


class Reader:
    """Answers requests from a data set. What torch's DataLoader holds as its data set.

    The generators are seeded before each request. A data set with `__getitems__(indices)` is asked for all
    samples of a request at once, as by torch's DataLoader. `set_epoch` of a data set that has it is called
    before the first sample of another epoch, in every process: each has a copy of its own and reads ahead.
    """

    def __init__(self, dataset: Any, collate: Collate | None, seed: int) -> None:
        self._dataset = dataset
        self._collate = collate
        self._seed = seed
        self._epoch: int | None = None  # that set_epoch was called for

    def __getitem__(self, request: BatchIndices) -> FetchedBatch:
        try:
            self._enter_epoch(max(request.epoch, 0))
        except RAISED as error:  # a user's data set may fail in any way
            return FetchedBatch.failed(f"set_epoch failed{_at(error)}", error)
        bad: list[BadSample] = []
        kept: Sequence[int] = range(len(request.indices))
        samples = self._read_together(request) if hasattr(self._dataset, "__getitems__") else None
        if samples is None:
            samples, kept, bad = self._read_each(request)
        if not samples:
            return FetchedBatch(None, (), tuple(bad))
        try:
            return FetchedBatch(collated(samples, self._collate), kept, tuple(bad))
        except RAISED as error:
            return self._failed([request.indices[offset] for offset in kept], error, bad)

    def _enter_epoch(self, epoch: int) -> None:
        """Call `set_epoch` where another epoch was set last; with 0 for samples that are evaluated.

        What it draws from the generators of the process depends on (seed, epoch) alone.
        """
        if epoch != self._epoch and hasattr(self._dataset, "set_epoch"):
            seed_all(derive_seed("set_epoch", self._seed, epoch))
            self._dataset.set_epoch(epoch)
            self._epoch = epoch

    def _read_together(self, request: BatchIndices) -> Sequence[Any] | None:
        """Read all samples by one call of `__getitems__`; None where it fails."""
        seed_reading(self._seed, request.epoch, request.position)
        try:
            samples = self._dataset.__getitems__(list(request.indices))
        except RAISED:  # a user's data set may fail in any way; read one by one, the sample is named
            return None
        whole = isinstance(samples, list | tuple) and len(samples) == len(request.indices)
        return samples if whole and not any(sample is None for sample in samples) else None

    def _read_each(self, request: BatchIndices) -> tuple[Sequence[Any], tuple[int, ...], list[BadSample]]:
        """The samples, their offsets in the request, and those that cannot be read."""
        seed_reading(self._seed, request.epoch, request.position)
        samples: list[Any] = []
        kept: list[int] = []
        bad: list[BadSample] = []
        dataset, keep = self._dataset, samples.append  # looked up once, not per sample
        for offset, index in enumerate(request.indices):
            try:
                sample = dataset[index]
                if sample is None:  # as many data sets say that they cannot read one
                    raise ValueError("the data set returned None")
            except RAISED as error:  # a user's data set may fail in any way
                bad.append(BadSample.of(index, error))
            else:
                keep(sample)
                kept.append(offset)
        return samples, tuple(kept), bad

    def _failed(self, indices: list[int], error: BaseException, bad: list[BadSample]) -> FetchedBatch:
        """No batch, because samples with these indices could not be collated."""
        if "shared memory" in str(error):  # torch's text; no sample is to blame
            return FetchedBatch.failed(SMALL_SHM, error, tuple(bad))
        where = " in the recipe's collate" if self._collate and not isinstance(error, DataError) else ""
        what = f"samples {listed(indices, SHOWN_SAMPLES)}{where}{_at(error)}"
        return FetchedBatch.failed(what, error, tuple(bad))


def collated(samples: Sequence[Any], collate: Collate | None) -> Batch:
    """A batch of samples, by the recipe's collate or torch's own.

    DataError unless it holds tensors only, and at least one of them has a row per sample.
    """
    if collate is None and not isinstance(samples[0], Mapping):
        parts = len(samples[0]) if isinstance(samples[0], tuple | list) else 1
        names = ", ".join(f'"{name}"' for name in ("image", "label", "third")[:parts])
        raise DataError(
            f"a sample is a {type(samples[0]).__name__}{f' of {parts}' if parts > 1 else ''}, whose columns "
            f"have no names. Return a dictionary, or set Recipe.collate to launcher.recipe.columns({names})."
        )
    batch = default_collate(list(samples)) if collate is None else collate(samples)
    odd = [f"{name} ({type(each).__name__})" for name, each in batch.items() if not isinstance(each, Tensor)]
    if odd:
        raise DataError(
            f"a batch has columns that are not tensors: {', '.join(odd)}. Each column of a batch must be a "
            "tensor with a row per sample. Leave these out, or turn them into tensors, in the data set or in "
            "Recipe.collate. Hugging Face's data sets give tensors after .with_format('torch')."
        )
    # Other columns may be packed: their tokens one after another, say.
    if not any(column.shape[:1] == (len(samples),) for column in batch.values()):
        found = ", ".join(f"{name} {list(column.shape)}" for name, column in batch.items()) or "no column"
        raise DataError(
            f"the recipe's collate was given {counted(len(samples), 'sample')} and returned {found}: no "
            "column has a row per sample. It must return every sample once. To leave samples out, raise an "
            "error in the data set and set data.max_bad_samples. A packed batch needs one column with a row "
            "per sample, such as their lengths."
        )
    return dict(batch)


def columns(*names: str) -> Collate:
    """A collate for samples that are tuples: names their parts, and stacks them with torch's own.

    columns("image", "label") turns n samples (Tensor [...], int) into image [n, ...] and label int64 [n].
    """

    def collate(samples: Sequence[Any]) -> Mapping[str, Tensor]:
        first = samples[0]
        parts = len(first) if isinstance(first, tuple | list) else 1
        if parts != len(names):
            given = f"columns() was given {counted(len(names), 'name')}: {', '.join(names)}"
            raise DataError(f"a sample has {counted(parts, 'part')}, and {given}. Each part needs a name.")
        made = default_collate(list(samples))
        return dict(zip(names, made if isinstance(first, tuple | list) else [made], strict=True))

    return collate


def in_words(error: BaseException) -> str:
    return str(error) if isinstance(error, DataError) else described(error)


def unforeseen(error: BaseException) -> str:
    """The short traceback of an error whose text is not for users."""
    return error.traceback if isinstance(error, LauncherError) else short_traceback(error)


def _data_error(text: str, traceback: str) -> DataError:
    error = DataError(text)
    error.traceback = traceback
    return error


def _at(error: BaseException) -> str:
    place = user_location(error)
    return f" at {place}" if place else ""
