"""The whole state of a run between two steps, as plain tensors on the host and JSON values.

Owns the state that must survive a crash, its capture and restoration, and the refusal of another run's state.
Knows no files.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace

import torch
from torch import Tensor, nn

from launcher.checkpoint.host_memory import Copies, PinnedStagingBuffer
from launcher.config.schema import Config
from launcher.distributed.collectives import gather
from launcher.distributed.env import RANK0, WorkerEnv
from launcher.engine import AverageState, ExponentialMovingAverage, Stepper
from launcher.engine.names import named_buffers, named_parameters, plain_name
from launcher.engine.params.buffers import is_statistic
from launcher.engine.precision.loss_scale import ScaleStart
from launcher.engine.state import EngineState
from launcher.errors import ConfigError, listed

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


@dataclass(frozen=True)
class SavedWith:
    """Conditions under which a state was saved. A run may resume under others."""

    world_size: int
    wire: str


@dataclass(frozen=True)
class RunIdentity:
    """The properties that a resumed run must share. Learning rate, epochs, ranks and wire may change."""

    recipe: str
    model: str | None
    optimizer: str
    precision: str
    data: str | None
    seed: int
    num_samples: int
    batch_size: int
    drop_last: bool
    tensors: dict[str, list[int]]  # shapes of parameters and buffers by name

    @classmethod
    def of(cls, config: Config, model: nn.Module, num_samples: int) -> RunIdentity:
        tensors = [*named_parameters(model).items(), *named_buffers(model).items()]
        return cls(
            recipe=config.recipe.name,
            model=config.model.name,
            optimizer=config.optim.name,
            precision=config.precision.name,
            data=config.data.name,
            seed=config.seed,
            num_samples=num_samples,
            batch_size=config.data.batch_size,
            drop_last=config.data.drop_last,
            tensors={name: list(tensor.shape) for name, tensor in tensors},
        )

    def differences(self, saved: RunIdentity) -> list[str]:
        """Properties on which `saved` differs from this run, as messages; empty for the same run."""
        mine, theirs = asdict(self), asdict(saved)
        shapes, saved_shapes = mine.pop("tensors"), theirs.pop("tensors")
        found = [
            f"{key} is {theirs[key]} there and {value} here"
            for key, value in mine.items()
            if theirs[key] != value
        ]
        for name in sorted(shapes.keys() | saved_shapes.keys()):
            there, here = saved_shapes.get(name, "missing"), shapes.get(name, "missing")
            if there != here:
                found.append(f"{name} is {there} there and {here} here")
        return found

    def refuse_other(self, saved: RunIdentity, where: str, *, as_start: bool = False) -> None:
        """Raise ConfigError unless `saved`, found in `where`, is of this run.

        `as_start`: the state of another run from which this one starts. Its precision may differ, because
        saved weights are fp32 in every precision.
        """
        found = self.differences(replace(saved, precision=self.precision) if as_start else saved)
        if found:
            raise ConfigError(
                f"{where} belongs to another run: {listed(found, SHOWN, '; ')}. A run resumes only with "
                "the model, data and optimizer it started with: give the overrides it was started with "
                "(overrides.txt of its run), or start a new run with another run.dir."
            )


@dataclass(frozen=True)
class RunExtras:
    """What else a resumed run needs: `extra` of state.json."""

    parts: Mapping[str, Mapping[str, object]] = field(default_factory=dict)  # by part, what it keeps
    best: BestEvaluation | None = None  # of all evaluations so far
    evaluated: bool = False  # whether the evaluation that is due after this step has been made
    data: Mapping[str, str] = field(default_factory=dict)  # the fingerprint of the data
    settings: Mapping[str, str] = field(default_factory=dict)  # by dotted key, what the run learns from
    stream: Sequence[str] | None = None  # by rank: where it stands in a stream; None without one
    total_steps: int | None = None  # of the run, which its schedule is for
    learning_rate: float | None = None  # of the last applied step


@dataclass(frozen=True)
class Snapshot:
    """The state of a run after `progress.step` steps. All tensors are on the host, whatever the device.

    `engine.buffers` are averaged over the ranks, as for an evaluation. `rank_buffers` [world_size, ...] hold
    the values of each rank where they differ, as BatchNorm statistics do between evaluations.
    `names` maps each key of the model's state_dict to the name of its tensor: tied weights are stored once.
    `metric` is None where these weights have not been evaluated.
    `average` is the moving average of the weights; its buffers are averaged over the ranks, and
    `average_buffers` [world_size, ...] hold those of each rank.
    """

    engine: EngineState
    progress: TrainProgress
    identity: RunIdentity
    origin: SavedWith
    names: dict[str, str]
    rank_buffers: dict[str, Tensor] = field(default_factory=dict)
    metric: MonitoredMetric | None = None
    extra: RunExtras = field(default_factory=RunExtras)
    average: AverageState | None = None
    average_buffers: dict[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class PendingSnapshot:
    """A snapshot whose copies the device may still be making; `finish` waits for them, on any thread.

    `begun` has all but the buffers, which `by_rank` gathers: of the run, and of the average under "average/".
    """

    begun: Snapshot
    copies: Copies
    by_rank: Callable[[], dict[str, Tensor]]

    def finish(self) -> Snapshot:
        """The whole snapshot. Its buffers are those that a run on any number of ranks starts from."""
        self.copies.wait()
        rows = self.by_rank()
        buffers, of_average = _under("buffers/", rows), _under("average/", rows)
        average = self.begun.average
        return replace(
            self.begun,
            engine=replace(self.begun.engine, buffers=_of_all(buffers)),
            rank_buffers={name: each for name, each in buffers.items() if not _equal_on_ranks(each)},
            average=None if average is None else replace(average, buffers=_of_all(of_average)),
            average_buffers=of_average,
        )


def _under(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): each for name, each in tensors.items() if name.startswith(prefix)}


def _of_all(rows: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: mean_over_ranks(name, each) for name, each in rows.items()}


def stage(
    stepper: Stepper,
    env: WorkerEnv,
    identity: RunIdentity,
    origin: SavedWith,
    progress: TrainProgress,
    metric: MonitoredMetric | None,
    extra: RunExtras,
    memory: PinnedStagingBuffer,
    average: ExponentialMovingAverage | None = None,
) -> PendingSnapshot | None:
    """Copy the run's state between steps, without waiting for the copies of weights and states into `memory`.

    A collective: returns the snapshot on the leader, and None on the other ranks, which write nothing.
    Training may continue at once: on the device, its next update waits for the copies. The snapshot is valid
    until `memory` is used again.
    """
    state = stepper.state(RANK0, memory.allocate)
    averages = None if average is None else average.state(RANK0, memory.allocate)
    own = {
        "buffers": state.buffers,
        "average": {} if averages is None else averages.buffers,
    }
    # In one collective, after all that the ranks compute: each waits for the slowest of them.
    by_rank = _gather_by_name(
        {f"{kind}/{n}": t for kind, found in own.items() for n, t in found.items()}, env
    )
    # Only after the last collective: the ranks that save nothing take part in all of them.
    if not env.is_leader:
        return None
    parts = {"weights": state.weights, "optimizer": state.optimizer}
    if averages is not None:
        parts["average"] = averages.weights
    copies = memory.copy({f"{part}/{n}": t for part, tensors in parts.items() for n, t in tensors.items()})
    if copies.ready is not None:
        stepper.hold_update(copies.ready)
    weights, optimizer, average_weights = (
        _under(f"{part}/", copies.tensors) for part in ("weights", "optimizer", "average")
    )
    begun = Snapshot(
        engine=replace(
            state, weights=weights, optimizer=optimizer, buffers={}, counters=dict(state.counters)
        ),
        progress=progress,
        identity=identity,
        origin=origin,
        names=_state_dict_names(stepper.model),
        metric=metric,
        extra=extra,
        average=averages and AverageState(average_weights, {}, dict(averages.counters)),
    )
    return PendingSnapshot(begun, copies, by_rank)


def restore(
    stepper: Stepper, snapshot: Snapshot, env: WorkerEnv, average: ExponentialMovingAverage | None = None
) -> ScaleStart:
    """Continue from `snapshot`. A collective where the optimizer is sharded: all ranks call it.

    Returns whether the loss scale is that of the snapshot, as `Stepper.load` does. Where it has no average,
    `average` starts from its weights. Raises ConfigError on all
    ranks for the state of another model or optimizer. On another number of ranks, all start with the same
    buffers.
    """
    engine = snapshot.engine
    if env.world_size == snapshot.origin.world_size:
        own = {name: rows[env.rank] for name, rows in snapshot.rank_buffers.items()}
        engine = replace(engine, buffers=engine.buffers | own)
    try:
        scale = stepper.load(engine)
        if average is not None:
            _restore_average(average, snapshot, env)
    except ValueError as error:
        raise ConfigError(f"the checkpoint of step {snapshot.progress.step} does not fit: {error}") from error
    return scale


def _restore_average(average: ExponentialMovingAverage, snapshot: Snapshot, env: WorkerEnv) -> None:
    """Raises ValueError for that of another model."""
    if snapshot.average is None:
        average.restart()
        return
    saved = snapshot.average
    if env.world_size == snapshot.origin.world_size:
        saved = replace(
            saved, buffers={name: rows[env.rank] for name, rows in snapshot.average_buffers.items()}
        )
    average.load(saved)


def _gather_by_name(tensors: Mapping[str, Tensor], env: WorkerEnv) -> Callable[[], dict[str, Tensor]]:
    """A function that gives all ranks' values on the host, [world_size, *shape] by name.

    A collective, one for all tensors. The function can be called later and on another thread.
    """
    if not tensors:
        return dict
    here = [tensor.detach().to(env.device) for tensor in tensors.values()]
    flat = [tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in here]
    own, sizes = torch.cat(flat), [len(part) for part in flat]
    ranks = [own] if env.group is None else gather(own, env.group)
    gathered = torch.stack(ranks).cpu()
    kinds = {name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()}

    def by_name() -> dict[str, Tensor]:
        return {
            name: _viewed(part, dtype, shape)
            for (name, (dtype, shape)), part in zip(
                kinds.items(), torch.split(gathered, sizes, dim=1), strict=True
            )
        }

    return by_name


def _viewed(rows: Tensor, dtype: torch.dtype, shape: torch.Size) -> Tensor:
    """Bytes of all ranks as their values. Copied: viewing them as a wider dtype needs an aligned address."""
    values = torch.empty((len(rows), *shape), dtype=dtype)
    if values.numel():
        values.view(len(rows), -1).view(torch.uint8).copy_(rows)
    return values


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
