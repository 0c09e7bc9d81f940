"""Checks that all ranks, and the run of a checkpoint, have the same data, by digests of a few samples.

Owns the comparison before the first step. Reads a whole data set only where it is in memory.
"""

from __future__ import annotations

import hashlib
import json
import re
import statistics
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from numpy import ndarray
from torch import Tensor

from launcher.config.messages import shortened
from launcher.data.epochs import EVALUATION
from launcher.data.iterable_loader import IterableData
from launcher.data.map_loader import MapDataset
from launcher.data.reader import BatchIndices, FetchedBatch
from launcher.data.sources import Readable, set_title
from launcher.data.tensors import TensorData
from launcher.distributed.collectives import all_gather_str
from launcher.distributed.env import WorkerEnv
from launcher.errors import DataError, DataWarning, listed
from launcher.metrics.metric import name_of
from launcher.recipe.contract import Recipe, normalisation_of

CHUNK_BYTES = 1 << 26  # hashed at once
SHOWN = 4  # differences that an error names
READ = 8  # samples of a data set that has to read them: before the first step, and each may be a large image
FIRST_OF_STREAM = 4  # samples: a stream may compute each, and is begun anew afterwards


def compare_data(own: Mapping[str, str], env: WorkerEnv) -> None:
    """Raise DataError, on all ranks, unless this rank's `data_fingerprint` is that of all. A collective."""
    check_equal_on_ranks([json.loads(text) for text in all_gather_str(env, json.dumps(own))])


NOT_COMPARED_ON_RESUME = (
    "the metrics",
    "the name that runs are compared by",
)  # a resumed run may have others
INPUT_DTYPES = (
    "torch.float",
    "torch.bfloat",
    "torch.uint8",
)  # dtypes of inputs that another machine may round otherwise


def check_same_data_as_checkpoint(before: Mapping[str, str], now: Mapping[str, str], allowed: bool) -> str:
    """What differs from the data of a checkpoint and may; empty if nothing does.

    `before` is empty for a checkpoint without a fingerprint. Raises DataError for a difference in what gives
    the weights their meaning (classes and their order, labels, vocabulary, columns, normalisation, whole
    numbers such as tokens) unless it is `allowed`, by checkpoint.allow_other_data.
    """
    known = [key for key in before if key in now and key not in NOT_COMPARED_ON_RESUME]
    others = [key for key in known if before[key] != now[key]]
    if not others:
        return ""
    advice = "Build the same data in every process: sort what comes from a set() or a folder."
    meaning = [key for key in others if not _is_only_inputs(key, before, now)]
    if meaning and not allowed:
        values = [f"{key} ({shortened(before[key])} there, {shortened(now[key])} now)" for key in meaning]
        raise DataError(
            f"the data gives the weights of the checkpoint another meaning: {listed(values, SHOWN, '; ')} "
            f"differ. {advice} If the change is meant: checkpoint.allow_other_data=true; to start anew, "
            "choose another run.dir."
        )
    return (
        f"the data is not that of the checkpoint: {listed(others, SHOWN)} differ. The run is not bit for "
        f"bit the one that was saved, and samples that were trained on may be held out now. "
        f"If that is not meant: {advice}"
    )


def _is_only_inputs(key: str, before: Mapping[str, str], now: Mapping[str, str]) -> bool:
    """Whether it is about inputs alone, or evaluations, and not about labels, tokens or columns."""
    about, _, column = key.partition(" column ")
    if "validation" in about or about.startswith("the fingerprint of"):
        return True
    inputs = [
        each
        for each in before
        if each.startswith(f"{about} column ") and before[each].startswith(INPUT_DTYPES)
    ]
    if any(before[each] == now.get(each) for each in inputs):
        return False  # beside equal inputs it is a target
    (form, _, _), (form_now, _, _) = before[key].partition(":"), now[key].partition(":")
    if form != form_now or column == before.get("the label column"):
        return False
    return form.startswith(INPUT_DTYPES) and not _is_reordered(before[key], now[key])


def _is_reordered(before: str, now: str) -> bool:
    """Whether two `statistics_of` are of equal numbers in another order, as columns out of a set() have."""
    found, found_now = STATISTICS.search(before), STATISTICS.search(now)
    if found is None or found_now is None:
        return False
    # Rounded to 0.1: numbers that another machine rounds otherwise may differ by one unit.
    pairs = zip(found[2].split(), found_now[2].split(), strict=True)
    return found[1] == found_now[1] and any(abs(float(one) - float(other)) > 0.15 for one, other in pairs)


def data_fingerprint(recipe: Recipe, train: Readable, validation: Mapping[str, Readable]) -> dict[str, str]:
    """What is equal on ranks with the same data, by its name in errors.

    Lengths, classes, and of each column in memory the dtype, shape and all rows; of other sets some samples.
    Of a data set with a method `fingerprint()` only what this returns.
    """
    known = {
        "the metrics": ", ".join(name_of(metric) for metric in recipe.metrics_or_default),
        "the name that runs are compared by": str(recipe.monitor),
        "the label column": recipe.label_column,
    }
    if recipe.classes is not None:
        known["the classes"] = str(recipe.classes)
    if (normalisation := normalisation_of(recipe)) is not None:
        known["the normalisation"] = json.dumps(_rounded(normalisation))
    held_out = [(set_title(name), data) for name, data in validation.items()]
    for name, data in (("training", train), *held_out):
        if isinstance(data, TensorData):
            columns = {column: described(values) for column, values in data.columns.items()}
            known[f"the number of {name} samples"] = str(len(data))
            known[f"the {name} columns"] = ", ".join(sorted(columns))
            known |= {f"{name} column {column}": text for column, text in sorted(columns.items())}
        else:
            known |= describe_source(data, name)
    return known


def describe_source(data: MapDataset | IterableData, name: str) -> dict[str, str]:
    """What the data set says of itself, and some of its samples; of a stream the first."""
    source = data.stream if isinstance(data, IterableData) else data.dataset
    known = {f"the {kind} of the {name} set": text for kind, text in _known_of_itself(source) if text}
    if isinstance(data, IterableData):
        first = data.first(FIRST_OF_STREAM)
        if first is None:
            raise DataError(
                f"the {name} stream is empty: its __iter__ ended before its first sample. It is called "
                "anew for each pass, so it must not return an iterator that is already used up."
            )
        return known | describe_batch(f"{name} samples 0 to {len(first.kept) - 1}", first)
    known[f"the number of {name} samples"] = str(len(data))
    if f"the fingerprint of the {name} set" in known and f"the labels of the {name} set" in known:
        return known
    warn_unless_repeatable(data)
    count = min(READ, len(data))
    # The first, the last, and some between them.
    for index in (each * (len(data) - 1) // max(count - 1, 1) for each in range(count)):
        known |= describe_batch(
            f"{name} sample {index}", data.fetch(BatchIndices(EVALUATION, index, (index,)))
        )
    return known


def _known_of_itself(source: object) -> Iterator[tuple[str, str]]:
    """What a data set has under the names that those of torchvision, datasets and transformers use."""
    if callable(own := getattr(source, "fingerprint", None)):
        yield "fingerprint", str(own())
    numbers, features = getattr(source, "class_to_idx", None), getattr(source, "features", None)
    if isinstance(features, Mapping):  # of datasets
        numbers = {column: each.names for column, each in features.items() if hasattr(each, "names")}
    if isinstance(numbers, Mapping):
        yield "classes", str(sorted(numbers.items())) if numbers else ""
    labels = getattr(source, "labels", getattr(source, "targets", None))
    labels = labels.tolist() if isinstance(labels, Tensor | ndarray) else labels
    if isinstance(labels, list | tuple) and all(isinstance(each, int | str) for each in labels):
        yield "labels", _text_digest(str(labels))
    tokenizer, vocabulary = getattr(source, "tokenizer", None), getattr(source, "vocab", None)
    if callable(get := getattr(tokenizer, "get_vocab", None)):
        vocabulary = get()
    if isinstance(vocabulary, Mapping):
        yield "vocabulary", f"{len(vocabulary)} tokens, {_text_digest(str(sorted(vocabulary.items())))}"


def _text_digest(text: str) -> str:
    return hashlib.sha256(text.encode(errors="backslashreplace")).hexdigest()[:12]


def _rounded(value: Any) -> Any:
    """Numbers that are computed from the data, without the digits that another machine rounds otherwise."""
    if isinstance(value, Mapping):
        return {name: _rounded(each) for name, each in value.items()}
    return [_rounded(each) for each in value] if isinstance(value, Sequence) else f"{float(value):.3g}"


def warn_unless_repeatable(data: MapDataset) -> None:
    """Warn of a data set whose first sample is another when it is read again with the same seed."""
    if not len(data):
        return
    first, again = (data.fetch(BatchIndices(EVALUATION, 0, (0,))).batch or {} for _ in range(2))
    odd = [name for name in first if name not in again or _bits(first[name]) != _bits(again[name])]
    if odd:
        warnings.warn(
            f"sample 0 of the {data.kind} set differs when it is read again with the same seed, in "
            f"{', '.join(odd)}. A resume, and another number of ranks or of data.num_workers, will train on "
            "other samples. Draw from random, numpy.random or torch, which are seeded before each "
            "micro-batch. Keep no generator, counter or open file in it from one sample to the next.",
            DataWarning,
            stacklevel=2,
        )


def _bits(values: Tensor) -> tuple[object, ...]:
    return values.dtype, values.shape, digest(values)


def digest(values: Tensor) -> str:
    """A digest of the bits of a tensor, which one thread makes at about 1 GB/s."""
    found = hashlib.sha256()
    rows = values.detach().reshape(-1) if values.ndim < 2 else values.detach()
    # In parts: of a column on a GPU, or of one with gaps, no second copy is made.
    for part in torch.split(rows, max(1, CHUNK_BYTES // max(1, rows[:1].nbytes))):
        found.update(part.cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()[:12]


STATISTICS = re.compile(r"(mean \S+ deviation \S+) order (\S+ \S+)")


def statistics_of(values: Tensor) -> str:
    """Mean and deviation, and two numbers that depend on the order; "" unless it is floating-point.

    Rounded, because numbers that each machine computes for itself may differ in their last bits.
    """
    if not values.is_floating_point() or not values.numel():
        return ""
    flat = values.detach().double().reshape(-1).cpu()
    mean, deviation = flat.mean(), flat.std(correction=0)
    places = torch.arange(1, flat.numel() + 1, dtype=torch.float64)
    order = [0.0, 0.0]
    # 1e-5 is some 80 times the rounding of an fp32 value.
    if mean.abs() < 1e-5 * deviation:  # rounding: a sample that was standardised by itself has the mean 0
        mean = torch.zeros_like(mean)
    if deviation > 1e-5 * mean.abs():  # less is rounding
        size = deviation * flat.numel() ** 0.5
        order = [float((flat - mean) @ weights / size) for weights in (places.sin(), places.cos())]
    first, second = (round(each, 1) + 0.0 for each in order)
    return f"mean {mean:.3g} deviation {deviation:.3g} order {first} {second}"


def described(values: Tensor) -> str:
    """Dtype, shape and digest of a column in memory, and statistics of its first rows."""
    more = f", {found}" if (found := statistics_of(values[:READ])) else ""
    return f"{values.dtype} {list(values.shape)}: digest {digest(values)}{more}"


def describe_batch(name: str, fetched: FetchedBatch) -> dict[str, str]:
    """Describe each column: dtype, shape, and a digest of whole numbers, statistics of others."""
    if fetched.batch is None:
        return {name: "cannot be read"}
    known = {f"{name} columns": ", ".join(sorted(fetched.batch))}
    for column, values in sorted(fetched.batch.items()):
        summary = statistics_of(values)
        text = f"{values.dtype} {list(values.shape)}: {summary}" if summary else described(values)
        known[f"{name} column {column}"] = text
    return known


def check_equal_on_ranks(by_rank: Sequence[dict[str, str]]) -> None:
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
