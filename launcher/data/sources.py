"""The kinds of sets that a recipe may give, one way to read each of them, and the sets of a run.

Owns the choice by kind, and the translation of `data.*` into how samples are read and in which batches they
are trained on. What a set is made of is in `tensors` and `loader`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from launcher.config.schema import Config
from launcher.data.batch_plan import BatchPlan
from launcher.data.iterable_loader import IterableData, IterableLoader
from launcher.data.labels import Labels
from launcher.data.loader import LoaderConfig
from launcher.data.map_loader import MapDataset, MapLoader
from launcher.data.reader import Collate
from launcher.data.shares import fixed_shares
from launcher.data.tensors import Batch, Batches, DeviceBatches, TensorData, Transform
from launcher.distributed.env import WorkerEnv
from launcher.errors import ConfigError, DataError

Readable = TensorData | MapDataset | IterableData
ONLY_SET = ""  # the name of a validation set that is the only one
FIRST = 32  # samples of a `first_batch` at most
MOST_LOADERS = 8  # processes per rank that data.num_workers=auto starts
PATIENCE = 0.8  # of launch.hang_timeout_s: then the error can name the sample


def set_title(name: str) -> str:
    """`validation`, or the same with the name of one of several sets."""
    return "validation" if name == ONLY_SET else f"validation ({name})"


def length_of(data: object) -> int | None:
    """The number of samples, where the set knows it; the __len__ of some streams raises."""
    try:
        return len(data)  # type: ignore[arg-type]
    except (TypeError, NotImplementedError):
        return None


def wrap_dataset(data: object, collate: Collate | None, how: LoaderConfig, kind: str) -> Readable:
    """A recipe's set as one that batches can be made of: on the device, or read by loader processes.

    Raises DataError for anything else. `kind` is "training" or "validation", for messages.
    """
    if isinstance(data, TensorData):
        return data.to(how.device)
    if isinstance(data, DataLoader):
        raise DataError(
            f"the recipe's {kind} set is a DataLoader. Give the data set itself (loader.dataset), and its "
            "collate_fn as Recipe.collate: the launcher makes the loader, with data.num_workers processes, "
            "so that all ranks and every resume see the same order."
        )
    if isinstance(data, IterableDataset) or not (hasattr(data, "__getitem__") and hasattr(data, "__len__")):
        return _stream(data, collate, how, kind)
    return MapDataset(data, collate, how, kind)


def _stream(data: object, collate: Collate | None, how: LoaderConfig, kind: str) -> IterableData:
    if isinstance(data, Iterator):
        raise DataError(
            f"the recipe's {kind} set is a {type(data).__name__}, which can be read only once. Give an "
            "object that can be read again: its __iter__ returns a new iterator."
        )
    if not hasattr(data, "__iter__"):
        raise DataError(
            f"the recipe's {kind} set is a {type(data).__name__}. Give TensorData, a map-style data set "
            "(with __len__ and __getitem__), or an iterable."
        )
    return IterableData(data, collate, how, kind)


def training_batches(
    data: Readable,
    plan: BatchPlan,
    transform: Transform | None,
    total_steps: int,
    saved: Sequence[str] = (),
) -> Batches:
    """The batches of `plan`. `total_steps` is the length of the run: nothing is read ahead beyond it.

    For a stream `saved` has the positions of all ranks of the run that is resumed.
    """
    if isinstance(data, TensorData):
        return DeviceBatches(data, plan, transform)
    if isinstance(data, IterableData):
        return IterableLoader(data, plan, transform, saved)
    return MapLoader(data, plan, transform, total_steps)


def trial_batches(data: Readable, plan: BatchPlan, transform: Transform | None, most: int) -> list[Batch]:
    """Micro-batches of this rank in the step with the longest samples, to try whether they fit in memory.

    All of them for a set on the device, otherwise the first `most`, read in this process; of a stream only
    the first. The order of the run is not touched.
    """
    return training_batches(data, plan, transform, total_steps=0).trial(plan.longest_step(0), most)


@dataclass(frozen=True)
class DataSets:
    """Sets as batches are made of them: on the device, or behind the loader processes that read them."""

    train: Readable
    validation: Mapping[str, Readable]  # by name; ONLY_SET where there is one without

    @classmethod
    def of(
        cls,
        config: Config,
        env: WorkerEnv,
        train: object,
        validation: Mapping[str, object],
        collate: Collate | None = None,
        labels: Labels | None = None,
    ) -> DataSets:
        """Those of a recipe."""
        how = LoaderConfig(
            workers=workers(config, env),
            device=env.device,
            seed=config.seed,
            max_bad_samples=config.data.max_bad_samples,
            timeout_s=PATIENCE * config.launch.hang_timeout_s,
            timeout_key="launch.hang_timeout_s",
            labels=labels,
        )
        limit, key = config.launch.user_code_timeout_s, "launch.user_code_timeout_s"
        unlimited = replace(how, timeout_s=PATIENCE * (limit or 0.0), timeout_key=key)
        held_out = {
            name: wrap_dataset(data, collate, unlimited, set_title(name)) for name, data in validation.items()
        }
        return cls(wrap_dataset(train, collate, how, "training"), held_out)


def workers(config: Config, env: WorkerEnv) -> int:
    """How many processes read samples for this rank."""
    if config.data.num_workers != "auto":
        return int(config.data.num_workers)
    return min(MOST_LOADERS, len(os.sched_getaffinity(0)) // env.local_world_size)


def batch_plan(
    config: Config, env: WorkerEnv, train: Readable, lengths: Sequence[int] | Tensor | None = None
) -> BatchPlan:
    """How the training samples are divided. `lengths` are those of Recipe.lengths.

    ConfigError for a stream in a run without train.max_steps, or that cannot be divided as data.share asks;
    DataError for lengths that do not fit.
    """
    if isinstance(train, IterableData):
        if lengths is not None:
            raise DataError(
                "Recipe.lengths is given, but the training set is a stream, whose samples come in their own "
                "order. Remove it, or group samples of similar length in the stream."
            )
        if config.train.max_steps is None:
            raise ConfigError(
                "train.max_steps is not set, but the training set is a stream, of unknown length: "
                "set train.max_steps=N. A stream that ends earlier is read again."
            )
        divided = train.self_sharding or config.data.share == "auto"
        if env.world_size > 1 and config.data.share != "equal" and divided:
            raise ConfigError(
                f"data.share={config.data.share}: the training set is a stream, which is divided before "
                "ranks are measured, and one of the `datasets` library divides itself into equal parts. Set "
                "data.share=equal, or for another stream a list such as data.share=[0.75,0.25]."
            )
        num_samples = config.train.max_steps * config.data.batch_size
    else:
        num_samples = len(train)
    wish = config.data.micro_batch_size
    return BatchPlan(
        num_samples=num_samples,
        batch_size=config.data.batch_size,
        # None: the share of a rank is one micro-batch, or the size is to be found.
        micro_batch=None if wish is None or wish == "auto" else int(wish),
        world_size=env.world_size,
        rank=env.rank,
        seed=config.seed,
        drop_last=config.data.drop_last,
        lengths=None if lengths is None else sample_lengths(lengths, num_samples),
        shares=fixed_shares(config.data.share, config.data.batch_size, env.world_size),
    )


def sample_lengths(lengths: Sequence[int] | Tensor, num_samples: int) -> Tensor:
    """Recipe.lengths as a tensor [num_samples]. DataError unless it has a length for each sample."""
    found = torch.as_tensor(lengths).cpu()
    if found.shape != (num_samples,):
        raise DataError(
            f"Recipe.lengths has shape {list(found.shape)}: it must have one entry for each of the "
            f"{num_samples} training samples."
        )
    return found
