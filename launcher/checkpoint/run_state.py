"""The whole state of a run between two steps, as plain tensors on the host and JSON values.

Owns the state that must survive a crash, its capture and restoration, and the refusal of another run's state.
Knows no files.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

import torch
from torch import Tensor, nn

from launcher.config.schema import Config
from launcher.distributed.collectives import gather
from launcher.distributed.env import RANK0, WorkerEnv
from launcher.engine import AverageState, ExponentialMovingAverage, Stepper
from launcher.engine.names import named_buffers, named_parameters, plain_name
from launcher.engine.params.module_buffers import is_statistic
from launcher.engine.precision.loss_scale import ScaleStart
from launcher.engine.state import EngineState
from launcher.errors import ConfigError, listed
from launcher.run_dir.differences import IDENTITY, changes, settings_of

SHOWN = 3  # differences named in an error


@dataclass(frozen=True)
class TrainProgress:
    """Progress of a run: epochs, finished steps, samples trained on."""

    epoch: int
    step: int
    samples: int


@dataclass(frozen=True)
class MonitoredMetric:
    """The value by which runs are compared, measured with the weights that it is saved with."""

    name: str
    value: float
    lower_is_better: bool = False

    @property
    def cost(self) -> float:
        """The value, negated where higher is better."""
        return float(self.value if self.lower_is_better else -self.value)

    def same_metric(self, other: MonitoredMetric) -> bool:
        """Whether the values of both can be compared."""
        return (self.name, self.lower_is_better) == (other.name, other.lower_is_better)


@dataclass(frozen=True)
class BestEvaluation(MonitoredMetric):
    """The best value that a run has reached so far, and after which step."""

    step: int = 0


RunIdentity = Mapping[str, str]  # what a resumed run must share, by name
State = TypeVar("State", EngineState, AverageState)


def identity_of(config: Config, model: nn.Module, num_samples: int) -> RunIdentity:
    """The keys of IDENTITY, the number of samples, and the shapes of parameters and buffers.

    Learning rate, epochs, world size and ddp options may change.
    """
    settings, tensors = settings_of(config), named_parameters(model) | named_buffers(model)
    return {
        **{key: settings[key] for key in IDENTITY},
        "num_samples": str(num_samples),
        **{f"tensor {name}": str(list(tensor.shape)) for name, tensor in tensors.items()},
    }


def refuse_other(identity: RunIdentity, saved: RunIdentity, where: str, *, as_start: bool = False) -> None:
    """Raise ConfigError unless `saved`, found in `where`, is of this run.

    `as_start`: the state of another run from which this one starts. Its precision may differ, because
    saved weights are fp32 in every precision.
    """
    may_differ = {"precision.name"} if as_start else set()
    found = [text for key, text in changes(saved, identity).items() if key not in may_differ]
    if found:
        other = (
            "take its weights alone with model.init_from" if as_start else "start a new run with run.dir=DIR"
        )
        raise ConfigError(
            f"{where} belongs to another run: {listed(found, SHOWN, '; ')}. A run resumes only with the "
            "model, data and optimizer it started with: give the overrides it was started with "
            f"(overrides.txt of its run), or {other}."
        )


@dataclass(frozen=True)
class RunExtras:
    """What else a resumed run needs: `extra` of state.json."""

    callbacks: Mapping[str, Mapping[str, object]] = field(default_factory=dict)  # state of each by its name
    best: BestEvaluation | None = None  # of all evaluations so far
    evaluated: bool = False  # whether this step was evaluated: a resumed run then does not repeat it
    data: Mapping[str, str] = field(default_factory=dict)  # the fingerprint of the data
    settings: Mapping[str, str] = field(default_factory=dict)  # by dotted key, what the run learns from
    stream: Sequence[str] | None = None  # by rank: where it stands in a stream; None without one


@dataclass(frozen=True)
class Snapshot:
    """The state of a run after `progress.step` steps. All tensors are on the host, whatever the device."""

    engine: EngineState  # its buffers are averaged over the ranks, as for an evaluation
    progress: TrainProgress
    identity: RunIdentity
    world_size: int  # of the ranks that saved it
    names: dict[str, str]  # of each tensor, by key of the model's state_dict: tied weights are stored once
    # [world_size, ...], those that differ between ranks, as BatchNorm statistics do between evaluations.
    rank_buffers: dict[str, Tensor] = field(default_factory=dict)
    metric: MonitoredMetric | None = None  # None where these weights have not been evaluated
    extra: RunExtras = field(default_factory=RunExtras)
    average: AverageState | None = None  # of the weights; its buffers are averaged over the ranks
    average_buffers: dict[str, Tensor] = field(default_factory=dict)  # as rank_buffers


def take_snapshot(
    stepper: Stepper,
    env: WorkerEnv,
    identity: RunIdentity,
    progress: TrainProgress,
    average: ExponentialMovingAverage | None = None,
    metric: MonitoredMetric | None = None,
    extra: RunExtras | None = None,
) -> Snapshot | None:
    """Copy the state of the run between two steps. A collective: None on all ranks but rank 0.

    Its buffers are those that a run on any number of ranks starts from.
    """
    engine = stepper.state(RANK0)
    averages = None if average is None else average.state(RANK0)
    # After all other work: these gathers are collectives, which wait for the slowest rank.
    buffers, rank_buffers = _gathered(engine.buffers, env)
    of_average, average_buffers = _gathered({} if averages is None else averages.buffers, env)
    # Only after the last collective: the ranks that save nothing take part in all of them.
    if not env.is_rank0:
        return None
    if averages is not None:
        averages = AverageState(_copied(averages.weights), of_average, dict(averages.counters))
    return Snapshot(
        engine=replace(
            engine,
            weights=_copied(engine.weights),
            optimizer=_copied(engine.optimizer),
            buffers=buffers,
            counters=dict(engine.counters),
        ),
        progress=progress,
        identity=identity,
        world_size=env.world_size,
        names=_state_dict_names(stepper.model),
        rank_buffers=rank_buffers,
        metric=metric,
        extra=extra or RunExtras(),
        average=averages,
        average_buffers=average_buffers,
    )


def _copied(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies in host memory of their own, which later steps do not change.

    What was gathered from the GPUs of all ranks is such a copy, in pinned memory.
    """
    return {
        name: tensor if tensor.is_pinned() else tensor.detach().to("cpu", copy=True)
        for name, tensor in tensors.items()
    }


def restore(
    stepper: Stepper, snapshot: Snapshot, env: WorkerEnv, average: ExponentialMovingAverage | None = None
) -> ScaleStart:
    """Continue from `snapshot`. A collective.

    Returns whether the loss scale is that of the snapshot, as `Stepper.load` does. Where it has no average,
    `average` starts from its weights. Raises ConfigError on all ranks for the state of another model or
    optimizer. On another number of ranks, all start with the same buffers.
    """
    engine, averages = snapshot.engine, snapshot.average
    if env.world_size == snapshot.world_size:
        engine = _with_own(engine, snapshot.rank_buffers, env.rank)
        averages = averages and _with_own(averages, snapshot.average_buffers, env.rank)
    try:
        scale = stepper.load(engine)
        if average is not None and averages is not None:
            average.load(averages)
        elif average is not None:
            average.restart()
    except ValueError as error:
        raise ConfigError(f"the checkpoint of step {snapshot.progress.step} does not fit: {error}") from error
    return scale


def _with_own(state: State, by_rank: Mapping[str, Tensor], rank: int) -> State:
    """The state with the buffers of this rank, where the ranks differed."""
    return replace(state, buffers=state.buffers | {name: rows[rank] for name, rows in by_rank.items()})


def _gathered(tensors: Mapping[str, Tensor], env: WorkerEnv) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The buffers of all ranks, on the host. A collective for each.

    First those that any number of ranks starts from, then [world_size, *shape] of those that differ.
    """
    of_all, by_rank = {}, {}
    for name, tensor in tensors.items():
        # As bytes, because the collectives lack some dtypes; and they refuse an empty tensor.
        own = tensor.detach().to(env.device).contiguous().reshape(-1).view(torch.uint8)
        rows = gather(own, env.group) if own.numel() else [own] * env.world_size
        values = torch.cat(rows).cpu().view(tensor.dtype).reshape(env.world_size, *tensor.shape)
        of_all[name] = mean_over_ranks(name, values)
        if not _equal_on_ranks(values):
            by_rank[name] = values
    return of_all, by_rank


def _equal_on_ranks(rows: Tensor) -> bool:
    """Whether all ranks hold the same bits."""
    patterns = rows.flatten(1) if rows.ndim > 1 else rows.unsqueeze(1)
    bits = patterns.view(torch.uint8)
    return torch.equal(bits, bits[:1].expand_as(bits))


def mean_over_ranks(name: str, rows: Tensor) -> Tensor:
    """Return the mean of running statistics where the ranks differ, as `Buffers.average`; else rank 0's."""
    if not (rows.is_floating_point() and is_statistic(name)) or _equal_on_ranks(rows):
        return rows[0].clone()
    return (rows.double().sum(dim=0) / len(rows)).to(rows.dtype)


def _state_dict_names(model: nn.Module) -> dict[str, str]:
    own = {id(t): name for name, t in (*named_parameters(model).items(), *named_buffers(model).items())}
    return {
        plain_name(key): own[id(value)]
        for key, value in model.state_dict(keep_vars=True).items()
        if id(value) in own
    }
