"""Training steps that replay one recording: train.cuda_graph.

Owns the static inputs of the recorded steps, the choice of the steps that replay one, and why a run cannot be
recorded. The recording makes a micro-batch of two inputs, the indices of its samples and their random
numbers, both a function of (seed, epoch, step): the order of a run and its augmentation stay what they are.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn

from launcher.checkpoint.generators import restore_states, states
from launcher.config.user_code import place_of
from launcher.data.batch_plan import BatchPlan
from launcher.data.tensors import Batch, DeviceBatches
from launcher.distributed.collectives import exchange_texts
from launcher.engine import HostRead, NoMemory, RecordingError, StepGraph, StepResult
from launcher.engine.diagnostics.step_timer import DATA
from launcher.engine.recorder import causes_of, recorder_of
from launcher.engine.step_graph import waits_for_device
from launcher.errors import ConfigError, first_sentence
from launcher.process import frames, shortage
from launcher.recipe.contract import Loss
from launcher.training.device import free_memory
from launcher.training.progress import Position
from launcher.training.run import Run
from launcher.training.task import Learner, Task

TOPIC = "cuda graph"
HOST_GENERATORS = {"python": "random", "numpy": "numpy.random", "cpu": "torch's generator of the CPU"}


@dataclass
class RecordedSteps:
    """Replays the steps of a task: those that are as large as the first of an epoch, or as its last.

    Once the micro-batch has been halved no step is: the recordings and their memory are dropped.
    """

    is_recorded = True

    task: Task
    batches: DeviceBatches
    graph: StepGraph
    _plan: BatchPlan | None = None  # that of the recordings; None where there are none
    # By samples over all ranks, in the order of the recordings: what each reads, and its latest replay wrote.
    _inputs: dict[int, list[tuple[Tensor, Tensor]]] = field(default_factory=dict)
    _learned: dict[int, list[tuple[Loss, Batch]]] = field(default_factory=dict)

    @property
    def network(self) -> nn.Module:
        """The network of the recorded task."""
        return self.task.network

    def record(self, total_steps: int) -> list[int]:
        """Record a step of each size of the run; returns how many samples these have, over all ranks.

        Changes nothing else. A collective; see `StepGraph.record`.
        """
        self.network.train()  # whose modes, too, are those of the recording
        self._plan = plan = self.batches.plan
        last = plan.steps_per_epoch - 1
        sizes = {len(plan.global_batch(step)): step for step in (last, 0) if step < total_steps}
        for size in sorted(sizes, reverse=True):
            inputs = self.batches.inputs(0, sizes[size])
            self._inputs[size] = [(indices.clone(), noise.clone()) for indices, noise in inputs]
        self.graph.record(*(partial(self._pass, size) for size in self._inputs))
        return list(self._inputs)

    def release(self) -> None:
        """Drop the recordings, and return their memory."""
        self.graph.release()
        self._plan, self._inputs, self._learned = None, {}, {}
        free_memory(self.task.stepper.device)

    def train_on(self, position: Position) -> StepResult:
        """Train like `Task.train_on`. All ranks replay the same steps: the whole batch's size decides."""
        relief, plan = self.task.relief, self.batches.plan
        if self._plan is not None and self._plan is not plan:
            self.release()
        size = len(plan.global_batch(position.step_of_epoch))
        if relief.dropping or size not in self._inputs:
            return self.task.train_on(position)
        relief.keep(position)
        clock = self.task.stepper.clock
        clock.restart()
        fresh = self.batches.inputs(position.epoch, position.step_of_epoch)
        for kept, given in zip(self._inputs[size], fresh, strict=True):
            for place, values in zip(kept, given, strict=True):
                place.copy_(values)
        clock.mark(DATA)
        result = self.graph.replay(list(self._inputs).index(size))
        for of_batch, batch in self._learned[size]:
            self.task.answers.count(of_batch, batch)
        return result

    def _pass(self, size: int) -> None:
        """All micro-batches of a step. Keeps no loss as it is: it would keep the graph of autograd."""
        self._learned[size] = learned = []
        # All are made first, as in an ordinary step, which draws random numbers in this order.
        for batch in [self.batches.batch(*inputs) for inputs in self._inputs[size]]:
            of_batch = self.task.learn_from(batch)
            outputs = of_batch.outputs.detach() if isinstance(of_batch.outputs, Tensor) else None
            learned.append((Loss(of_batch.sum.detach(), of_batch.count, outputs), batch))


@contextmanager
def recorded(task: Task, run: Run) -> Iterator[Learner]:
    """`task` with its steps recorded, where train.cuda_graph asks for it and the run permits it.

    A collective. Raises ConfigError, on all ranks and before the first step, where true was asked for and
    cannot be done. The recording is dropped at the end of the context, before the process group is destroyed.
    """
    with ExitStack() as stack:
        yield task if run.config.train.cuda_graph is False else _recorded(task, run, stack)


def _recorded(task: Task, run: Run, stack: ExitStack) -> Learner:
    run.heartbeat.beat("recording the step")
    reason = obstacle(task, run)
    if not reason:
        assert isinstance(task.batches, DeviceBatches)
        steps = RecordedSteps(task, task.batches, StepGraph(task.stepper, ran_out=shortage.ran_out))
        stack.callback(steps.graph.release)
        sizes, reason = _recorded_sizes(steps, run)
        if not reason:
            rest = "".join(f", and the last of an epoch, of {size}, in the same memory" for size in sizes[1:])
            run.telemetry.decision(TOPIC, f"each step of {sizes[0]} samples{rest}")
            return steps
        steps.release()
    if run.config.train.cuda_graph is True:
        raise ConfigError(
            f"train.cuda_graph=true: this run cannot be recorded: {reason}. Or set train.cuda_graph=false; "
            "auto records where it can."
        )
    run.telemetry.decision(TOPIC, f"none: {reason}")
    return task


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


def _recorded_sizes(steps: RecordedSteps, run: Run) -> tuple[list[int], str]:
    """Record; returns the sizes, and why it is not possible, the same on all ranks. A collective."""
    device, sizes = run.env.device, list[int]()
    before = states(device)
    try:
        sizes = steps.record(run.config.train.total_steps(steps.batches.plan.steps_per_epoch))
        reason = _drawn_on_host(before, device)
    except HostRead as error:
        reason = (
            f"its loss or transform waits for the device{_at(error)} (.item(), a mask, a copy to the host)"
        )
    except NoMemory as error:  # without a cause on ranks where it did not run out
        found = "" if error.__cause__ is None else shortage.ran_out(error.__cause__)
        reason = f"it ran out of {found}. A recording keeps the memory of a whole step" if found else ""
        frames.release(error)
    except RecordingError as error:
        raise ConfigError(
            f"train.cuda_graph={str(run.config.train.cuda_graph).lower()}: the step could not be "
            f"recorded{_at(error)}: {first_sentence(error)} Set train.cuda_graph=false."
        ) from error
    finally:
        restore_states(before, device)
    # The reason of the lowest rank that has one: all ranks decide alike.
    return sizes, next(filter(None, exchange_texts(run.env, reason)), "")


def _drawn_on_host(before: dict[str, Tensor], device: torch.device) -> str:
    """Which generators of the host a step draws from: a replay would repeat their numbers for ever."""
    after = states(device)
    names = {key: name for key, name in HOST_GENERATORS.items() if key != device.type}
    drawn = [name for key, name in names.items() if not torch.equal(before[key], after[key])]
    if not drawn:
        return ""
    return (
        f"its loss, model or transform draws from {' and '.join(drawn)}, and a recording would repeat these "
        "numbers in every step. Use the noise that train_transform is given, or draw on the device"
    )


def _at(error: BaseException) -> str:
    place = next(filter(None, map(place_of, causes_of(error))), "")
    return f" at {place}" if place else ""
