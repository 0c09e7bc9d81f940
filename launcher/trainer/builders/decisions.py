"""The decisions made for the user, each with its reason, printed at the start of a run.

Owns the sentences; the modules that build the job make the decisions.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator, Sequence

import torch
from torch import nn

from launcher.config.optimizers import OptimConfig, is_fused
from launcher.config.schema import Config
from launcher.data.batch_plan import BatchPlan
from launcher.data.sources import ONLY_SET, length_of
from launcher.distributed.env import WorkerEnv
from launcher.engine import Stepper
from launcher.engine.names import named_parameters
from launcher.engine.optim.muon import hidden_matrices
from launcher.errors import counted, listed
from launcher.recipe.contract import Recipe
from launcher.trainer.builders import build, parameter_groups
from launcher.trainer.builders.activation_checkpointing import checkpointed_blocks

SHOWN = 8  # classes
# Data that needs no file, by `data.name`: nobody should take it for a benchmark, or for data of their own.
DEMO_DATA = {
    "digits": "1,797 images of 8 x 8, shipped for a first run (your own: data=imagefolder data.path=DIR)",
    "synthetic": "generated images, for measuring speed",
    "text": "the sources of Python's standard library, for a first run (your own: data.path=FILE or DIR)",
}


def decisions(
    config: Config, env: WorkerEnv, devices: Sequence[str], recipe: Recipe, stepper: Stepper, plan: BatchPlan
) -> Iterator[tuple[str, str]]:
    """The decisions made for the user, as (topic, sentence with the reason)."""
    kinds = ", ".join(f"{devices.count(kind)} x {kind}" for kind in dict.fromkeys(devices))
    backend = "alone" if env.group is None else "over NCCL" if env.device.type == "cuda" else "over Gloo"
    yield "workers", f"{env.world_size} ({kinds}), {backend}{_of_machine(env)}"
    yield "data", _data(config, recipe)
    way = "emulated" if stepper.emulation.used else "native"
    yield "precision", f"{config.precision.name}, {way}: {stepper.emulation.reason}"
    yield "batch", _division(plan)
    steps = config.train.total_steps(plan.steps_per_epoch)
    if config.train.epochs is not None and config.train.max_steps is not None:
        yield "length", _length(config.train.epochs, config.train.max_steps, plan.steps_per_epoch)
    yield "optimizer", _optimizer(config.optim)
    if config.optim.name == "muon":
        yield "muon", _of_muon(stepper.model)
    if (decay := config.ema.decay) is not None:
        passes = "" if config.ema.every_steps == 1 else f", one pass every {config.ema.every_steps} steps"
        text = f"evaluated and exported: the average of the weights, decay {decay:g} per applied step{passes}"
        yield "ema", text
    if (base := config.schedule.lr_base_batch_size) is not None:
        factors = f"optim.lr={config.optim.lr:g} x data.batch_size={config.data.batch_size}"
        yield "learning rate", f"{build.peak_lr(config):g}: {factors} / schedule.lr_base_batch_size={base}"
    if text := parameter_groups.parameter_groups(config.optim, recipe.groups, stepper.model)[1]:
        yield "parameter groups", text
    yield "schedule", _schedule(config, recipe, build.lr_table(config, recipe, steps))
    if config.ddp.overlap and build.shares_communicator(config, env):
        text = "gradients are reduced after the backward pass: model.sync_bn=true uses the same communicator"
        yield "communication", text
    if build.uses_channels_last(config, env, stepper.model):
        text = "channels_last; for a model that needs contiguous feature maps: train.channels_last=false"
        yield "memory format", text
    if config.train.activation_checkpointing:
        counts = Counter(type(block).__name__ for block in checkpointed_blocks(stepper.model))
        blocks = ", ".join(f"{count} x {kind}" for kind, count in counts.items())
        yield "activation checkpointing", f"recomputed in the backward pass: {blocks}"


def _data(config: Config, recipe: Recipe) -> str:
    name = getattr(recipe.train, "name", None)
    demo = DEMO_DATA.get(name or "") if config.data.path is None else None
    before = "" if demo is None else f"{name}: {demo}; "
    held_out = ", ".join(
        f"{_size(data)} to validate on{'' if name == ONLY_SET else f' ({name})'}"
        for name, data in recipe.validation_sets.items()
    )
    classes = recipe.classes or ()
    named = f"; {len(classes):,} classes: {listed(list(classes), SHOWN)}" if classes else ""
    return f"{before}{_size(recipe.train)} to train on, {held_out or 'none to validate on'}{named}"


def _size(data: object) -> str:
    """The number of samples of a data set; a stream does not know it."""
    length = length_of(data)
    return "a stream" if length is None else counted(length, "sample")


def _optimizer(optim: OptimConfig) -> str:
    """Its name and all its options, so that they can be compared with those of another program."""
    options = {"lr": optim.lr, **optim.options, "clip_norm": optim.clip_norm}
    text = f"{optim.name}: {', '.join(f'{name}={_written(value)}' for name, value in options.items())}"
    return text if is_fused(optim.name) else f"{text}; a torch.optim.Optimizer on fp32 masters, not one pass"


def _of_muon(model: nn.Module) -> str:
    """Which matrices Muon and AdamW train: a head that was not registered last counts as a hidden layer."""
    matrices = [name for name, p in named_parameters(model).items() if p.ndim == 2 and p.requires_grad]
    hidden = hidden_matrices(model)
    of_muon = [name for name in matrices if name in hidden]
    others = [name for name in matrices if name not in hidden]
    return (
        f"of {len(matrices):,} matrices Muon trains {len(of_muon):,} ({listed(of_muon, SHOWN)}) and AdamW "
        f"{len(others):,} ({listed(others, SHOWN) or 'none'}); AdamW trains all that is no matrix"
    )


def _written(value: object) -> str:
    """The value as one would write it in a command."""
    return f"{value:g}" if isinstance(value, float) else json.dumps(value)


def _length(epochs: int, max_steps: int, steps_per_epoch: int) -> str:
    """Which of both lengths ends the run."""
    of_epochs = f"train.epochs={epochs} ({counted(epochs * steps_per_epoch, 'step')})"
    if max_steps < epochs * steps_per_epoch:
        return f"train.max_steps={max_steps} ends the run: {of_epochs} is not reached"
    return f"{of_epochs} ends the run: train.max_steps={max_steps} is not reached"


def _schedule(config: Config, recipe: Recipe, rates: Sequence[float]) -> str:
    name = config.schedule.name if recipe.schedule is None else build.named_schedule(config)
    first, last, peak = rates[0], rates[-1], max(rates)
    if min(rates) == peak:
        text = f"{name}: lr {first:.3g} in all steps"
    else:
        most = f"{peak:.3g} at most (in step {rates.index(peak) + 1})"
        text = f"{name}: lr {first:.3g} at first, {most}, {last:.3g} in the last step, {len(rates)}"
    return text if recipe.schedule is None else f"{text}; schedule.warmup_fraction is not applied to it"


def _division(plan: BatchPlan) -> str:
    parts = f"{counted(plan.batch_size, 'sample')} per update over {counted(plan.world_size, 'rank')}"
    if plan.shares:
        parts += f", {', '.join(map(str, plan.shares))} by rank"
    if plan.micro_batches > 1:
        parts += f", up to {plan.micro_batches} micro-batches of at most {plan.largest_micro_batch} each"
    if plan.micro_batch is not None and plan.micro_batch > plan.largest_share:
        share = counted(plan.largest_share, "sample")
        parts += (
            f"; data.micro_batch_size={plan.micro_batch} is above the {share} of a rank: nothing is split"
        )
    if plan.num_samples < plan.batch_size:
        parts += (
            f"; but the training set has {counted(plan.num_samples, 'sample')}: each update is of these, an "
            "epoch is one step (lower data.batch_size for more)"
        )
    return parts


def _of_machine(env: WorkerEnv) -> str:
    """What the number of ranks leaves idle on this machine, or has them share."""
    if env.device.type == "cuda":
        idle = torch.cuda.device_count() - env.local_world_size
        text = f"; {counted(idle, 'GPU')} of this machine idle: launch.nproc=auto uses all, or "
        text += "torchrun --nproc-per-node=gpu"
        return text if idle > 0 else ""
    cores = len(os.sched_getaffinity(0))
    text = f"; they share {counted(cores, 'core')} and wait for each other"
    return f"{text}: launch.nproc={cores} would be faster" if env.local_world_size > cores else ""
