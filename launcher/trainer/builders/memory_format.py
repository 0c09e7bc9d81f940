"""The memory format of images and convolutions: train.channels_last, which not every model bears.

In channels_last the output of a convolution is not contiguous, so that a `.view(n, -1)` after it raises: in
the model, the loss, a metric or on_eval_end. All of them are tried on a few samples before the run trains.
Owns on which devices the format is the default.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import torch
from torch import nn

from launcher.config.schema import Config
from launcher.config.user_code import user_location
from launcher.data.batch_plan import BatchPlan
from launcher.data.sources import DataSets, training_batches
from launcher.distributed.collectives import all_gather_str
from launcher.distributed.env import WorkerEnv
from launcher.errors import ConfigError, described
from launcher.evaluation.evaluate import EvalLoop, sanity_check, unchanged
from launcher.os import frames
from launcher.os.oom import oom_text
from launcher.recipe.contract import Recipe, loss_of
from launcher.trainer.device import free_memory
from launcher.trainer.progress import Position

FASTER_ON = ("cuda",)  # kinds of devices; on a CPU it is slower
MOST_SAMPLES = 8  # the format changes no shape: a few are as good as a batch, and quicker
TOPIC = "memory format"


def choose_memory_format(
    config: Config,
    env: WorkerEnv,
    recipe: Recipe,
    model: nn.Module,
    data: DataSets,
    plan: BatchPlan,
    position: Position,
    decide: Callable[[str, str], None],
    in_user_code: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> None:
    """Bring the model on its device into the format that the config asks for, if it bears it. A collective.

    Under `auto` a recipe that raises in channels_last alone trains contiguous; under `true` that is a
    ConfigError, on all ranks. `position` is that of the first evaluation.
    """
    channels_last = config.train.channels_last
    if channels_last is False or not any(parameter.ndim == 4 for parameter in model.parameters()):
        return
    if channels_last == "auto" and env.device.type not in FASTER_ON:
        return decide(TOPIC, f"contiguous: channels_last is not faster on the device {env.device.type}")

    def failure_in(form: torch.memory_format) -> str:
        model.to(memory_format=form)  # type: ignore[call-overload]
        with in_user_code():
            failure = _failure(env, recipe, model, data, plan, position)
        return next(filter(None, all_gather_str(env, failure)), "")

    failure = failure_in(torch.channels_last)
    if not failure:
        return decide(TOPIC, "channels_last")
    if failure_in(torch.contiguous_format):  # it is not the format that it fails of
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        return decide(TOPIC, "channels_last")
    if channels_last is True:
        raise ConfigError(
            f"train.channels_last=true: in this memory format the recipe raises {failure}, and without it "
            "does not. Use .flatten(1) or .reshape() in place of .view(), or set train.channels_last=false."
        )
    return decide(TOPIC, f"contiguous: in channels_last, which is faster, the recipe raises {failure}")


def _failure(
    env: WorkerEnv, recipe: Recipe, model: nn.Module, data: DataSets, plan: BatchPlan, position: Position
) -> str:
    """What a pass in fp32 raises, for training or for evaluation, on the same few samples on all ranks.

    Each rank measures the metrics alone, and rank 0 calls on_eval_end. Empty where it raises nothing, or runs
    out of memory, which is not the format's fault.
    """
    size = min(plan.largest_micro_batch, MOST_SAMPLES)
    last_rank = replace(plan, micro_batch=size, rank=plan.world_size - 1)  # whose share is the largest
    alone = replace(env, rank=0, world_size=1, group=None)
    with unchanged(model):
        model.train()
        try:
            for batch in training_batches(data.train, last_rank, recipe.train_transform, 0).trial(0, 1)[:1]:
                loss_of(recipe.loss, model, batch).sum.backward()  # type: ignore[no-untyped-call]
            model.eval()  # what a model computes then may be something else
            for validation in data.validation.values():
                sanity_check(EvalLoop(recipe, model, nullcontext, alone), validation, size)
            if env.is_leader and recipe.on_eval_end is not None and data.validation:
                with torch.no_grad():
                    recipe.on_eval_end(model, position)
        except Exception as error:
            cause = error.__cause__ or error
            place = user_location(cause)
            failure = (
                ""
                if oom_text(error)
                else f"{described(cause).removesuffix('.')}{f' at {place}' if place else ''}"
            )
            frames.release(error)
            return failure
        finally:
            model.train()
            model.zero_grad(set_to_none=True)
            free_memory(env.device)
    return ""
