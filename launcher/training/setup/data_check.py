"""Checks that all ranks, and the run of a checkpoint, have the same data, by digests of a few samples.

Owns the comparison before the first step. Reads a whole data set only where it is in memory.
"""

from __future__ import annotations

import hashlib
import json
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from launcher.data.epochs import EVALUATION
from launcher.data.indexed import IndexedData
from launcher.data.reader import Fetched, Request
from launcher.data.sources import Readable, set_title
from launcher.data.streamed import StreamData
from launcher.data.tensors import TensorData
from launcher.distributed.collectives import exchange_texts
from launcher.distributed.env import WorkerEnv
from launcher.errors import DataError, DataWarning
from launcher.metrics.metric import name_of
from launcher.recipe.contract import Recipe

READ = 8  # samples of a data set that has to read them
FIRST_OF_STREAM = 4  # samples
CHUNK = 2**24  # numbers that are read at once
WORD_BYTES = 8
COMPARED = 66  # samples of a column: the first, the last, and those spread evenly between them


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

    `before` is empty for a checkpoint without a fingerprint.
    """
    odd = [key for key in before if before[key] != now.get(key)]
    if not odd:
        return ""
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
                text = f"{values.dtype} {list(values.shape)}, digest {spread(values)}"
                known[f"{name} column {column}"] = text
                known[f"{name} column {column}, all rows"] = weighted_sum(values)
        elif own := own_fingerprint(data.dataset):
            known[f"the fingerprint of the {name} set"] = own
        else:
            warn_unless_repeatable(data)
            for index in spread_positions(len(data), READ):
                known[f"{name} sample {index}"] = batch_digest(
                    data.fetch(Request(EVALUATION, index, (index,)))
                )
    return known


def warn_unless_repeatable(data: IndexedData) -> None:
    """Warn of a data set whose first sample is another when it is read again with the same seed."""
    if not len(data):
        return
    first, again = (data.fetch(Request(EVALUATION, 0, (0,))).batch or {} for _ in range(2))
    odd = [name for name, column in first.items() if not _same(column, again.get(name))]
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


def _same(one: Tensor, other: Tensor | None) -> bool:
    """Whether two tensors have the same bits."""
    if other is None or (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    return one.numel() == 0 or digest(one) == digest(other)


def own_fingerprint(data: object) -> str:
    """What a data set says of itself by its method `fingerprint()`; empty where it has none."""
    own = getattr(data, "fingerprint", None)
    return str(own()) if callable(own) else ""


def spread(column: Tensor) -> str:
    """Digest of the bits of `COMPARED` samples of a column: the first, the last, and some between them."""
    positions = spread_positions(len(column), COMPARED)
    return digest(column[torch.tensor(positions, dtype=torch.int64, device=column.device)])


def weighted_sum(column: Tensor) -> str:
    """Sum of all 8-byte words of a column, each times an odd number of its own, modulo 2**64.

    Another value of one word always changes it, since odd numbers have an inverse there. Small whole numbers
    in another order may not, as labels 0 1 1 0 and 1 0 0 1: `spread` tells these apart. Computed where the
    column lies, in one pass of some GB/s.
    """
    content = column.detach().contiguous().view(-1).view(torch.uint8)
    whole = len(content) // WORD_BYTES * WORD_BYTES
    rest = torch.nn.functional.pad(content[whole:], (0, WORD_BYTES - (len(content) - whole)))
    words, total = content[:whole].view(torch.int64), int(rest.view(torch.int64))
    for start in range(0, len(words), CHUNK):
        part = words[start : start + CHUNK]
        factors = torch.arange(start, start + len(part), device=part.device).mul_(2).add_(3)
        total += int(factors.mul_(part).sum())
    return f"{total % 2**64:016x}"


def spread_positions(length: int, count: int) -> list[int]:
    """The first and the last of `length` positions and some between them, at most `count`."""
    count = min(count, length)
    return [index * (length - 1) // max(count - 1, 1) for index in range(count)]


def digest(values: Tensor) -> str:
    """A digest of the bits of a tensor."""
    content = values.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    return hashlib.sha256(content).hexdigest()[:12]


def batch_digest(fetched: Fetched | None) -> str:
    """Columns with dtype and shape; a digest of whole numbers, mean and deviation of others.

    Floating-point numbers that each rank computes for itself may differ in their last bits between machines.
    """
    if fetched is None or fetched.batch is None:
        return "cannot be read"
    known = [(name, values, _content(values)) for name, values in sorted(fetched.batch.items())]
    return ", ".join(f"{name} {values.dtype} {list(values.shape)} {text}" for name, values, text in known)


def _content(values: Tensor) -> str:
    if not values.is_floating_point() or not values.numel():
        return digest(values)
    return f"{values.double().mean():.3g} {values.double().std(correction=0):.3g}"


def refuse_other_data(by_rank: Sequence[dict[str, str]]) -> None:
    """Raise DataError unless all fingerprints are equal; names the ranks that differ from the majority.

    Without a majority, as with two ranks, it names those that differ from rank 0.
    """
    votes = Counter(json.dumps(each, sort_keys=True) for each in by_rank)
    text, most = votes.most_common(1)[0]
    usual = json.loads(text) if 2 * most > len(by_rank) else by_rank[0]
    odd = [rank for rank, each in enumerate(by_rank) if each != usual]
    if not odd:
        return
    keys = dict.fromkeys(
        key for rank in odd for key in (*usual, *by_rank[rank]) if usual.get(key) != by_rank[rank].get(key)
    )
    first = by_rank[odd[0]]
    found = "; ".join(
        f"{key} ({first.get(key, 'missing')} on rank {odd[0]}, {usual.get(key, 'missing')} elsewhere)"
        for key in keys
    )
    raise DataError(
        f"the ranks do not hold the same data. Rank {', '.join(map(str, odd))} differs in: {found}. "
        "Every rank must build the same data set. Draw random numbers from random, numpy.random or torch, "
        "which are seeded with the config's seed, or from a generator with a seed of your own, such as "
        "numpy.random.default_rng(config.seed). Sort what comes from a set or a folder: the order of these "
        "changes from process to process. Give the shuffle of a stream a seed."
    )
