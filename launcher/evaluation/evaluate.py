"""Exact evaluation on any number of ranks, and its trial before the first step.

Owns the pass over a set, in which every sample counts exactly once; `measuring` owns the metrics.
Communicates only after the pass: ranks may have unequal shares, or none. Requires the same weights and
buffers on all ranks. Never changes them, and restores the mode of each module.

Before each batch is computed the generators are seeded, so that each evaluation draws the same numbers.

The trial, on a few samples, finds mistakes of a recipe. It changes nothing of a run: buffers and the order of
the data are as before. Its metrics have seen other samples, and another model, than in an evaluation: what
depends on these is reported and not raised.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import astuple, dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from launcher.checkpoint.run_state import MonitoredMetric
from launcher.data.iterable_loader import IterableData
from launcher.data.seeding import seed_evaluation
from launcher.data.sources import FIRST, Readable
from launcher.data.tensors import Batch, transformed
from launcher.distributed.env import WorkerEnv
from launcher.distributed.heartbeat import Heartbeat
from launcher.engine.async_work import all_reduce
from launcher.errors import ConfigError, DataError, counted
from launcher.evaluation.measuring import Guard, MetricEvaluator, MetricValues
from launcher.metrics.confusion import Confusion
from launcher.metrics.metric import declared_names, direction_of
from launcher.os import frames
from launcher.os.oom import oom_text
from launcher.recipe.checks import MONITOR, refuse_unknown_metric
from launcher.recipe.contract import Loss, Recipe, loss_of


@dataclass(frozen=True)
class Evaluation:
    """The result over a whole set, the same on all ranks."""

    loss: float  # mean over all samples (or tokens)
    samples: int  # that were measured
    metrics: dict[str, float]
    higher_is_better: dict[str, bool | None]  # by metric; None: not declared
    unreadable: int = 0  # samples that were left out
    confusion: Confusion | None = None  # where classes were measured; on rank 0 only


class EvaluationStopped(Exception):
    """A rank stopped before the end of its share, so there is no result. Raised on all ranks alike."""


@dataclass
class _Totals:
    """Sums over the share of one rank, or over the whole set.

    Of one rank the first two are tensors on the device, so that no batch waits for it.
    """

    loss_sum: Any = 0.0
    counted: Any = 0.0  # samples or tokens that carry loss, or their weights
    samples: int = 0  # with those that were left out
    unreadable: int = 0
    stopped: int = 0  # ranks

    def add(self, loss: Loss) -> None:
        """Count a batch."""
        self.loss_sum += loss.sum.double()
        # A number stays on the host: to copy it to the device would wait for the batches before.
        self.counted += loss.count.double() if isinstance(loss.count, Tensor) else loss.count

    def over_ranks(self, env: WorkerEnv) -> _Totals:
        """The sums over all ranks. A collective; waits for the device."""
        own = [torch.as_tensor(each, dtype=torch.float64, device=env.device) for each in astuple(self)]
        sums = torch.stack(own)  # whole numbers are exact up to 2^53
        all_reduce(sums, env.group)
        return _Totals(*sums.tolist())


Read = TypeVar("Read")


@dataclass(frozen=True)
class EvalLoop:
    """What a pass over a set measures, and how it reports that it is alive.

    `guard` is the context of each call of a metric. The rank is in `phase` while it computes, and in
    `waiting_phase` where it may wait for another one, so that a hang is not blamed on it.
    """

    recipe: Recipe
    model: nn.Module
    forward_context: Callable[[], AbstractContextManager[object]]
    env: WorkerEnv
    guard: Guard = lambda what, batch: nullcontext()
    heartbeat: Heartbeat = field(default_factory=Heartbeat)
    phase: str = "evaluation"
    waiting_phase: str = "adding up the evaluation"
    seed: int = 0
    shares: tuple[int, ...] = ()  # of the ranks in a set whose length is known; (): equal

    def beat(self) -> None:
        """Report a sign of life, since a large set may take longer than a phase may."""
        self.heartbeat.beat(self.phase)

    def wait(self) -> None:
        """Report that this rank may wait for another one from here on."""
        self.heartbeat.beat(self.waiting_phase)

    def losses(
        self, batch: Batch, measuring: MetricEvaluator, number: int = 0, size: int | None = None
    ) -> Iterator[Loss]:
        """The loss of a batch, or those of its pieces of `size` samples where it does not fit in memory.

        The metrics are updated with it. `number` counts the batches of this rank.
        """
        num_samples = len(next(iter(batch.values())))
        size = size or num_samples
        try:
            loss, made = self._loss(batch, number)
        except Exception as error:
            if num_samples <= size or not oom_text(error):
                raise
            frames.release(error)
        else:
            measuring.update(loss, batch | made)
            yield loss
            return
        for begin in range(0, num_samples, size):
            piece = {name: column[begin : begin + size] for name, column in batch.items()}
            yield from self.losses(piece, measuring, number)

    def _loss(self, batch: Batch, number: int) -> tuple[Loss, Batch]:
        """The loss of a batch, and the batch as eval_transform has made it."""
        self.beat()
        seed_evaluation(self.seed, self.env.rank, number, self.env.device)
        with self.forward_context():
            transform = self.recipe.eval_transform
            with self.heartbeat.in_user_code():
                made = batch if transform is None else transformed("eval_transform", transform, batch)
            return loss_of(self.recipe.loss, self.model, made), made

    def read(self, batches: Iterator[Read]) -> Iterator[Read]:
        """The batches, with a sign of life before each one is read."""
        while True:
            self.beat()
            with self.heartbeat.in_user_code():
                read = next(batches, None)
            if read is None:
                return
            yield read


def evaluate(
    over: EvalLoop,
    data: Readable,
    batch_size: int,
    interrupted: Callable[[], bool] = lambda: False,
    training_size: int | None = None,
) -> Evaluation:
    """Measure the model on `data` (on the device, whole on every rank). A collective.

    A batch of more than `training_size` samples that does not fit in memory is measured in pieces of that
    size. Raises EvaluationStopped, on all ranks, if `interrupted` was true before a batch on any of them.
    """
    env = over.env
    own, measuring = _Totals(), MetricEvaluator(over.recipe, env, over.guard, over.wait)
    batches = data.evaluation_batches(env.rank, env.world_size, batch_size, over.shares)
    with evaluating(over.model), torch.no_grad():
        for number, (num_samples, batch) in enumerate(over.read(batches)):
            if interrupted():
                own.stopped = 1
                break
            own.samples += num_samples
            if batch is None:  # samples that could not be read and may be left out
                own.unreadable += num_samples
            else:
                for loss in over.losses(batch, measuring, number, training_size):
                    own.add(loss)
        over.wait()
        total = own.over_ranks(env)
        # After the collective, on all ranks alike: they hold the same sums.
        if total.stopped:
            raise EvaluationStopped
        if not isinstance(data, IterableData):  # whose length is not known
            seen = f"{total.samples:g} of {len(data)} samples were evaluated on {env.world_size} ranks"
            assert total.samples == len(data), seen
        measured = int(total.samples - total.unreadable)
        if not total.counted > 0:
            raise DataError(
                f"no loss was counted for {counted(measured, 'sample')} to evaluate on: the counts of "
                f"Loss(sum, count) add up to {total.counted:g}. Check what the loss counts, and that the "
                "samples can be read."
            )
        found = measuring.compute(total.loss_sum, total.counted)
    return Evaluation(
        total.loss_sum / total.counted,
        measured,
        found.values,
        found.higher_is_better,
        int(total.unreadable),
        found.confusion,
    )


def monitored_metric(
    monitor: str | None, evaluations: Mapping[str, Evaluation], key: str = MONITOR
) -> MonitoredMetric:
    """The value named by `monitor`. None stands for the accuracy if it was measured, else the loss.

    A name such as SET/METRIC selects a set; without one it is the first.

    Raises ConfigError, which begins with `key`, for an unknown name and for a metric without
    higher_is_better. All ranks hold the same evaluation, so all ranks raise or none.
    """
    first = next(iter(evaluations.values()))
    refuse_unknown_metric(key, monitor, first.metrics, evaluations)
    full_name = monitor or ("accuracy" if first.higher_is_better.get("accuracy") else "val_loss")
    evaluation, name = first, full_name
    prefix, slash, rest = full_name.partition("/")
    if slash and prefix in evaluations:
        evaluation, name = evaluations[prefix], rest
    if name == "val_loss":
        return MonitoredMetric(full_name, evaluation.loss, lower_is_better=True)
    higher = evaluation.higher_is_better[name]
    if higher is None:
        raise ConfigError(
            f"{key}={name}: its metric does not declare which way is better. Set higher_is_better in its "
            f"class: True, False, or a mapping such as {{{name!r}: True}}."
        )
    return MonitoredMetric(full_name, evaluation.metrics[name], lower_is_better=not higher)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode in the context. Restores the mode of each module, also after an error."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, training in modes.items():
            module.training = training


def sanity_check(over: EvalLoop, data: Readable, batch_size: int) -> MetricValues:
    """What the metrics give for the first samples of each rank, with NaN for names that they only declare.

    Raises what an evaluation would raise, but for exceptions of a metric's `compute` that may be due to these
    samples: `MetricValues.failed` has their texts. A collective.
    """
    env = over.env
    own, measuring = _Totals(), MetricEvaluator(over.recipe, env, over.guard, over.wait, trial=True)
    with evaluating(over.model), torch.no_grad(), unchanged(over.model):
        over.beat()
        with over.heartbeat.in_user_code():
            batch = data.first_batch(env.rank, env.world_size, batch_size, FIRST)
            if batch is not None:
                for loss in over.losses(batch, measuring):
                    own.add(loss)
        over.wait()
        total = own.over_ranks(env)
        found = measuring.compute(total.loss_sum, total.counted or 1)
    for metric in over.recipe.metrics_or_default:
        for name in declared_names(metric) or ():
            found.values.setdefault(name, float("nan"))
            found.higher_is_better.setdefault(name, direction_of(metric, name))
    return found


@contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    """Restore what the modules hold but parameters.

    That is their buffers, and attributes that a forward pass sets, such as a counter.
    """
    attributes = [(module, dict(vars(module)), dict(module._buffers)) for module in model.modules()]
    buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    try:
        yield
    finally:
        for module, of_module, own_buffers in attributes:
            vars(module).clear()
            vars(module).update(of_module)
            module._buffers.update(own_buffers)
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)
