"""The memory of one rank's training step, by kind, from passes that are counted.

Owns the assembly of a rank's model and Stepper without telemetry and other ranks, and what of its bytes is
which kind. Bytes are those of tensors; scratch that a kernel takes and returns within one call is not seen.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from launcher.config.schema import Config
from launcher.data.batch_plan import BatchPlan
from launcher.data.seeding import seed_all
from launcher.data.sources import DataSets, Readable, batch_plan, trial_batches
from launcher.distributed.env import WorkerEnv
from launcher.engine import Stepper
from launcher.engine.optim.update import CHUNK as UPDATED_AT_ONCE
from launcher.plan.meta import META, AllocationTracker, Arithmetic, OnMeta
from launcher.recipe.contract import Recipe, loss_of
from launcher.recipe.registry import load_recipe
from launcher.trainer.builders import build
from launcher.trainer.errors.recipe_errors import guarding
from launcher.trainer.progress import TrainLength

LOG = "the log of a run"  # where a traceback is that is not shown here
PASSES = 2  # of a step at most: the second adds to the sums of the first


@dataclass(frozen=True)
class StepMemory:
    """Bytes that one step takes beside what is always there, by their moment. `size`: of its micro-batch."""

    size: int
    activations: int  # kept from the forward for the backward pass, with the micro-batch itself
    passes: int  # the most during forward and backward pass
    update: int  # the most from then to the end of the step


@dataclass(frozen=True)
class PlannedTask:
    """A recipe with its data, and how the samples of one rank are divided."""

    config: Config
    recipe: Recipe
    plan: BatchPlan
    length: TrainLength

    @classmethod
    def of(cls, config: Config, world_size: int) -> PlannedTask:
        """Loads the recipe and its data, as a run does. Raises what a run raises."""
        seed_all(config.seed)
        with guarding(f'the function under @recipe("{config.recipe.uses}")', LOG):
            recipe = load_recipe(config)
        env = WorkerEnv(0, world_size, 0, world_size, torch.device("cpu"), None)
        data = DataSets.of(config, env, recipe.train, {}, recipe.collate)
        plan = batch_plan(config, env, data.train, recipe.lengths)
        length = TrainLength.of(plan.steps_per_epoch, config.train)
        return cls(config, recipe, plan, length)


class PlannedRank:
    """Rank 0 of a job: its model, data and Stepper on `meta`, or on a device for real."""

    def __init__(self, task: PlannedTask, env: WorkerEnv, tracker: AllocationTracker) -> None:
        config, self.recipe, self.plan = task.config, task.recipe, task.plan
        recipe, plan, self.device, self.tracker = task.recipe, task.plan, env.device, tracker
        sets = DataSets.of(config, env, recipe.train, recipe.validation_sets, recipe.collate)
        self.data: Readable = sets.train
        of_data = self._now()
        # What a model makes without naming a device is made on `meta`; elsewhere the CPU is the default.
        default: AbstractContextManager[object] = self.device if self.device == META else nullcontext()
        with default:
            self.model: nn.Module = build.build_model(config, recipe, env, plan)
        # A short run, without a rate for each step.
        self.stepper: Stepper = build.build_stepper(config, env, recipe, self.model, plan, [config.optim.lr])
        average = build.weight_average(config, self.stepper)
        gc.collect()  # the parameters as they were built
        self._beside = {"averages": 0 if average is None else self.stepper.flat_numel * 4, "data": of_data}
        known = sum(self.stepper.bytes_by_kind().values()) + sum(self._beside.values())
        self._beside["wire"] = max(0, self._now() - known)  # what is of no other kind

    @property
    def held(self) -> dict[str, int]:
        """The bytes that are held all the time, by kind. Of an optimizer of torch complete after a step."""
        return self.stepper.bytes_by_kind() | self._beside

    def step(self, size: int, of_gpu: bool) -> StepMemory:
        """The bytes of one step of micro-batches of `size`.

        `of_gpu`, on `meta`: half arithmetic as a GPU has it instead of the emulation of a CPU.
        """
        plan, tracker, stepper = replace(self.plan, micro_batch=size), self.tracker, self.stepper
        stepper.set_micro_batches(plan.micro_batches)
        self.model.train()
        tracker.restart()
        held, activations = self._now(), 0
        passes = min(PASSES, self.plan.micro_batches)  # of any size as many, so that sizes compare
        for batch in trial_batches(self.data, plan, self.recipe.train_transform, passes)[:passes]:
            with self._forward(of_gpu), tracker.without_values():
                found = loss_of(self.recipe.loss, self.model, batch)
            activations = max(activations, self._now() - held)
            with self._forward(of_gpu):  # in which blocks are recomputed, with train.activation_checkpointing
                stepper.backward(found.sum, found.count)
            del found
        states = stepper.bytes_by_kind()["states"]
        peak = tracker.peak[self.device] - held
        del batch
        tracker.restart()
        stepper.step()
        made = stepper.bytes_by_kind()["states"] - states
        update = tracker.peak[self.device] - held - made
        # A CPU keeps the widened gradients of one piece of the update, which `meta` does not.
        kept = 4 * min(UPDATED_AT_ONCE, stepper.flat_numel) if self.device == META and not of_gpu else 0
        return StepMemory(size, activations, peak + kept, update)

    @property
    def num_parameters(self) -> int:
        """Elements of the trainable parameters, without the padding between them."""
        return sum(p.numel() for p in self.model.parameters() if p.requires_grad)

    def checkpoint_bytes(self, shards: int) -> int:
        """Bytes of all ranks' weights and states as saved, of an optimizer in so many shards."""
        held = self.held
        frozen = sum(p.numel() * p.element_size() for p in self.model.parameters() if not p.requires_grad)
        buffers = held["buffers"] // 2  # of which each step keeps a copy
        weights = 4 * self.num_parameters + frozen
        return weights + held["states"] * shards + held["averages"] + buffers

    def _forward(self, of_gpu: bool) -> AbstractContextManager[object]:
        half = self.stepper.policy.arithmetic
        if self.device != META:
            return self.stepper.forward()
        return nullcontext() if half == torch.float32 else Arithmetic(half, of_gpu)

    def _now(self) -> int:
        return self.tracker.bytes[self.device]


@contextmanager
def rank_on(device: torch.device, task: PlannedTask, counting: bool = True) -> Iterator[PlannedRank]:
    """The rank of the task's plan. The others do not exist, and nothing is sent.

    Without `counting` of bytes its steps take as long as those of a run.
    """
    plan, tracker = task.plan, AllocationTracker()
    with ExitStack() as contexts:
        group: dist.ProcessGroup | None = None
        if plan.world_size > 1:
            dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=plan.world_size)
            contexts.callback(dist.destroy_process_group)
            group = dist.group.WORLD
        if counting:
            contexts.enter_context(tracker)
        if device == META:
            # It has no autocast: PlannedRank._forward stands for arithmetic and emulation.
            precision = replace(task.config.precision, emulate=False)
            task = replace(task, config=replace(task.config, precision=precision))
            contexts.enter_context(OnMeta())
        env = WorkerEnv(plan.rank, plan.world_size, 0, plan.world_size, device, group)
        yield PlannedRank(task, env, tracker)
