"""Checks that all ranks, and the run of a checkpoint, have the same data, by digests of a few samples.

Owns the comparison before the first step. Reads a whole data set only where it is in memory.
"""

from __future__ import annotations

import hashlib
import json
import statistics
import warnings
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from launcher.config.messages import shortened
from launcher.data.epochs import EVALUATION
from launcher.data.images.photograph_set import PhotographSet
from launcher.data.indexed import IndexedData
from launcher.data.reader import BatchRequest, Fetched
from launcher.data.sources import Readable, set_title
from launcher.data.streamed import StreamData
from launcher.data.tensors import TensorData
from launcher.distributed.collectives import exchange_texts
from launcher.distributed.env import WorkerEnv
from launcher.errors import DataError, DataWarning
from launcher.metrics.metric import name_of
from launcher.recipe.contract import Recipe

CHUNK_BYTES = 1 << 26  # hashed at once
READ = 8  # samples of a data set that has to read them
FIRST_OF_STREAM = 4  # samples


def compare_data(
    recipe: Recipe, train: Readable, validation: Mapping[str, Readable], env: WorkerEnv
) -> dict[str, str]:
    """The fingerprint of the data. Raises DataError, on all ranks, unless it is equal on all ranks.

    Compares lengths, classes, and of each column in memory the dtype, shape and all rows; of other sets some
    samples. Of a data set with a method `fingerprint()` only what this returns. A collective.
    """
    own = fingerprint(recipe, train, validation)
    refuse_other_data([json.loads(text) for text in exchange_texts(env, json.dumps(own))])
    return own


def changes(before: Mapping[str, str], now: Mapping[str, str]) -> str:
    """A text of what differs from the data that a checkpoint was trained on; empty if nothing does.

    `before` is empty for a checkpoint without a fingerprint. Raises DataError where the same samples have
    permuted labels: the model would have to learn its classes anew.
    """
    # Columns have names of their own: a digest of another form, as of an earlier version, has another name.
    odd = [key for key in before if before[key] != now.get(key) and (key in now or " column " not in key)]
    if not odd:
        return ""
    own, labels = "the classes", f"column {now.get('the label column')}, all bytes"
    others = [key for key in odd if key != own]
    # A permutation of names has the same characters.
    permuted = own in odd and sorted(before[own]) == sorted(now[own])
    if permuted and others and all(key.endswith(labels) for key in others):
        raise DataError(
            f"the checkpoint has the classes {shortened(before[own])}, but now they are "
            f"{shortened(now[own])}, and the labels are numbered in this order. Sort the classes, or start "
            "anew with another run.dir."
        )
    return (
        f"the data is not that of the checkpoint: {', '.join(odd)} differ(s). The run is not bit for bit "
        "the one that was saved, and samples that were trained on may be held out now. Build the same data "
        "in every process: sort what comes from a set or a folder, and seed generators of your own."
    )


def fingerprint(recipe: Recipe, train: Readable, validation: Mapping[str, Readable]) -> dict[str, str]:
    """What is equal on ranks with the same data, by its name in errors."""
    known = {
        "the classes": str(recipe.classes),
        "the metrics": ", ".join(name_of(metric) for metric in recipe.measures),
        "the name that runs are compared by": str(recipe.compare_by),
        "the label column": recipe.label,
    }
    held_out = [(set_title(name), data) for name, data in validation.items()]
    for name, data in (("training", train), *held_out):
        if isinstance(data, StreamData):
            own = own_fingerprint(data.stream)
            first = None if own else data.first(FIRST_OF_STREAM)
            if not own and first is None:
                raise DataError(
                    f"the {name} stream is empty: its __iter__ ended before its first sample. It is called "
                    "anew for each pass, so it must not return an iterator that is already used up."
                )
            known[f"the {name} stream"] = own or batch_digest(first)
            continue
        known[f"the number of {name} samples"] = str(len(data))
        if isinstance(data, TensorData):
            known[f"the {name} columns"] = ", ".join(sorted(data.columns))
            for column, values in sorted(data.columns.items()):
                shape = f"{values.dtype} {list(values.shape)}"
                known[f"{name} column {column}, all bytes"] = f"{shape}, digest {digest(values)}"
        elif own := own_fingerprint(data.dataset):
            known[f"the fingerprint of the {name} set"] = own
            if isinstance(data.dataset, PhotographSet) and (contents := data.dataset.contents()):
                known[f"{name} column image, some bytes"] = contents
        else:
            warn_unless_repeatable(data)
            count = min(READ, len(data))
            # The first, the last, and some between them.
            for index in (each * (len(data) - 1) // max(count - 1, 1) for each in range(count)):
                fetched = data.fetch(BatchRequest(EVALUATION, index, (index,)))
                known[f"{name} sample {index}"] = batch_digest(fetched)
    return known


def warn_unless_repeatable(data: IndexedData) -> None:
    """Warn of a data set whose first sample is another when it is read again with the same seed."""
    if not len(data):
        return
    first, again = (data.fetch(BatchRequest(EVALUATION, 0, (0,))).batch or {} for _ in range(2))
    odd = [name for name in first if name not in again or _bits(first[name]) != _bits(again[name])]
    if odd:
        warnings.warn(
            f"sample 0 of the {data.kind} set differs when it is read again with the same seed, in "
            f"{', '.join(odd)}. A resume, and another number of ranks or of data.workers, will train on "
            "other samples. Draw from random, numpy.random or torch, which are seeded before each sample, or "
            "give the data set a method sample(index, generator). Keep no generator, counter or open file in "
            "it from one sample to the next.",
            DataWarning,
            stacklevel=2,
        )


def _bits(values: Tensor) -> tuple[object, ...]:
    return values.dtype, values.shape, digest(values)


def own_fingerprint(data: object) -> str:
    """What a data set says of itself by its method `fingerprint()`; empty where it has none."""
    own = getattr(data, "fingerprint", None)
    return str(own()) if callable(own) else ""


def digest(values: Tensor) -> str:
    """A digest of the bits of a tensor, which one thread makes at about 1 GB/s."""
    found = hashlib.sha256()
    rows = values.detach().reshape(-1) if values.ndim < 2 else values.detach()
    # In parts: of a column on a GPU, or of one with gaps, no second copy is made.
    for part in torch.split(rows, max(1, CHUNK_BYTES // max(1, rows[:1].nbytes))):
        found.update(part.cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()[:12]


def batch_digest(fetched: Fetched | None) -> str:
    """Columns with dtype and shape; a digest of whole numbers, mean and deviation of others.

    Floating-point numbers that each rank computes for itself may differ in their last bits between machines.
    """
    if fetched is None or fetched.batch is None:
        return "cannot be read"
    known = []
    for name, values in sorted(fetched.batch.items()):
        content = digest(values)
        if values.is_floating_point() and values.numel():
            content = f"{values.double().mean():.3g} {values.double().std(correction=0):.3g}"
        known.append(f"{name} {values.dtype} {list(values.shape)} {content}")
    return ", ".join(known)


def refuse_other_data(by_rank: Sequence[dict[str, str]]) -> None:
    """Raise DataError unless all fingerprints are equal; names the ranks that differ from the others.

    Of fingerprints that equally many ranks have, as with two ranks, that of the lowest rank is the usual one.
    """
    texts = [json.dumps(each, sort_keys=True) for each in by_rank]
    usual = by_rank[texts.index(statistics.mode(texts))]
    odd = [rank for rank, each in enumerate(by_rank) if each != usual]
    if not odd:
        return
    found: dict[str, str] = {}
    for rank in odd:
        for key in (*usual, *by_rank[rank]):
            own, theirs = by_rank[rank].get(key, "missing"), usual.get(key, "missing")
            if own != theirs:
                found.setdefault(key, f"{key} ({own} on rank {rank}, {theirs} elsewhere)")
    ranks, differences = ", ".join(map(str, odd)), "; ".join(found.values())
    raise DataError(
        f"the ranks do not hold the same data. Rank {ranks} differs in: {differences}. "
        "Every rank must build the same data set. Draw random numbers from random, numpy.random or torch, "
        "which are seeded with the config's seed, or from a generator with a seed of your own, such as "
        "numpy.random.default_rng(config.seed). Sort what comes from a set or a folder: the order of these "
        "changes from process to process. Give the shuffle of a stream a seed."
    )
