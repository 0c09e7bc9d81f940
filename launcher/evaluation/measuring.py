"""The metrics of one evaluation, whose values are the same on any number of ranks.

Owns how a metric gets the samples of all ranks. With `merge` each rank updates its own copy, and rank 0
merges the states in rank order. Without, only rank 0 updates it, with the outputs and batches of all ranks in
the order of the set. Rank 0 computes and sends the values, so that all ranks have the same bits.
"""

from __future__ import annotations

import copy
import json
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from launcher.data.tensors import Batch
from launcher.distributed.alone import hidden_process_group
from launcher.distributed.collectives import broadcast_bytes, error_message, pack_result, unpack_result
from launcher.distributed.env import WorkerEnv
from launcher.errors import ConfigError, LauncherError, described, escaped
from launcher.evaluation.torchmetrics_objects import Rank0Metric, is_torchmetrics
from launcher.evaluation.transport import deserialize, serialize
from launcher.metrics import Classification, LossMetric
from launcher.metrics.confusion import Confusion
from launcher.metrics.metric import direction_of, name_of
from launcher.recipe.checks import refuse_taken_name
from launcher.recipe.contract import Loss, Recipe

Guard = Callable[[str, Batch | None], AbstractContextManager[None]]
Beat = Callable[[], object]
HOST = torch.device("cpu")
MISTAKES = (NameError, AttributeError, TypeError, ImportError, NotImplementedError)  # on any samples


@dataclass
class MetricValues:
    """The values of all metrics, the same on all ranks."""

    values: dict[str, float] = field(default_factory=dict)
    higher_is_better: dict[str, bool | None] = field(default_factory=dict)  # None: not declared
    failed: list[str] = field(default_factory=list)  # in a trial: errors that may be no mistakes
    confusion: Confusion | None = None  # of the first Classification; on rank 0 only


class MetricEvaluator:
    """The metrics of a recipe during one evaluation. `guard` is the context of each call of a metric.

    In a `trial` the metrics see a few samples, which may not be enough for each `compute`.
    """

    def __init__(self, recipe: Recipe, env: WorkerEnv, guard: Guard, beat: Beat, trial: bool = False) -> None:
        self._env, self._guard, self._beat, self._trial = env, guard, beat, trial
        self._metrics = [self._started(metric, recipe.label_column) for metric in recipe.metrics_or_default]
        self._merged = [metric for metric in self._metrics if hasattr(metric, "merge")]
        self._fed = [  # updated on rank 0 alone
            metric
            for metric in self._metrics
            if not hasattr(metric, "merge") and not isinstance(metric, LossMetric)
        ]
        self._kept: list[dict[str, object]] = []  # on other ranks: outputs and batch for `_fed`
        self._failure: LauncherError | None = None  # on rank 0, until it is sent to all ranks

    def update(self, loss: Loss, batch: Batch) -> None:
        """Add a batch of this rank. Raises ConfigError for a loss without outputs."""
        if not self._merged and not self._fed:
            return
        outputs = readable(loss.outputs, [name_of(metric) for metric in (*self._merged, *self._fed)])
        self._update(self._merged, outputs, batch)
        if self._env.is_rank0:
            self._update(self._fed, outputs, batch)
        elif self._fed:
            self._kept.append(_on(HOST, {"outputs": outputs, "batch": self._read_by_fed(batch)}))

    def compute(self, loss_sum: float, count: float) -> MetricValues:
        """The numbers over all ranks. A collective; raises on all ranks alike."""
        for rank in range(1, self._env.world_size):  # in rank order: rank 0 has the first samples of the set
            for metric in self._merged:
                what = f"the metric {name_of(metric)} has merge, but its state"
                self._pass_on(rank, what, partial(self._state, metric), partial(self._merge, metric))
            names = ", ".join(name_of(metric) for metric in self._fed)
            what = f"the metrics without merge ({names}) are updated on rank 0, but a batch"
            number = broadcast_bytes(self._env, str(len(self._kept)).encode(), rank)
            for index in range(int(number)):
                self._pass_on(rank, what, partial(self._kept.__getitem__, index), self._feed)
        found = MetricValues()
        if self._env.is_rank0 and self._failure is None:
            with self._held():
                self._compute(found, loss_sum, count)
        sent = broadcast_bytes(self._env, self._outcome(found), sender=0)
        if self._failure is not None:
            raise self._failure
        # JSON keeps the bits of floats.
        return found if self._env.is_rank0 else MetricValues(*json.loads(unpack_result(sent)))

    @contextmanager
    def _held(self) -> Iterator[None]:
        """Keep an error until it can be sent to all ranks: the others wait in a collective."""
        try:
            yield
        except LauncherError as error:
            self._failure = self._failure or error

    @contextmanager
    def _calling(self, metric: object, method: str, batch: Batch | None = None) -> Iterator[None]:
        """The context of each call of a metric, which rank 0 may be alone to make."""
        what = f"the metric {name_of(metric)}'s {method}"
        with self._guard(what, batch), hidden_process_group(what):
            yield

    def _update(self, metrics: Sequence[Any], outputs: object, batch: Batch) -> None:
        for metric in metrics:
            with self._calling(metric, "update", batch):
                metric.update(outputs, batch)

    def _pass_on(
        self, rank: int, what: str, value: Callable[[], object], take: Callable[[Any], None]
    ) -> None:
        """Call `take` on rank 0 with the value of `rank`, which is `what` in errors. A collective."""
        self._beat()
        message = pack_result(lambda: serialize(what, value())) if self._env.rank == rank else b""
        sent = broadcast_bytes(self._env, message, rank)
        if self._env.is_rank0:
            with self._held():
                take(deserialize(what, unpack_result(sent), self._env.device))

    def _started(self, metric: Any, label: str) -> object:
        """The metric without samples."""
        if is_torchmetrics(metric):
            return Rank0Metric(metric, label, self._env.device)
        if isinstance(metric, LossMetric):
            return metric
        if callable(getattr(metric, "reset", None)):
            with self._calling(metric, "reset"):
                metric.reset()
            return metric
        try:
            return copy.deepcopy(metric)  # as the recipe made it
        except (TypeError, RuntimeError) as error:
            raise ConfigError(
                f"the metric {name_of(metric)} cannot be copied ({error}), but each evaluation needs one "
                "without samples. Define reset() in its class."
            ) from error

    def _read_by_fed(self, batch: Batch) -> Batch:
        """The columns that the metrics without merge read: all, if one of them has no attribute `columns`."""
        read = [getattr(metric, "columns", None) for metric in self._fed]
        known = {name for columns in read for name in columns or ()}
        return batch if None in read else {name: batch[name] for name in batch if name in known}

    def _state(self, metric: object) -> object:
        """What is sent of a metric: what its `__getstate__` returns, by default its attributes."""
        with self._calling(metric, "__getstate__"):
            return metric.__getstate__()

    def _merge(self, metric: Any, state: Any) -> None:
        """Merge a new object of the metric's class, with the state that another rank has sent."""
        other = object.__new__(type(metric))
        with self._calling(metric, "__setstate__"):
            if hasattr(other, "__setstate__"):
                other.__setstate__(state)
            else:
                attributes, slots = state if isinstance(state, tuple) else (state, None)
                for name, value in {**(attributes or {}), **(slots or {})}.items():
                    object.__setattr__(other, name, value)
        with self._calling(metric, "merge"):
            metric.merge(other)

    def _feed(self, rows: Any) -> None:
        """Update rank 0's copies with what another rank has kept of a batch."""
        rows = _on(self._env.device, rows)
        self._update(self._fed, rows["outputs"], rows["batch"])

    def _compute(self, total: MetricValues, loss_sum: float, count: float) -> None:
        """Add the values on rank 0, in the order of the recipe's metrics."""
        taken: dict[str, str] = {}
        for metric in self._metrics:
            try:
                found = self._computed(metric, loss_sum, count)
            except LauncherError as error:
                if not (self._trial and _may_depend_on_samples(error)):
                    raise
                total.failed.append(str(error))
                continue
            for name, value in as_numbers(metric, found).items():
                refuse_taken_name(name, name_of(metric), taken)
                taken[name] = name_of(metric)
                total.values[name] = value
                total.higher_is_better[name] = direction_of(metric, name)
            if total.confusion is None and isinstance(metric, Classification):
                names = tuple(escaped(name, kept="") for name in metric.classes)
                total.confusion = Confusion(names, metric.confusion_matrix())

    def _computed(self, metric: Any, loss_sum: float, count: float) -> object:
        """What the metric returns. Warnings of few samples are left out where there are few on purpose."""
        with (
            warnings.catch_warnings(action="ignore" if self._trial else None),
            self._calling(metric, "compute"),
        ):
            return metric.of_loss(loss_sum, count) if isinstance(metric, LossMetric) else metric.compute()

    def _outcome(self, found: MetricValues) -> bytes:
        """What rank 0 sends to the others."""
        if self._failure is not None:
            return error_message(self._failure)
        return pack_result(lambda: json.dumps([found.values, found.higher_is_better, found.failed]).encode())


def _may_depend_on_samples(error: LauncherError) -> bool:
    """Whether more samples may help, such as those of a class that is not among the first ones."""
    cause = error.__cause__
    return cause is not None and not isinstance(cause, MISTAKES)


def readable(outputs: object, metrics: Sequence[str]) -> object:
    """Outputs as metrics read them: without gradient, half precision as fp32.

    Raises ConfigError for outputs that are neither a tensor nor a mapping of tensors.
    """
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


def as_numbers(metric: object, found: object) -> dict[str, float]:
    """What `compute` returned, as floats by name. Raises ConfigError for values that are no numbers."""
    named: Mapping[object, Any] = found if isinstance(found, Mapping) else {name_of(metric): found}
    try:
        # A tensor or an array of one element gives its number.
        singles = {name: value.item() if hasattr(value, "item") else value for name, value in named.items()}
        return {str(name): float(value) for name, value in singles.items()}
    except (TypeError, ValueError, RuntimeError) as error:  # no number, or several
        raise ConfigError(
            f"the metric {name_of(metric)}'s compute() must return one number for each name, {{name: "
            f"value}}: {described(error)}"
        ) from error


def _on(device: torch.device, value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().to(device)
    return {name: _on(device, each) for name, each in value.items()} if isinstance(value, Mapping) else value
