"""The metrics of one evaluation, updated on each rank, and made one on rank 0, the same for every number of
ranks.

A metric with `merge` is updated on its own rank; the copies meet in rank order. One without is updated on
rank 0 alone with what all ranks have kept, in the order of the set. Rank 0 computes and sends the numbers, so
that all ranks decide by the same bits.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

import launcher.errors
from launcher.data.tensors import Batch
from launcher.distributed.collectives import send_to_all
from launcher.distributed.process_group import WorkerEnv
from launcher.errors import ConfigError, LauncherError, RecipeError
from launcher.evaluation.confusion import Confusion
from launcher.evaluation.packing import packed, unpacked
from launcher.evaluation.torchmetrics_objects import adapted, is_torchmetrics
from launcher.metrics import Classification, LossMetric
from launcher.metrics.metric import direction_of, name_of
from launcher.recipe import Loss, Recipe, refuse_taken_name

Guard = Callable[[str, Batch | None], AbstractContextManager[None]]
Rows = tuple[Any, Batch]  # outputs and batch
HOST = torch.device("cpu")


def unguarded(what: str, batch: Batch | None) -> AbstractContextManager[None]:
    """Exceptions of metrics as they are."""
    return nullcontext()


@dataclass(frozen=True)
class Numbers:
    """What the metrics of an evaluation have found, the same on all ranks."""

    values: dict[str, float]
    higher_is_better: dict[str, bool | None]  # by name; None: the metric does not say
    confusion: Confusion | None = None  # of the first Classification; on rank 0 only


@dataclass
class Measuring:
    """The metrics of a recipe during one evaluation. `guard` surrounds each call of one of them."""

    recipe: Recipe
    env: WorkerEnv
    guard: Guard = unguarded
    beat: Callable[[], object] = lambda: None
    _order: list[Any] = field(default_factory=list)  # all of them, as the recipe has them
    _merged: list[Any] = field(default_factory=list)
    _fed: list[Any] = field(default_factory=list)
    _kept: list[Rows] = field(default_factory=list)
    _failure: LauncherError | None = None  # on rank 0, until all ranks have met

    def __post_init__(self) -> None:
        for metric in self.recipe.measures:
            started = self._started(metric)
            self._order.append(started)
            if hasattr(started, "merge"):
                self._merged.append(started)
            elif not isinstance(started, LossMetric):
                self._fed.append(started)

    def update(self, loss: Loss, batch: Batch) -> None:
        """Add a batch of this rank. Raises ConfigError for a loss without outputs."""
        if not self._merged and not self._fed:
            return
        outputs = readable(loss.outputs, [name_of(metric) for metric in (*self._merged, *self._fed)])
        self._update(self._merged, outputs, batch)
        if self.env.is_leader:
            self._update(self._fed, outputs, batch)
        elif self._fed:
            self._kept.append((_on(HOST, outputs), _on(HOST, self._read_by_fed(batch))))

    def conclude(self, loss_sum: float, count: int) -> Numbers:
        """The numbers over all ranks. A collective; raises on all ranks alike."""
        if self.env.world_size > 1:
            self._collect()
        numbers = None
        if self.env.is_leader and self._failure is None:
            with self._held():
                numbers = self._compute(loss_sum, count)
        told = send_to_all(self.env, _said(numbers, self._failure).encode(), sender=0)
        if self._failure is not None:
            raise self._failure
        return numbers or _heard(json.loads(told))

    @contextmanager
    def _held(self) -> Iterator[None]:
        """Keep what the user's code raises until all ranks have met: the others wait in a collective."""
        try:
            yield
        except LauncherError as error:
            self._failure = self._failure or error

    def _update(self, metrics: Sequence[Any], outputs: Any, batch: Batch) -> None:
        for metric in metrics:
            with self.guard(f"the metric {name_of(metric)}'s update", batch):
                metric.update(outputs, batch)

    def _collect(self) -> None:
        """Bring all to rank 0, rank by rank: its own share comes first in the set."""
        kinds = [type(metric) for metric in self._merged]
        own = [_packed_metric(metric, kinds) for metric in self._merged]  # on rank 0 too: all fail, or none
        for rank in range(1, self.env.world_size):
            for metric, mine in zip(self._merged, own, strict=True):
                sent = send_to_all(self.env, mine, rank)
                if self.env.is_leader:
                    self._merge(metric, unpacked(sent, self.env.device, kinds))
            if self._fed:
                self._feed(rank)

    def _started(self, metric: Any) -> Any:
        """The metric without samples."""
        if is_torchmetrics(metric):
            return adapted(metric, self.recipe.label, self.env.device)
        if isinstance(metric, LossMetric):
            return metric
        with self.guard(f"the metric {name_of(metric)}'s reset", None):
            return fresh(metric)

    def _read_by_fed(self, batch: Batch) -> Batch:
        """The columns that the metrics without merge read; all where one of them does not say."""
        read = [getattr(metric, "columns", None) for metric in self._fed]
        known = {name for columns in read for name in columns or ()}
        return batch if None in read else {name: batch[name] for name in batch if name in known}

    def _merge(self, metric: Any, other: Any) -> None:
        with self._held(), self.guard(f"the metric {name_of(metric)}'s merge", None):
            metric.merge(other)

    def _feed(self, rank: int) -> None:
        """Update rank 0's copies with what `rank` has kept."""
        number = int(send_to_all(self.env, str(len(self._kept)).encode(), rank))
        for index in range(number):
            self.beat()
            sent = send_to_all(self.env, packed(self._kept[index]) if self.env.rank == rank else b"", rank)
            if self.env.is_leader:
                rows = unpacked(sent, self.env.device)
                outputs, batch = (_on(self.env.device, each) for each in rows)
                with self._held():
                    self._update(self._fed, outputs, batch)

    def _compute(self, loss_sum: float, count: int) -> Numbers:
        """On rank 0, in the order in which the recipe has the metrics."""
        numbers = Numbers({}, {})
        taken: dict[str, str] = {}
        for metric in self._order:
            with self.guard(f"the metric {name_of(metric)}'s compute", None):
                of_loss = isinstance(metric, LossMetric)
                found = metric.of_loss(loss_sum, count) if of_loss else metric.compute()
            for name, value in as_numbers(metric, found).items():
                refuse_taken_name(name, name_of(metric), taken)
                taken[name] = name_of(metric)
                numbers.values[name] = value
                numbers.higher_is_better[name] = direction_of(metric, name)
            if numbers.confusion is None and isinstance(metric, Classification):
                numbers = replace(numbers, confusion=Confusion(metric.classes, metric.confusion_matrix()))
        return numbers


def fresh(metric: Any) -> Any:
    """The metric without samples: reset where it can be, else a copy of it as the recipe made it."""
    if callable(getattr(metric, "reset", None)):
        metric.reset()
        return metric
    return copy.deepcopy(metric)


def readable(outputs: Any, metrics: Sequence[str]) -> Any:
    """What metrics get: no gradient, half precision as fp32. Raises ConfigError for what is no tensor."""
    if isinstance(outputs, Tensor):
        detached = outputs.detach()
        return detached.float() if detached.dtype in (torch.float16, torch.bfloat16) else detached
    if isinstance(outputs, Mapping) and outputs:
        return {name: readable(each, metrics) for name, each in outputs.items()}
    given = "none" if outputs is None else type(outputs).__name__
    raise ConfigError(
        f"the recipe's metrics ({', '.join(metrics)}) read outputs, but its loss gave {given}. Return "
        "Loss(sum, count, outputs) with a tensor, such as the logits, or a mapping of tensors."
    )


def rows_with_nan(outputs: Any) -> Tensor | int:
    """How many samples have a NaN in some output [n, ...]; a tensor without samples counts as one."""
    if isinstance(outputs, Mapping):
        return sum((rows_with_nan(each) for each in outputs.values()), start=0)
    if not isinstance(outputs, Tensor) or not outputs.is_floating_point():
        return 0
    return outputs.detach().isnan().reshape(len(outputs) if outputs.ndim else 1, -1).any(dim=1).sum()


def as_numbers(metric: Any, found: Any) -> dict[str, float]:
    """What `compute` returned as floats by name. Raises RecipeError for anything else."""
    named = found if isinstance(found, Mapping) else {name_of(metric): found}
    numbers: dict[str, float] = {}
    for name, value in named.items():
        if isinstance(value, int | float | np.number) or (hasattr(value, "item") and _size(value) == 1):
            numbers[str(name)] = float(value.item() if hasattr(value, "item") else value)
        else:
            shape = f" of the shape {list(value.shape)}" if hasattr(value, "shape") else ""
            raise RecipeError(
                f"the metric {name_of(metric)} gave {type(value).__name__}{shape} as {name!r}. compute() has "
                "to return one number for each name: {name: value}."
            )
    return numbers


def _size(value: Any) -> int:
    return value.numel() if isinstance(value, Tensor) else int(np.size(value))


def _packed_metric(metric: Any, kinds: Sequence[type]) -> bytes:
    try:
        return packed(metric, kinds)
    except Exception as error:  # pickle raises whatever the attributes raise
        raise RecipeError(
            f"the metric {name_of(metric)} has merge, but cannot be sent to rank 0: {error}. Keep only "
            "numbers, tensors and arrays in it, or leave merge out: then it is updated on rank 0 alone."
        ) from error


def _said(numbers: Numbers | None, failure: LauncherError | None) -> str:
    if failure is not None:
        return json.dumps({"kind": type(failure).__name__, "text": str(failure)})
    return json.dumps(None if numbers is None else [numbers.values, numbers.higher_is_better])


def _heard(told: Any) -> Numbers:
    """What rank 0 has said; its floats arrive bit for bit. Raises what it raises."""
    if isinstance(told, dict):
        raise getattr(launcher.errors, told["kind"])(told["text"])
    return Numbers(*told)


def _on(device: torch.device, value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().to(device)
    return {name: _on(device, each) for name, each in value.items()} if isinstance(value, Mapping) else value
