"""Training steps that replay one recording: train.cuda_graph.

Owns the static inputs of the recorded step, the choice of the steps that replay it, and why a run cannot be
recorded. The recording makes a micro-batch of two inputs, the indices of its samples and their random
numbers, both a function of (seed, epoch, step): the order of a run and its augmentation stay what they are.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from launcher.checkpoint.generators import restore_states, states
from launcher.config.user_code import place_of
from launcher.data.tensors import Batch, DeviceBatches
from launcher.distributed.collectives import exchange_texts
from launcher.engine import HostRead, RecordingError, StepGraph, StepResult
from launcher.engine.diagnostics.step_timer import DATA
from launcher.engine.recorder import causes_of, recorder_of
from launcher.engine.step_graph import waits_for_device
from launcher.errors import ConfigError
from launcher.recipe.contract import Loss
from launcher.training.loop import Learner, Task
from launcher.training.progress import Position
from launcher.training.run import Run

TOPIC = "cuda graph"
HOST_GENERATORS = {"python": "random", "numpy": "numpy.random", "cpu": "torch's generator of the CPU"}


@dataclass
class RecordedSteps:
    """Replays the steps of a task that are as large as the first of an epoch; others run as they are."""

    task: Task
    batches: DeviceBatches
    graph: StepGraph
    _inputs: list[tuple[Tensor, Tensor]] = field(default_factory=list)  # what the recording reads
    _learned: list[tuple[Loss, Batch]] = field(default_factory=list)  # what the latest replay has written

    @property
    def network(self) -> nn.Module:
        """As `Learner.network`."""
        return self.task.network

    @property
    def samples(self) -> int:
        """Of a replayed step, over all ranks."""
        return len(self.batches.plan.global_batch(0))

    def record(self) -> None:
        """Record a step. Changes nothing else. A collective; see `StepGraph.record`."""
        self.network.train()  # whose modes, too, are those of the recording
        self._inputs = [(indices.clone(), noise.clone()) for indices, noise in self.batches.inputs(0, 0)]
        self.graph.record(self._pass)

    def train_on(self, position: Position) -> StepResult:
        """As `Task.train_on`. All ranks replay the same steps: the size of the whole batch decides."""
        relief = self.task.relief
        if relief.dropping or not self._is_recorded(position):
            return self.task.train_on(position)
        relief.begin(position)
        clock = self.task.stepper.clock
        clock.restart()
        fresh = self.batches.inputs(position.epoch, position.step_of_epoch)
        for kept, given in zip(self._inputs, fresh, strict=True):
            for place, values in zip(kept, given, strict=True):
                place.copy_(values)
        clock.mark(DATA)
        result = self.graph.replay()
        for of_batch, batch in self._learned:
            self.task.answers.count(of_batch, batch)
        return result

    def _is_recorded(self, position: Position) -> bool:
        """Whether the step is like the recorded one. None is, once the micro-batch has been halved."""
        plan = self.batches.plan
        alike = len(plan.micro_positions(position.step_of_epoch)) == len(self._inputs)
        return alike and len(plan.global_batch(position.step_of_epoch)) == self.samples

    def _pass(self) -> None:
        """All micro-batches of a step. Keeps no loss as it is: it would keep the graph of autograd."""
        self._learned = []
        # All are made first, as in an ordinary step, which draws random numbers in this order.
        for batch in [self.batches.batch(*inputs) for inputs in self._inputs]:
            of_batch = self.task.learn_from(batch)
            outputs = of_batch.outputs.detach() if isinstance(of_batch.outputs, Tensor) else None
            self._learned.append((Loss(of_batch.sum.detach(), of_batch.count, outputs), batch))


@contextmanager
def recorded(task: Task, run: Run) -> Iterator[Learner]:
    """`task` with its steps recorded, where train.cuda_graph asks for it and the run permits it.

    A collective. Raises ConfigError, on all ranks and before the first step, where true was asked for and
    cannot be done. The recording is dropped at the end of the context, before the process group is destroyed.
    """
    wish = run.config.train.cuda_graph
    if wish is False:
        yield task
        return
    run.heartbeat.beat("recording the step")
    reason = obstacle(task, run)
    if reason:
        _refuse_or_report(run, reason)
        yield task
        return
    assert isinstance(task.batches, DeviceBatches)
    steps = RecordedSteps(task, task.batches, StepGraph(task.stepper))
    try:
        if reason := _recording_failure(steps, run):
            _refuse_or_report(run, reason)
            yield task
        else:
            run.telemetry.decision(TOPIC, f"each step of {steps.samples} samples{_rest(steps)}")
            yield steps
    finally:
        steps.graph.release()


def obstacle(task: Task, run: Run) -> str:
    """Why no step of this run can be recorded, whatever its recipe does; empty if nothing is known."""
    device = run.env.device
    if recorder_of(device) is None:
        return f"it runs on the device {device.type}, and only CUDA records"
    if not isinstance(task.batches, DeviceBatches):
        return (
            "its batches come from loader processes: their memory and shapes differ from step to step. Give "
            "a set that fits into memory as TensorData"
        )
    if run.config.precision.rescue:
        return (
            "precision.rescue=true may change the arithmetic of its modules between steps. Name them in "
            "precision.fp32_modules"
        )
    return waits_for_device(task.stepper)


def _recording_failure(steps: RecordedSteps, run: Run) -> str:
    """Record; returns why that is not possible, the same on all ranks. A collective."""
    device = run.env.device
    before = states(device)
    try:
        steps.record()
        reason = _drawn_on_host(before, device)
    except HostRead as error:
        reason = (
            f"its loss or transform waits for the device{_at(error)} (.item(), a mask, a copy to the host)"
        )
    except RecordingError as error:
        raise ConfigError(
            f"train.cuda_graph={str(run.config.train.cuda_graph).lower()}: the step could not be "
            f"recorded{_at(error)}: {_first_line(error)} Set train.cuda_graph=false."
        ) from error
    finally:
        restore_states(before, device)
    return next(filter(None, exchange_texts(run.env, reason)), "")


def _drawn_on_host(before: dict[str, Tensor], device: torch.device) -> str:
    """Which generators of the host a step draws from: a replay would repeat their numbers for ever."""
    after = states(device)
    drawn = [
        name
        for key, name in HOST_GENERATORS.items()
        if device.type != key and not torch.equal(before[key], after[key])
    ]
    if not drawn:
        return ""
    return (
        f"its loss, model or transform draws from {' and '.join(drawn)}, and a recording would repeat these "
        "numbers in every step. Use the noise that train_transform is given, or draw on the device"
    )


def _refuse_or_report(run: Run, reason: str) -> None:
    if run.config.train.cuda_graph is True:
        raise ConfigError(
            f"train.cuda_graph=true: this run cannot be recorded: {reason}. Or set train.cuda_graph=false; "
            "auto records where it can."
        )
    run.telemetry.decision(TOPIC, f"none: {reason}")


def _rest(steps: RecordedSteps) -> str:
    rest = steps.batches.plan.num_samples % steps.samples
    if steps.batches.plan.drop_last or not rest:
        return ""
    return f"; the last of an epoch, of {rest}, runs as an ordinary step (data.drop_last=true leaves it out)"


def _at(error: BaseException) -> str:
    place = next(filter(None, map(place_of, causes_of(error))), "")
    return f" at {place}" if place else ""


def _first_line(error: BaseException) -> str:
    line = (str(error).splitlines() or [type(error).__name__])[0].rstrip()
    return line if line.endswith(".") else f"{line}."
