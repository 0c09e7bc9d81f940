"""Turns exceptions of a recipe's code into one message: what failed, and in which line.

Owns the guard around the functions that a recipe hands out. What a user can act on already, a lack of memory
and the loss of another rank pass unchanged.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any, TypeVar

from launcher.data import loader
from launcher.data.labels import VOID
from launcher.distributed.alone import hidden_process_group
from launcher.distributed.exit_records import is_secondary
from launcher.engine import UnusableError
from launcher.errors import ConfigError, DataError, LauncherError, RecipeError, described, whole_text
from launcher.os.oom import TO_LOWER, to_resource_error
from launcher.recipe.contract import Recipe
from launcher.trainer.errors.model_mistakes import SHAPES, failing_module_inputs
from launcher.user_code import short_traceback, user_location

Result = TypeVar("Result")
IN_LOG = "The full traceback is in"
TARGET = re.compile(r"Target (-?\d+) is out of bounds")  # of torch's losses
VIEW = "view size is not compatible"  # torch's own text ends with: Use .reshape(...) instead.
BATCH_NORM = "Expected more than 1 value per channel when training"
GUARDED = ("build_model", "loss", "train_transform", "eval_transform", "on_eval_end", "schedule")


def wrap_recipe(recipe: Recipe, logs: str) -> Recipe:
    """The recipe with its functions guarded: an exception in one is a RecipeError or DataError.

    All but the loss, which all ranks call equally often in training, run as if the process were alone.

    `logs` is the end of a sentence: the file that the full traceback will be in.
    """
    guarded: dict[str, Any] = {}
    for name in GUARDED:
        if (function := getattr(recipe, name)) is not None:
            guarded[name] = _guarded(name, function, logs)
    return replace(recipe, **guarded)


@contextmanager
def guarding(what: str, logs: str, batch: Mapping[str, object] | None = None) -> Iterator[None]:
    """Raise the `recipe_failure` of an exception in the context."""
    try:
        yield
    except (Exception, SystemExit) as error:
        failure = recipe_failure(error, what, logs, batch)
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
    error: BaseException, what: str, logs: str, batch: Mapping[str, object] | None = None
) -> LauncherError | None:
    """The error for an exception that `what` of a recipe raised; None for one that passes unchanged.

    Shapes that do not fit are a ConfigError with the module and what it was given, what the `batch` is at
    fault for is a DataError with the rule.
    """
    place = user_location(error)
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
    text = f"{what} failed{where}"
    said = described(error).removesuffix(".")
    if batch and (rule := _rule_of_data(error, batch)):  # first: SHAPES matches what a batch norm raises
        return DataError(f"{text}: {said}. {rule} {IN_LOG} {logs}.")
    if isinstance(error, RuntimeError | ValueError) and SHAPES.search(whole_text(error)):
        given = failing_module_inputs(error)
        return ConfigError(f"{text}{f': {given}' if given else ''}: {said}. {IN_LOG} {logs}.")
    if VIEW in said:
        advice = "If it is a feature map in channels_last: train.channels_last=false"
        return ConfigError(f"{text}: {said}. {advice}. {IN_LOG} {logs}.")
    failure = RecipeError(f"{text}: {said}. {IN_LOG} {logs}.")
    failure.traceback = short_traceback(error)
    return failure


def _rule_of_data(error: Exception, batch: Mapping[str, object]) -> str:
    """The rule that the batch breaks, and what to change; empty where it is not at fault."""
    if isinstance(error, KeyError):
        key = error.args[0] if error.args else None
        return f"A batch has the columns {', '.join(batch)}." if _is_column(key) and key not in batch else ""
    if isinstance(error, IndexError) and (found := TARGET.search(whole_text(error))):
        rule = "A label must be at least 0 and less than the number of the model's outputs."
        marks = f" If {VOID} marks what is to be left out, give the loss ignore_index={VOID}."
        return rule + marks if int(found[1]) == VOID else rule
    if isinstance(error, ValueError) and BATCH_NORM in whole_text(error):
        return (
            "A batch norm needs at least two samples per forward pass: set data.drop_last=true if it is the "
            "rest of an epoch, else raise data.micro_batch_size or data.batch_size."
        )
    return ""


def _is_column(key: object) -> bool:
    """Whether a KeyError is about a key such as that of a column, and not a sentence that someone raised."""
    return isinstance(key, str) and key.isidentifier()


def _guarded(name: str, function: Callable[..., Result], logs: str) -> Callable[..., Result]:
    what = f"the recipe's {name}"

    @functools.wraps(function, updated=())
    def call(*arguments: object) -> Result:
        batch = next((each for each in arguments if isinstance(each, dict)), None)
        # The loss may communicate: all ranks call it equally often.
        alone = nullcontext() if name == "loss" else hidden_process_group(what)
        with guarding(what, logs, batch), alone:
            return function(*arguments)

    return call
