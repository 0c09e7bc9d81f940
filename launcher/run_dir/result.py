"""The content of `result.json`: the classes with which it is written and read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from launcher.errors import LauncherError, PreemptedError, PrunedError, in_words

STOPPED, PREEMPTED, PRUNED = "stopped", "preempted", "pruned"  # by a person; by a scheduler; by a sweep
ENDS_ON_REQUEST = (STOPPED, PREEMPTED, PRUNED)  # states


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """Means per step of the rank that waits least for the others, in milliseconds."""

    steps: int  # that were measured
    step_ms: float
    data_ms: float
    compute_ms: float
    communication_ms: float
    update_ms: float
    rank: int | None
    waited_ms: float  # that another rank waits longer, in the exchange of gradients
    auto_share_gain: float = 1.0  # how many times as fast a step would be with data.share=auto


@dataclass(frozen=True)
class Failure:
    """The result of a run that is not done: it failed, or was asked to end."""

    state: str  # failed, stopped, preempted, pruned
    exit: int
    error: str

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        """The result of a run that this error ended."""
        if not isinstance(error, LauncherError):
            return cls("failed", 1, in_words(error))
        stopped = PREEMPTED if error.by_scheduler else STOPPED
        states = {PreemptedError.exit_code: stopped, PrunedError.exit_code: PRUNED}
        return cls(states.get(error.exit_code, "failed"), error.exit_code, in_words(error))


@dataclass(frozen=True, kw_only=True)
class Result:
    """The result of a run that is done; of another, the file has only the fields of `Failure`."""

    state: str
    exit: int
    error: str | None = None
    recipe: str | None
    model: str | None  # the names of what the recipe really uses
    data: str | None
    precision: str | None
    world_size: int | None
    metric_name: str | None  # by which runs are compared
    metric: float | None  # of the last evaluation
    best_metric: float | None = None  # of the best evaluation, whose checkpoint is kept
    best_step: int | None = None  # after which it was made
    metrics: Mapping[str, float | None]  # of the last evaluation, on the first set
    higher_is_better: bool | None = None
    sets: Mapping[str, Mapping[str, float | None]] | None = None  # where there are several
    applied_steps: int | None
    skipped_steps: int | None
    outlier_steps: int | None = None  # of them, those that precision.skip_outliers has skipped
    scale: float | None  # the loss scale
    samples_per_s: float | None
    training_seconds: float | None  # of the whole run, without evaluation
    wire_bytes_per_step: float | None  # that a rank sends
    parameters: int | None  # elements of the model
    state_bytes: float | None  # of weights, masters and optimizer, on a rank
    weights_sha256: str | None
    evaluated_weights: str | None = None  # ema
    ema_sha256: str | None = None
    classes: Sequence[str] | None = None
    confusion_matrix: Sequence[Sequence[int]] | None = None
    peak_memory_bytes: int | None = None  # on a GPU
    step_time: StepTime | None = None
    stopped_early: Mapping[str, object] | None = None
    energy_kwh: float | None = None  # of the GPUs of the node of rank 0
    steps: int | None
    steps_per_epoch: int | None
    seconds: float | None  # of the last process
    micro_batch: int | None  # the largest, per rank and forward pass
    normalisation: Mapping[str, object] | None = None  # of images
