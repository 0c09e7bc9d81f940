"""Turns exceptions of a recipe's code into one message: what failed, in which line, and the broken rule.

Owns the guard around the functions that a recipe hands out, and the search for the user's line in a
traceback. What a user can act on already, a lack of memory and the loss of another rank pass unchanged.
"""

from __future__ import annotations

import functools
import linecache
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from types import CodeType
from typing import Any, TypeVar

from torch import Tensor, nn

from launcher.config.messages import install_line
from launcher.config.user_code import defined_at, innermost, is_user_code, short_traceback, user_location
from launcher.data import labels, loader
from launcher.distributed.alone import HiddenProcessGroup
from launcher.distributed.exit_records import is_secondary
from launcher.engine import EngineWarning, UnusableError
from launcher.errors import ConfigError, DataError, LauncherError, RecipeError, described, listed, whole_text
from launcher.os.oom import TO_LOWER, to_resource_error
from launcher.recipe.checks import refuse_other_arguments
from launcher.recipe.contract import Recipe
from launcher.trainer.errors.model_mistakes import SHAPES, failing_module_inputs

Result = TypeVar("Result")
IN_LOG = "The full traceback is in"
TARGET = re.compile(r"Target (-?\d+) is out of bounds")
BATCH_NORM = "Expected more than 1 value per channel when training"
SHOWN_ROWS = 8
OF_A_RUN = frozenset({"log", "log_artifact", "summary", "config", "define_metric"})  # of wandb.run
CALLED_WITH = {  # what the launcher gives to the functions of a recipe, in order
    "build_model": "()",
    "loss": "(network, batch)",
    "train_transform": "(batch)",
    "eval_transform": "(batch)",
    "on_eval_end": "(model, position)",
}


def wrap_recipe(recipe: Recipe, logs: str) -> Recipe:
    """The recipe with its functions guarded: an exception in one is a RecipeError or DataError.

    All but the loss, which all ranks call equally often in training, run as if the process were alone.
    Warns once of a loss that changes the mode of the network.

    `logs` is the end of a sentence: the file that the full traceback will be in.
    """
    built_at = defined_at(recipe.build_model)
    found: dict[str, Any] = {}
    for name in (*CALLED_WITH, "schedule"):
        if (function := getattr(recipe, name)) is not None:
            if name in CALLED_WITH:
                refuse_other_arguments(f"the recipe's {name}", function, CALLED_WITH[name])
            found[name] = _guarded(name, function, logs, built_at if name == "loss" else "")
    return replace(recipe, **found | {"loss": _keeping_mode(found["loss"])})


@contextmanager
def guarding(
    what: str, logs: str, batch: Mapping[str, object] | None = None, of_metric: bool = False
) -> Iterator[None]:
    """Raise the `recipe_failure` of an exception in the context."""
    try:
        yield
    except (Exception, SystemExit) as error:
        failure = recipe_failure(error, what, logs, batch, of_metric)
        if failure is None:
            raise
        raise failure from error


@contextmanager
def found_in_trial(what: str) -> Iterator[None]:
    """Say in an error that a trial before the first step found it, and not a step of the run."""
    try:
        yield
    except LauncherError as error:
        error.args = (f"{error.args[0]} Found before the first step, in a trial of {what}.",)
        raise


def recipe_failure(
    error: BaseException,
    what: str,
    logs: str,
    batch: Mapping[str, object] | None = None,
    of_metric: bool = False,
    built_at: str = "",
) -> LauncherError | None:
    """The error for an exception that `what` of a recipe raised; None for one that passes unchanged.

    Shapes that do not fit are a ConfigError with the module and what it was given: no restart helps.
    `built_at` is where the model is defined, for an error without a line of the user's.

    Of a metric it is no RecipeError but a ConfigError: after a restart the same samples raise it again. It
    names the line of a library where the metric is one's.
    """
    place = user_location(error) or (innermost(error) if of_metric else "")
    where = f" at {place}" if place else ""
    if isinstance(error, SystemExit):
        return RecipeError(
            f"{what} called sys.exit({'' if error.code is None else repr(error.code)}){where}. Only the "
            f"launcher ends a run: raise an exception instead. {IN_LOG} {logs}."
        )
    if not isinstance(error, Exception) or isinstance(error, LauncherError | UnusableError):
        return None
    advice = TO_LOWER if batch is not None else "Hold fewer or smaller samples, or choose a smaller model."
    if (shortage := to_resource_error(error, what, where, advice)) is not None:
        return shortage
    if is_secondary(error) or loader.is_of_loader_process(error):
        return None
    of_data, of_setup = _rule_of_data(error, batch or {}), _rule_of_setup(error)
    is_shape = (
        not of_data and isinstance(error, RuntimeError | ValueError) and SHAPES.search(whole_text(error))
    )
    if is_shape and (given := failing_module_inputs(error)):
        where += f"{'' if place or not built_at else f' with the model of {built_at}'}: {given}"
    kind = DataError if of_data else ConfigError if of_setup or is_shape or of_metric else RecipeError
    rule = of_data or of_setup
    failure = kind(
        f"{what} failed{where}: {described(error).removesuffix('.')}.{' ' if rule else ''}{rule} "
        f"{IN_LOG} {logs}."
    )
    if not rule and not is_shape:
        failure.traceback = short_traceback(error)
    return failure


def _guarded(name: str, function: Callable[..., Result], logs: str, built_at: str) -> Callable[..., Result]:
    what = f"the recipe's {name}{_defined(function)}"

    @functools.wraps(function, updated=())
    def call(*arguments: object) -> Result:
        try:  # not `guarding`, whose context takes as long as a small operation
            if name == "loss":
                return function(*arguments)
            with HiddenProcessGroup(what):
                return function(*arguments)
        except (Exception, SystemExit) as error:
            batch = next((each for each in arguments if isinstance(each, dict)), None)
            failure = recipe_failure(error, what, logs, batch, built_at=built_at)
            if failure is None:
                raise
            raise failure from error

    return call


def _keeping_mode(loss: Callable[..., Result]) -> Callable[..., Result]:
    """The loss, with a warning, once, if it leaves the network in another mode.

    A part of the network may be switched on purpose, such as a batch norm with frozen statistics.
    """
    warned = False

    @functools.wraps(loss, updated=())
    def call(network: nn.Module, *more: object) -> Result:
        nonlocal warned
        training = network.training
        found = loss(network, *more)
        if network.training != training and not warned:
            warned = True
            now, doing = ("evaluation", "trained") if training else ("training", "evaluated")
            warnings.warn(
                f"the recipe's loss switched the network to {now} mode while it is {doing}, which changes "
                "what batch norms and dropout do. Remove network.eval() and network.train() from it: the "
                "launcher sets the mode itself.",
                EngineWarning,
                stacklevel=2,
            )
        return found

    return call


def _defined(function: Callable[..., object]) -> str:
    """The function's name if it is not the user's code, so that no line of a traceback shows it."""
    code = getattr(function, "__code__", None)
    if isinstance(code, CodeType) and is_user_code(code):
        return ""
    return f" ({getattr(function, '__qualname__', type(function).__name__)})"


def _rule_of_data(error: Exception, batch: Mapping[str, object]) -> str:
    """The rule that the data breaks, if the data is at fault; else empty."""
    if isinstance(error, KeyError) and batch and _is_a_name(error.args[0]) and error.args[0] not in batch:
        return (
            f"A batch has the columns {', '.join(batch)}. Read one of these, or add the missing one to the "
            "recipe's TensorData."
        )
    if isinstance(error, IndexError) and (found := TARGET.search(whole_text(error))):
        rule = "A label must be at least 0 and less than the number of the model's outputs."
        rule = f"{_rows_with(label := int(found[1]), batch)}{rule}"
        if label == labels.VOID:
            return f"{rule} If 255 marks what is to be left out, give the loss ignore_index=255."
        if label == labels.UNLABELLED:
            return f"{rule} {labels.OF_UNLABELLED}"
        more = f"at least {label + 1} outputs" if label >= 0 else "no negative label"
        return f"{rule} Give it {more}, or correct the labels."
    if isinstance(error, ValueError) and BATCH_NORM in whole_text(error):
        return (
            "A batch norm divides by the variance of a channel, and a single value per channel has none. "
            "Give each rank at least two samples per forward pass: raise data.batch_size or "
            "data.micro_batch_size, set data.drop_last=true if it is the rest of an epoch, or use "
            "nn.LayerNorm."
        )
    return ""


def _rule_of_setup(error: Exception) -> str:
    """What to change about environment, config or model, if one of them is at fault; else empty."""
    if isinstance(error, ModuleNotFoundError) and error.name:
        return (
            f"The package that has {error.name} must be installed in the environment of {sys.executable}: "
            f"{install_line('PACKAGE')}."
        )
    if _is_of_wandb(error):
        return (
            "The launcher owns the run of the tracker: return {name: value} from on_eval_end or a "
            "metric, and every tracker gets it, with the step."
        )
    if type(error).__module__.startswith(("torch._dynamo", "torch._inductor")):
        return "It is torch's compiler that failed: set train.compile=false."
    if "view size is not compatible" in whole_text(error):
        return (
            "Use .flatten() or .reshape() in place of .view(). If it is what a convolution returned, "
            "train.channels_last=false makes it contiguous."
        )
    return ""


def _rows_with(label: int, batch: Mapping[str, object]) -> str:
    """Which samples of a batch have this label, as a sentence; "" where no column of integers has it."""
    for name, column in batch.items():
        if isinstance(column, Tensor) and not column.is_floating_point() and column.ndim:
            rows = (column == label).reshape(len(column), -1).any(1).nonzero().flatten().tolist()
            if rows:
                which = f"sample{'s' if len(rows) > 1 else ''} {listed(rows, SHOWN_ROWS)}"
                return f"The column {name} has {label} in {which} of this micro-batch, counted from 0. "
    return ""


def _is_of_wandb(error: Exception) -> bool:
    """Whether wandb raised it, or wandb.run was used in a process that has no run of the tracker."""
    if isinstance(error, AttributeError) and error.obj is None and error.name in OF_A_RUN:
        return any("wandb" in line for line in linecache.getlines(user_location(error).partition(":")[0]))
    return type(error).__module__.partition(".")[0] == "wandb"


def _is_a_name(key: object) -> bool:
    """Whether a KeyError is about a key such as that of a column, and not a sentence that someone raised."""
    return isinstance(key, str) and key.isidentifier()
