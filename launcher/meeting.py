"""The ranks of a job meet: what each runs on, whether all were started alike and hold the same data.

Owns the facts that have to be the same everywhere and that nothing else would notice.
"""

from __future__ import annotations

import hashlib
import json
import platform
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from launcher.checkpoint.choice import exchange_texts
from launcher.config import Config, to_dict
from launcher.environment import WorkerEnv
from launcher.errors import DataError, PreflightError
from launcher.recipe import Recipe

if TYPE_CHECKING:
    import torch.distributed as dist

COMPARED = 66  # samples of a column: the first, the last, and those spread evenly between them


def meet(config: Config, env: WorkerEnv, store: dist.Store | None, job: str) -> list[str]:
    """What each rank runs on, in rank order. All ranks call it; the store waits for those that are late.

    Raises PreflightError, on all ranks alike, where they were not started alike.
    """
    device = (
        torch.cuda.get_device_name(env.device)
        if env.device.type == "cuda"
        else f"CPU {platform.machine()}, {torch.get_num_threads()} thread(s)"
    )
    if store is None:
        return [device]
    store.set(f"{job}/meeting/{env.rank}", json.dumps({"device": device, "facts": facts(config)}))
    said = [json.loads(store.get(f"{job}/meeting/{rank}")) for rank in range(env.world_size)]
    refuse_differences([words["facts"] for words in said])
    return [words["device"] for words in said]


def facts(config: Config) -> dict[str, str]:
    """What has to be the same on all ranks: versions, and digests of the config and of a recipe file."""
    recipe = Path(config.recipes.path).read_bytes() if config.recipes.path else b""
    return {
        "torch": torch.__version__,
        "Python": platform.python_version(),
        "the seed": str(config.seed),
        "the digest of the config": _digest(json.dumps(to_dict(config), sort_keys=True).encode()),
        "the digest of the recipe file": _digest(recipe),
    }


def refuse_differences(by_rank: list[dict[str, str]]) -> None:
    """Raise PreflightError unless all ranks say the same as rank 0."""
    first = by_rank[0]
    lines = [
        f"rank {rank}: {key} is {value}, and {first[key]} on rank 0"
        for rank, own in enumerate(by_rank)
        for key, value in own.items()
        if value != first[key]
    ]
    if lines:
        raise PreflightError(
            f"the ranks were not started alike: {'; '.join(lines)}. Start all of them from the same "
            "installation, with the same files and arguments."
        )


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:12]


def compare_data(recipe: Recipe, env: WorkerEnv) -> None:
    """Raise DataError, on all ranks alike, unless all hold the same data. A collective.

    Compares lengths, classes, and of each column dtype, shape and a digest of some samples, which alone are
    read. The data may be on any device.
    """
    by_rank = [json.loads(text) for text in exchange_texts(env, json.dumps(fingerprint(recipe)))]
    refuse_other_data(by_rank)


def fingerprint(recipe: Recipe) -> dict[str, str]:
    """What ranks with the same data agree on, by the name under which an error mentions it."""
    known = {
        "the classes": str(recipe.classes),
        "the metric": recipe.metric,
        "the label column": recipe.label,
    }
    for name, data in (("training", recipe.train), ("validation", recipe.validation)):
        known[f"the number of {name} samples"] = str(len(data))
        known[f"the {name} columns"] = ", ".join(sorted(data.columns))
        for column, values in sorted(data.columns.items()):
            known[f"{name} column {column}"] = f"{values.dtype} {list(values.shape)}, digest {spread(values)}"
    return known


def spread(column: Tensor) -> str:
    """Digest of the bits of `COMPARED` samples of a column: the first, the last, and some between them."""
    length = len(column)
    count = min(COMPARED, length)
    positions = [index * (length - 1) // max(count - 1, 1) for index in range(count)]
    samples = column[torch.tensor(positions, dtype=torch.int64, device=column.device)]
    return _digest(samples.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())


def refuse_other_data(by_rank: Sequence[dict[str, str]]) -> None:
    """Raise DataError unless all fingerprints are equal; names the ranks that most others contradict.

    Where no majority exists, as with two ranks, those are named that differ from rank 0.
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
        "changes from process to process."
    )
