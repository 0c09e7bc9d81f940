"""What a recipe shows after an evaluation: texts, numbers and pictures, made on rank 0.

Owns the call of `Recipe.on_eval_end`, the wait of the other ranks, and the files of the pictures. The
function cannot change the run: changed weights are an error, buffers are restored, and what it draws is drawn
by nothing else.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from launcher.data.seeding import derive_seed, seed_all
from launcher.distributed.collectives import from_rank0
from launcher.errors import ConfigError
from launcher.evaluation.evaluate import evaluating, unchanged
from launcher.run_dir.atomic import encodable, write_content
from launcher.run_dir.records import PICTURES
from launcher.telemetry.events import AfterEvaluationEvent
from launcher.trainer.context import TrainContext
from launcher.trainer.errors.recipe_errors import found_in_trial, guarding
from launcher.trainer.progress import StepIndex

MAX_STEM = 50  # characters, of up to 4 bytes: a file name has room for 255, with the step


def show(context: TrainContext, index: StepIndex) -> None:
    """Report what the recipe's function returns, which rank 0 calls while the others wait.

    Does nothing without one. A collective; raises on all ranks alike.
    """
    if context.recipe.on_eval_end is not None:
        call = partial(_call_and_report, context, index)
        _call_while_others_wait(context, call, "evaluation", "adding up the evaluation")


def sanity_check(context: TrainContext, step: int) -> None:
    """Call the recipe's function before the first step, which comes after `step`, for its mistakes alone.

    It gets the index of the next evaluation; nothing is reported or written. A collective, as `show`.
    """
    if context.recipe.on_eval_end is not None and context.data.validation:
        index = context.length.index_of(context.length.next_evaluation(step))
        call = partial(_call_and_report, context, index, is_trial=True)
        with found_in_trial("on_eval_end"):
            _call_while_others_wait(context, call, "trying the evaluation", "comparing the trials")


def _call_while_others_wait(
    context: TrainContext, call: Callable[[], bytes], phase: str, waiting: str
) -> None:
    """Call it on rank 0, which is in `phase` while the others are `waiting`.

    Raises its LauncherError on all ranks.
    """
    heartbeat, env = context.heartbeat, context.env

    def timed() -> bytes:
        try:
            with heartbeat.in_user_code():  # what it returned may be drawn only when it is saved
                return call()
        finally:
            heartbeat.beat(waiting)  # from here on this rank may wait for another one

    heartbeat.beat(phase if env.is_rank0 else waiting)
    from_rank0(env, timed)


def _call_and_report(context: TrainContext, index: StepIndex, is_trial: bool = False) -> bytes:
    """Call the function, sort what it returns, and report it, unless `is_trial`. Runs on rank 0."""
    found, step, epoch = _call(context, index), index.global_step, index.epoch
    with guarding("what the recipe's on_eval_end returned", context.logs_of_failure):
        texts, numbers, pictures = sorted_by_kind(found)
        if not is_trial:
            files = _written(context, pictures, step)
            context.telemetry.emit(
                AfterEvaluationEvent(step, epoch=epoch, texts=texts, numbers=numbers, pictures=files)
            )
    return b""  # from_rank0 sends bytes; only an error matters to the other ranks


def _call(context: TrainContext, index: StepIndex) -> object:
    """What the function returns. The other ranks wait for as long as it takes.

    Raises ConfigError where it has changed weights.
    """
    assert context.recipe.on_eval_end is not None
    # By the step, so that a resumed run shows the same.
    seed_all(derive_seed(context.config.seed, index.global_step, "after_evaluation"), context.env.device)
    with (
        evaluating(context.model),
        unchanged(context.model),
        torch.no_grad(),
        context.stepper.forward(),
    ):
        before = _versions(context.model)
        found = context.recipe.on_eval_end(context.model, index)
        if _versions(context.model) != before:
            raise ConfigError(
                "the recipe's on_eval_end has changed weights of the model, on rank 0 alone. It may only "
                "read them: work on a copy.deepcopy of the model."
            )
    return found


def _versions(model: nn.Module) -> list[tuple[int, int]]:
    """Which weights the model has, and torch's counts of their in-place changes (not of those to `.data`)."""
    return [(id(parameter), parameter._version) for parameter in model.parameters()]


def _written(context: TrainContext, pictures: Mapping[str, bytes], step: int) -> dict[str, str]:
    """The paths of the pictures' files. One that cannot be written is a warning."""
    folder = Path(context.config.run.dir) / PICTURES
    found: dict[str, str] = {}
    for name, content in pictures.items():
        stem = re.sub(r"[^\w-]+", "_", encodable(name))[:MAX_STEM]
        path = folder / f"{stem}-{step:08d}.png"
        if str(path) in found.values():  # names that differ only in what a file name cannot have
            path = folder / f"{stem}-{len(found)}-{step:08d}.png"
        try:
            folder.mkdir(exist_ok=True)
            write_content(path, content)
            found[name] = str(path)
        except OSError as error:
            context.telemetry.warn(f"the picture {name} cannot be written to {path}: {error}")
    return found


def sorted_by_kind(found: object) -> tuple[dict[str, str], dict[str, float], dict[str, bytes]]:
    """Texts, numbers, and pictures as PNG. Raises ConfigError for anything else."""
    if not isinstance(found, Mapping):
        raise ConfigError(
            f"the recipe's on_eval_end returned {type(found).__name__}. It has to return a mapping from "
            "name to text, number or picture."
        )
    texts: dict[str, str] = {}
    numbers: dict[str, float] = {}
    pictures: dict[str, bytes] = {}
    for key, value in found.items():
        name = str(key)
        if isinstance(value, str):
            texts[name] = value
        elif isinstance(value, int | float | np.number) or (isinstance(value, Tensor) and value.ndim == 0):
            numbers[name] = float(value)
        else:
            pictures[name] = _png(name, value)
    return texts, numbers, pictures


def _png(name: str, value: Any) -> bytes:
    """A picture of PIL, a figure of matplotlib, or uint8 [height, width] or [height, width, 3]."""
    content = io.BytesIO()
    if isinstance(value, Tensor):
        value = value.cpu().numpy()
    if isinstance(value, np.ndarray) and value.dtype == np.uint8 and value.ndim in (2, 3):
        from PIL import Image

        value = Image.fromarray(value)
    save = getattr(value, "savefig", None) or getattr(value, "save", None)
    if save is None:
        raise ConfigError(
            f"the recipe's on_eval_end gave {type(value).__name__} as {name!r}. It may give texts, numbers "
            "and pictures: of PIL, figures of matplotlib, or uint8 [height, width, 3]."
        )
    save(content, format="png")
    return content.getvalue()
