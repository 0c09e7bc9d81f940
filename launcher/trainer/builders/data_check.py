"""Checks that all ranks, and the run of a checkpoint, have the same data, by digests of a few samples.

Owns the comparison before the first step. Reads a whole data set only where it is in memory.
"""

from __future__ import annotations

import hashlib
import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from launcher.config.messages import shortened
from launcher.data.iterable_loader import IterableData
from launcher.data.map_loader import MapDataset
from launcher.data.reader import BatchIndices, FetchedBatch
from launcher.data.seeding import EVALUATION
from launcher.data.sources import Readable, set_title
from launcher.data.tensors import TensorData
from launcher.distributed.collectives import all_gather_str
from launcher.distributed.env import WorkerEnv
from launcher.errors import DataError, listed
from launcher.recipe.contract import Recipe, normalisation_of

SHOWN = 4  # differences that an error names
READ = 8  # samples of a data set that has to read them: before the first step, and each may be a large image
FIRST_OF_STREAM = 4  # samples: a stream may compute each, and is begun anew afterwards


def compare_data(own: Mapping[str, str], env: WorkerEnv) -> None:
    """Raise DataError, on all ranks, unless this rank's `data_fingerprint` is that of all. A collective."""
    check_equal_on_ranks([json.loads(text) for text in all_gather_str(env, json.dumps(own))])


INPUT_DTYPES = ("torch.float", "torch.bfloat", "torch.uint8")  # which another machine may round otherwise


def check_same_data_as_checkpoint(before: Mapping[str, str], now: Mapping[str, str], allowed: bool) -> str:
    """What differs from the data of a checkpoint and may; empty if nothing does.

    `before` is empty for a checkpoint without a fingerprint. Raises DataError for a difference in what gives
    the weights their meaning (classes and their order, labels, vocabulary, columns, normalisation, whole
    numbers such as tokens) unless it is `allowed`, by checkpoint.allow_other_data.
    """
    others = [key for key in before if key in now and before[key] != now[key]]
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
    form, form_now = before[key].partition(":")[0], now[key].partition(":")[0]
    return form == form_now and form.startswith(INPUT_DTYPES) and column != before.get("the label column")


def data_fingerprint(recipe: Recipe, train: Readable, validation: Mapping[str, Readable]) -> dict[str, str]:
    """What is equal on ranks with the same data, by its name in errors.

    Lengths, classes, and of each column in memory the dtype, shape and all rows; of other sets some samples.
    Of a data set with a method `fingerprint()` only what this returns.
    """
    known = {"the label column": recipe.label_column}
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
    if f"the fingerprint of the {name} set" in known:
        return known
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


def _rounded(value: Any) -> Any:
    """Numbers that are computed from the data, without the digits that another machine rounds otherwise."""
    if isinstance(value, Mapping):
        return {name: _rounded(each) for name, each in value.items()}
    return [_rounded(each) for each in value] if isinstance(value, Sequence) else f"{float(value):.3g}"


def digest(values: Tensor) -> str:
    """A digest of the bits of a tensor, which one thread makes at about 1 GB/s."""
    content = values.detach().cpu().contiguous().view(-1).view(torch.uint8)
    return hashlib.sha256(content.numpy().data).hexdigest()[:12]


def summary_of(values: Tensor) -> str:
    """Two numbers that depend on the values of a floating-point tensor, their signs and their order.

    Rounded, because numbers that each machine computes for itself may differ in their last bits. Sums of one
    sign, in which rounding does not grow.
    """
    flat = values.detach().double().reshape(-1).cpu()
    weights = torch.arange(1, flat.numel() + 1, dtype=torch.float64) / max(1, flat.numel()) ** 2
    return f"{flat.clamp(min=0) @ weights:.3g} {flat.clamp(max=0) @ weights:.3g}"


def described(values: Tensor) -> str:
    """Dtype, shape and digest of a column in memory."""
    return f"{values.dtype} {list(values.shape)}: digest {digest(values)}"


def describe_batch(name: str, fetched: FetchedBatch) -> dict[str, str]:
    """Describe each column: dtype, shape, and a digest of whole numbers, a summary of others."""
    if fetched.batch is None:
        return {name: "cannot be read"}
    known = {f"{name} columns": ", ".join(sorted(fetched.batch))}
    for column, values in sorted(fetched.batch.items()):
        text = described(values)
        if values.is_floating_point():
            text = f"{values.dtype} {list(values.shape)}: {summary_of(values)}"
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
