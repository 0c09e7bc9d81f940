"""The memory format of images and convolutions: train.channels_last, which not every model bears.

In channels_last the output of a convolution is not contiguous, so that a `.view(n, -1)` after it raises.
Under `auto` a model is therefore tried on a few samples before the run trains. Owns on which devices the
format is the default.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace

import torch
from torch import nn

from launcher.config.schema import Config
from launcher.data.batch_plan import BatchPlan
from launcher.data.sources import DataSets, training_batches
from launcher.distributed.collectives import all_gather_str
from launcher.distributed.env import WorkerEnv
from launcher.errors import described
from launcher.evaluation.evaluate import unchanged
from launcher.os import frames
from launcher.os.oom import oom_text
from launcher.recipe.contract import Recipe, loss_of
from launcher.trainer.device import free_memory

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
    decide: Callable[[str, str], None],
    in_user_code: Callable[[], AbstractContextManager[None]],
) -> None:
    """Bring the model on its device into the format that the config asks for. A collective.

    The context `in_user_code` is that of the heartbeat: the exchange between the ranks is outside it.

    Under `auto` a model that raises in channels_last trains contiguous; what else is wrong with it, its first
    step says.
    """
    channels_last = config.train.channels_last
    if channels_last is False or not any(parameter.ndim == 4 for parameter in model.parameters()):
        return
    if channels_last == "auto" and env.device.type not in FASTER_ON:
        return decide(TOPIC, f"contiguous: channels_last is not faster on the device {env.device.type}")
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    if channels_last == "auto":
        with in_user_code():
            failure = _failure(env, recipe, model, data, plan)
        if failure := next(filter(None, all_gather_str(env, failure)), ""):
            model.to(memory_format=torch.contiguous_format)  # type: ignore[call-overload]
            return decide(
                TOPIC, f"contiguous: in channels_last, which is faster, the recipe raises {failure}"
            )
    return decide(TOPIC, "channels_last")


def _failure(env: WorkerEnv, recipe: Recipe, model: nn.Module, data: DataSets, plan: BatchPlan) -> str:
    """What a training pass in fp32 raises, on the same few samples on all ranks; empty for nothing.

    Empty also where memory runs out, which is not the format's fault.
    """
    size = min(plan.largest_micro_batch, MOST_SAMPLES)
    last_rank = replace(plan, micro_batch=size, rank=plan.world_size - 1)  # whose share is the largest
    failure = ""
    with unchanged(model):
        model.train()
        try:
            for batch in training_batches(data.train, last_rank, recipe.train_transform, 0).trial(0, 1)[:1]:
                loss_of(recipe.loss, model, batch).sum.backward()  # type: ignore[no-untyped-call]
        except Exception as error:
            failure = "" if oom_text(error) else described(error.__cause__ or error).removesuffix(".")
            frames.release(error)
        finally:
            model.zero_grad(set_to_none=True)
            free_memory(env.device)
    return failure
