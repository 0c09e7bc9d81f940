"""What a metric is: the two protocols, and what a metric may say of itself besides.

Owns the reading of the optional attributes. Never moves a tensor and never communicates: how metrics of
several ranks become one is in `launcher.evaluation`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from launcher.data.tensors import Batch
from launcher.errors import ConfigError, DataError
from launcher.telemetry.events import EvalEvent

Outputs = Any  # a tensor [n, ...], or a mapping of tensors, floating ones at least fp32
# Other fields of a record.
RESERVED = ("event", "loss", "train_loss", "train_accuracy", *(each.name for each in fields(EvalEvent)))


@runtime_checkable
class Metric(Protocol):
    """A number, or several, of a whole set: updated batch by batch, computed at the end.

    `update` gets `Loss.outputs` (half precision as fp32, without gradient, on the device) and the batch as
    the loss has read it. `compute` returns numbers by name, all of the whole set.

    Optional attributes:

    - `merge(other)`: add the samples that another object of the class has seen. Then each rank updates its
      own copy, and rank 0 merges their states in rank order. A state is the attributes, or what
      `__getstate__` returns. It may hold plain values, containers, tensors and arrays, and no other objects.
      Without `merge`, the outputs and batches of all ranks are kept on the host and sent to one copy on
      rank 0, in the order of the set: exact for any metric, at the cost of that memory and of sending it.
    - `higher_is_better`: True, False, or a mapping from name to either. Needed to compare runs by it.
    - `names`: the names that `compute` may return. Needed where it returns fewer for the first samples of a
      set than for all: the metrics are tried on these before the first step.
    - `columns`: the columns of the batch that `update` reads. Without merge no others are kept and sent.
    - `reset()`: forget all samples. Without it each evaluation works on a deep copy.

    Objects of torchmetrics work as they are, without merge: they are updated with the outputs and
    `batch[label_column]`, without collectives of their own. A number alone goes by the name of its class.
    """

    def update(self, outputs: Outputs, batch: Batch) -> None:
        """Add the samples of a batch."""
        ...

    def compute(self) -> Mapping[str, float]:
        """The numbers over all samples so far."""
        ...


@runtime_checkable
class LossMetric(Protocol):
    """A number that follows from the loss over the whole set. `higher_is_better`, `names` as of a Metric."""

    def of_loss(self, loss_sum: float, count: float) -> Mapping[str, float]:
        """Compute it from the fp64 sum of the losses and the number of samples (or tokens) with a loss."""
        ...


def name_of(metric: object) -> str:
    """The name of a metric in errors: its class, or that of the object that it adapts."""
    return type(getattr(metric, "adapts", metric)).__name__


def declared_names(metric: object) -> tuple[str, ...] | None:
    """The names that a metric may return; None where it does not say."""
    names = getattr(metric, "names", None)
    return None if names is None or callable(names) else tuple(names)


def direction_of(metric: object, name: str) -> bool | None:
    """Whether a higher value of `name` is better; None where the metric does not say."""
    said = getattr(metric, "higher_is_better", None)
    found = said.get(name) if isinstance(said, Mapping) else said
    return found if isinstance(found, bool) else None


def chosen(outputs: Outputs, output: str | None, metric: str, advice: str = "") -> Tensor:
    """The tensor that a metric reads: `outputs`, or its entry `output`. Raises ConfigError.

    `advice` ends the error where there are others; without, it is that for metrics of the project.
    """
    if isinstance(outputs, Mapping):
        output = next(iter(outputs)) if output is None and len(outputs) == 1 else output
        if output not in outputs:
            what = "one tensor" if output is None else f"the output {output}"
            raise ConfigError(
                f"{metric} reads {what}, but the recipe's loss gives {', '.join(outputs)}. "
                f"{advice or f'Name one of them: {metric}(..., output=...).'}"
            )
        outputs = outputs[output]
    if isinstance(outputs, Tensor):
        return outputs
    raise ConfigError(f"{metric} reads Loss.outputs as a tensor; the loss gave {type(outputs).__name__}.")


def column_of(batch: Batch, name: str, metric: str, advice: str) -> Tensor:
    """The column that a metric reads. Raises DataError where the batch has none of that name."""
    if name in batch:
        return batch[name]
    raise DataError(
        f"{metric} reads the column {name!r}, but a batch has the columns {', '.join(batch)}. Name one of "
        f"these: {advice}."
    )


def shape_text(tensor: Tensor) -> str:
    """`float32 [4, 3]`."""
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
