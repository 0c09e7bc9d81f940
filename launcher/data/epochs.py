"""The epoch of map-style data sets that have `set_epoch`, in whatever process their samples are read.

Owns when it is called: before the first sample of another epoch, in every process that reads one, since each
loader process has a copy of its own and reads ahead.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

from torch.utils.data import ConcatDataset, StackDataset, Subset

from launcher.data.seeding import derive_seed, seed_all

EVALUATION = -1  # the epoch of samples that are evaluated: their random numbers are always the same

_set: dict[int, tuple[weakref.ref[object], int]] = {}  # in this process; a data set may have several readers


def with_epochs(dataset: object) -> list[object]:
    """The data sets with `set_epoch`: this one, or those that torch's own wrappers are around."""
    return [each for each in _within(dataset) if callable(getattr(each, "set_epoch", None))]


def reads_together(dataset: object) -> bool:
    """Whether it has a `__getitems__` that is not only the loop of torch's own wrappers."""
    within = [each for each in _within(dataset) if not isinstance(each, Subset | StackDataset)]
    return hasattr(dataset, "__getitems__") and any(hasattr(each, "__getitems__") for each in within)


def enter_epoch(datasets: list[Any], epoch: int, seed: int) -> None:
    """Call `set_epoch` where another epoch was set last; with 0 for samples that are evaluated.

    What it draws from the generators of the process depends on (seed, epoch) alone.
    """
    epoch = 0 if epoch == EVALUATION else epoch
    for dataset in datasets:
        known = _set.get(id(dataset))
        if known is not None and known[0]() is dataset and known[1] == epoch:
            continue
        seed_all(derive_seed("set_epoch", seed, epoch))
        dataset.set_epoch(epoch)
        try:
            _set[id(dataset)] = weakref.ref(dataset), epoch
        except TypeError:  # of a class without weak references: set again with each request
            _set.pop(id(dataset), None)


def _within(dataset: object) -> Iterator[object]:
    """The data set, and those that torch's own wrappers are around."""
    yield dataset
    if isinstance(dataset, Subset):
        yield from _within(dataset.dataset)
    elif isinstance(dataset, ConcatDataset | StackDataset):
        parts = dataset.datasets
        for part in parts.values() if isinstance(parts, dict) else parts:
            yield from _within(part)
