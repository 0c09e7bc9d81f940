"""The events of a run, a class for each kind, with the fields that metrics.jsonl and trackers have.

Owns names, types and meaning of the fields; `config.codec` owns how they are written and read. A field with
a default is absent from a line where it has none. All fields are plain values: no tensors.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from launcher.config.codec import FLAT, decoded, encoded
from launcher.run_dir.result import StepTime


@dataclass(frozen=True)
class Event:
    """What all kinds have. `is_periodic`: comes all the time, so that single ones may wait, or be lost."""

    kind: ClassVar[str]
    is_periodic: ClassVar[bool] = False
    step: int  # updates attempted so far
    time: float = field(default_factory=time.time, kw_only=True)  # unix seconds


@dataclass(frozen=True, kw_only=True)
class StartEvent(Event):
    """A process of the run begins its first step."""

    kind = "start"
    epochs: int | None = None
    steps_per_epoch: int | None = None
    total_steps: int | None = None  # of the whole run
    world_size: int | None = None
    parameters: int | None = None  # elements of the model
    model: str = ""  # the names of what the recipe really uses
    data: str = ""
    monitor: str | None = None  # the metric by which the recipe compares runs


@dataclass(frozen=True, kw_only=True)
class StepEvent(Event):
    """The steps since the `step` event before, every train.log_every_steps."""

    kind = "step"
    is_periodic = True
    epoch: int  # counts from 0
    loss: float  # of training: the mean over what the loss counts
    lr: float
    grad_norm: float  # of the mean gradient, before clipping
    scale: float  # the loss scale
    skipped: int  # steps of the run that were skipped
    samples: float  # of the data set, over all ranks
    samples_per_s: float
    step_ms: float  # mean of a step, and of its parts
    data_ms: float
    compute_ms: float
    communication_ms: float
    update_ms: float
    other_ms: float  # in none of the parts
    memory_bytes: int  # the largest amount in use so far


@dataclass(frozen=True, kw_only=True)
class EvalEvent(Event):
    """An evaluation on one set."""

    kind = "eval"
    epoch: int
    set: str | None = None  # the name of the set, where there are several
    val_loss: float | None
    metrics: Mapping[str, float | None] = field(metadata=FLAT)  # also train_loss, train_accuracy
    samples: float  # or tokens, that were measured
    seconds: float
    higher_is_better: Mapping[str, bool]  # by metric; absent: not declared


@dataclass(frozen=True, kw_only=True)
class OverflowEvent(Event):
    """A step was skipped, because gradients or losses were not finite."""

    kind = "overflow"
    epoch: int
    scale: float  # that the step used
    ranks: Sequence[int]  # whose own gradient was not finite
    parameters: Sequence[str]  # whose reduced gradient was not finite
    bad_losses: int  # micro-batches whose loss was not finite


@dataclass(frozen=True, kw_only=True)
class OutlierEvent(Event):
    """A step was skipped, because its loss or gradient norm was far above those of the steps before."""

    kind = "outlier"
    epoch: int
    loss: float
    grad_norm: float  # of the mean gradient, before clipping
    count: int  # outliers of the run so far


@dataclass(frozen=True)
class LayerShares:
    """Shares of a parameter's gradient elements."""

    zero_share: float  # zero in fp16, as sent
    zero_share_at_scale_1: float  # would be zero in fp16 without a loss scale
    near_max_share: float  # within two octaves of 65504


@dataclass(frozen=True, kw_only=True)
class GradientsEvent(Event):
    """Where a step's gradients lie in the range of fp16, every telemetry.gradient_histogram_every_steps."""

    kind = "gradients"
    is_periodic = True
    epoch: int
    scale: float
    zero_share: float  # of all gradients: see LayerShares
    zero_share_at_scale_1: float
    near_max_share: float
    zeros: int  # elements, which the histogram leaves out
    first_exponent: int
    histogram: Sequence[int]  # elements by exponent of 2, from `first_exponent` on
    layers: Mapping[str, LayerShares]  # by parameter


@dataclass(frozen=True, kw_only=True)
class CheckpointEvent(Event):
    """A checkpoint of this step is on the disk."""

    kind = "checkpoint"
    path: str
    seconds: float  # that writing took
    size_bytes: int
    best: bool  # whether it is the best so far


@dataclass(frozen=True, kw_only=True)
class RestartEvent(Event):
    """A process resumes the run from a checkpoint, or begins it again with a smaller micro-batch."""

    kind = "restart"
    path: str  # empty: from the beginning
    attempt: int  # restarts by the parent process
    micro_batch: int | None = None  # half of what did not fit in memory, where the parent has chosen it


@dataclass(frozen=True, kw_only=True)
class GpuNumbers:
    """One GPU of this node; what it does not support is absent. README.md says what each field means."""

    index: int | None = None  # of nvidia-smi
    uuid: str = ""
    utilisation_percent: float | None = None
    power_w: float | None = None
    memory_bytes: float | None = None
    temperature_c: float | None = None
    ecc_errors: float | None = None
    energy_j: float | None = None
    throttled_s: Mapping[str, float] | None = None  # by reason


@dataclass(frozen=True, kw_only=True)
class GpuEvent(Event):
    """The GPUs of this node since the event before; `step` is the logged step that ends the interval."""

    kind = "gpu"
    is_periodic = True
    seconds: float
    power_w: float | None = None  # summed over the GPUs, as is the energy
    energy_j: float | None = None
    memory_bytes: float | None = None  # the largest
    temperature_c: float | None = None
    utilisation_percent: float | None = None  # mean
    run_energy_j: float | None = None  # of the run so far, over all its attempts
    gpus: Sequence[GpuNumbers] = ()


@dataclass(frozen=True, kw_only=True)
class WarningEvent(Event):
    """A warning to the user."""

    kind = "warning"
    text: str


@dataclass(frozen=True, kw_only=True)
class DecisionEvent(Event):
    """A choice made by the program, with its reason."""

    kind = "decision"
    topic: str
    text: str
    facts: Mapping[str, object] = field(default_factory=dict, metadata=FLAT)  # as values, by topic


@dataclass(frozen=True, kw_only=True)
class StragglerEvent(Event):
    """A rank for which the others wait."""

    kind = "straggler"
    rank: int
    host: str
    late_ms: float  # per step
    step_ms: float
    first_step: int  # of the steps that were compared
    last_step: int
    cause: str  # data or compute


@dataclass(frozen=True, kw_only=True)
class ReportEvent(Event):
    """The classification report of the end. Of many classes only the text: result.json has the matrix."""

    kind = "report"
    text: str
    table: Sequence[Mapping[str, object]] | None = None  # a row for each class
    classes: Sequence[str] | None = None
    confusion_matrix: Sequence[Sequence[int]] | None = None


@dataclass(frozen=True, kw_only=True)
class AfterEvaluationEvent(Event):
    """What the recipe shows after an evaluation, each by name."""

    kind = "after_evaluation"
    epoch: int
    texts: Mapping[str, str]
    numbers: Mapping[str, float]
    pictures: Mapping[str, str]  # paths


@dataclass(frozen=True, kw_only=True)
class EndEvent(Event):
    """The process ends; only one that is done has more than state, exit and error."""

    kind = "end"
    state: str  # done, failed, stopped, preempted, pruned
    exit: int
    error: str | None = None
    seconds: float | None = None  # of this process, for the steps after `since_step`
    since_step: int | None = None
    samples_per_s: float | None = None
    metrics: Mapping[str, float | None] | None = None  # of the last evaluation
    metric_name: str | None = None  # by which runs are compared
    best_metric: float | None = None  # of the best evaluation
    best_step: int | None = None  # after which it was made
    reason: str | None = None  # why it ended early
    weights_sha256: str | None = None
    step_time: StepTime | None = None


KINDS: dict[str, type[Event]] = {each.kind: each for each in Event.__subclasses__()}


def record_of(event: Event) -> dict[str, Any]:
    """The event as metrics.jsonl has it: `event`, `time` and `step` first."""
    fields = encoded(event)
    return {"event": event.kind, "time": fields.pop("time"), "step": fields.pop("step"), **fields}


def event_of(record: Mapping[str, Any]) -> Event | None:
    """The event of a record that has at least `event` and `step`; None for a kind that is not known."""
    kind = KINDS.get(record["event"])
    return None if kind is None else decoded(kind, {k: v for k, v in record.items() if k != "event"})
