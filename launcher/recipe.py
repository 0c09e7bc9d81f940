"""What a recipe is, and how recipes and models are found by name.

Owns the contract between a training task and the program (`Recipe`, `Loss`), the two decorators, and the
loading of recipe files: those of the project and the user's own. Never builds a model or uses a device
itself: it returns functions that do.
"""

from __future__ import annotations

import difflib
import functools
import hashlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from torch import Tensor, nn
from torch.nn import functional as F

from launcher.config.groups import recipes_dir
from launcher.config.messages import nearest, suggestion
from launcher.config.rules import SCHEDULES
from launcher.config.schema import Config
from launcher.data.reader import Collate, Indexed, columns
from launcher.data.sources import refuse_no_length
from launcher.data.tensors import Batch, TensorData
from launcher.engine import ParameterGroup
from launcher.errors import ConfigError, DataError, LauncherError
from launcher.metrics import Classification, LossMetric, Metric, Perplexity, Regression
from launcher.metrics.metric import RESERVED, declared_names, name_of

__all__ = [
    "Batch",
    "Classification",
    "Config",
    "ConfigError",
    "DataError",
    "Loss",
    "LossMetric",
    "Metric",
    "ParameterGroup",
    "Perplexity",
    "Recipe",
    "Regression",
    "TensorData",
    "columns",
    "cross_entropy",
    "load_recipe",
    "model",
    "model_builder",
    "recipe",
    "schedule",
]

Function = TypeVar("Function", bound=Callable[..., Any])
Schedule = Callable[[int, int], float]  # (applied step from 0, their total) -> factor on optim.lr
Source = (
    TensorData | Indexed | Iterable[Any]
)  # columns in memory, or a map-style data set of torch or Hugging Face
# (model, position) -> texts, numbers and pictures by name, for the console, metrics.jsonl and the tracker.
# Called on rank 0 alone: it must not communicate, and only read the model, which is in evaluation mode.
# `position.epoch` counts from 0, `position.step` from 1.
AfterEvaluation = Callable[[nn.Module, Any], Mapping[str, Any]]
ONLY_SET = ""  # the name of a validation set that is the only one
IGNORED = -100  # the label that torch's cross-entropy leaves out
REGISTERED = "launcher_registered"  # the attribute that a decorator sets on a function


@dataclass(frozen=True)
class Loss:
    """The result of a forward pass on one micro-batch. The loss of a step is the sum over all `count`."""

    sum: Tensor  # fp32, 0-dim: over the samples (or tokens) of the micro-batch, not their mean
    count: int | Tensor  # how many samples (or tokens) carry loss; 0-dim if a tensor
    # What metrics read, in evaluations only: logits [n, classes], predicted classes int64 [n], or any tensor
    # [n, ...] or mapping of tensors.
    outputs: Tensor | Mapping[str, Tensor] | None = None


def loss_of(loss: Callable[[nn.Module, Batch], Loss], network: nn.Module, batch: Batch) -> Loss:
    """The result of a recipe's loss. Raises ConfigError if it is not a Loss."""
    found = loss(network, batch)
    if isinstance(found, Loss) and isinstance(found.sum, Tensor):
        return found
    given = f"Loss({type(found.sum).__name__}, ...)" if isinstance(found, Loss) else type(found).__name__
    raise ConfigError(
        f"the recipe's loss returned a {given}. Return Loss(sum, count, outputs): the sum of the losses as a "
        "tensor (not .item()), the number of samples, and what metrics read, such as the logits."
    )


@dataclass(frozen=True)
class Recipe:
    """A training task: the data, the model, the loss, and what is measured.

    `loss(network, batch)` is called within the precision context, on each micro-batch and in evaluations.
    Transforms take and return a batch on the device; `noise` [n, 4] in [0, 1) is the same for a sample and
    epoch whatever the number of ranks.
    """

    build_model: Callable[[], nn.Module]
    train: Source
    validation: Source | Mapping[str, Source]  # of several sets by name the first is the one compared by
    loss: Callable[[nn.Module, Batch], Loss]  # calls the model; logits become fp32 before the loss
    train_transform: Callable[[Batch, Tensor], Batch] | None = None  # (batch, noise fp32 [n, 4]) -> batch
    eval_transform: Callable[[Batch], Batch] | None = None
    classes: tuple[str, ...] | None = None  # None: the labels of the data are no classes
    label: str = "label"  # the column with the true class
    metrics: Sequence[Metric | LossMetric] | None = None  # None: Classification where there are classes
    compare_by: str | None = None  # loss, a metric, or SET/METRIC; None: accuracy if measured, else the loss
    collate: Collate | None = None  # samples of a data set -> named tensors; None: torch's default_collate
    lengths: Sequence[int] | Tensor | None = None  # of the training samples: those alike share batches
    after_evaluation: AfterEvaluation | None = None  # what to show of the model; see the type
    groups: Sequence[ParameterGroup] = ()  # rates of parameters by name; those of optim.groups come first
    schedule: Schedule | None = None  # replaces schedule.name of the config, and its warmup_fraction

    @property
    def measures(self) -> tuple[Metric | LossMetric, ...]:
        """The metrics of its evaluations."""
        if self.metrics is not None:
            return tuple(self.metrics)
        return () if self.classes is None else (Classification(self.classes, self.label),)

    @property
    def validation_sets(self) -> dict[str, Source]:
        """The sets to evaluate on, by name; a single one has the name ""."""
        sets = self.validation
        return dict(sets) if isinstance(sets, Mapping) else {ONLY_SET: sets}


@dataclass(frozen=True)
class ModelBuilder:
    """Builds a new model, registered under `name`, on each call."""

    name: str
    build: Callable[[], nn.Module]

    def __call__(self) -> nn.Module:
        return self.build()


@dataclass(frozen=True)
class Used:
    """The model and data that a recipe really uses, which the config's `model` and `data` may not name.

    Names in the registries; for a recipe's own, the class of the model and the name of the recipe.
    """

    model: str
    data: str

    @classmethod
    def of(cls, config: Config, recipe: Recipe, network: nn.Module) -> Used:
        builder = inspect.unwrap(recipe.build_model)
        model = builder.name if isinstance(builder, ModelBuilder) else type(network).__name__
        return cls(model, getattr(recipe.train, "name", None) or config.recipe.uses)


@dataclass(frozen=True)
class Registry:
    """The functions that recipe files offer, by name."""

    recipes: Mapping[str, Callable[[Config], Recipe]]
    models: Mapping[str, Callable[..., nn.Module]]
    schedules: Mapping[str, Schedule]


def recipe(name: str) -> Callable[[Function], Function]:
    """Offers `f(config: Config) -> Recipe` under `name` (the config's `recipe.uses`)."""
    return _mark("recipe", name)


def model(name: str) -> Callable[[Function], Function]:
    """Offers a function that builds a model under `name` (the config's `model.name`).

    Its keyword arguments that the recipe does not give itself are the model's options in the config.
    """
    return _mark("model", name)


def schedule(name: str) -> Callable[[Function], Function]:
    """Offers a schedule of the learning rate under `name` (the config's `schedule.name`).

    `f(step: int, total: int) -> float` gives the factor on optim.lr of each applied step, 0 to total - 1: a
    finite number of at least 0, the same on all ranks. Skipped steps are not counted. The function decides on
    the whole course: schedule.warmup_fraction is not applied to it.
    """
    return _mark("schedule", name)


def cross_entropy(network: nn.Module, batch: Batch, inputs: str = "image", labels: str = "label") -> Loss:
    """Summed cross-entropy of `network(batch[inputs])` [n, classes, ...] against `batch[labels]` [n, ...].

    Counts the labels that carry loss: those of int64 that are not IGNORED (-100), or all probabilities of
    classes (floating-point, of the logits' shape).
    """
    logits = network(batch[inputs]).float()
    if logits.ndim < 2 or len(logits) != len(batch[labels]):
        raise ConfigError(
            f"the model returned the shape {list(logits.shape)} for {len(batch[labels])} samples: "
            f"cross_entropy needs [{len(batch[labels])}, classes], one value per sample and class."
        )
    loss_sum = F.cross_entropy(logits, batch[labels], reduction="sum", ignore_index=IGNORED)
    return Loss(loss_sum, _labels_with_loss(logits, batch[labels]), logits.detach())


def _labels_with_loss(logits: Tensor, labels: Tensor) -> int | Tensor:
    """How many: a tensor on the device for classes, since reading it would wait for the device."""
    if labels.is_floating_point():
        return logits.numel() // logits.shape[1]
    return (labels != IGNORED).sum()


def load_recipe(config: Config) -> Recipe:
    """The recipe that the config asks for, with its data loaded. ConfigError for an unknown name."""
    registry = registry_of(config.recipes.path)
    build = _look_up("recipe.uses", config.recipe.uses, registry.recipes)
    named = schedule_named(config.schedule.name, registry)
    built = build(config)
    if not isinstance(built, Recipe):
        raise ConfigError(
            f'the function under @recipe("{config.recipe.uses}") returned {type(built).__name__}. '
            f"It has to return a launcher.recipe.Recipe."
        )
    refuse_unusable_metrics(built)
    refuse_unusable_data(built)
    if built.schedule is not None and not callable(built.schedule):
        raise ConfigError(
            f"the recipe's schedule={built.schedule!r}: it must be a function of (step, total), or None. "
            "The name of a schedule belongs into the config: schedule.name."
        )
    if not isinstance(built.groups, list | tuple) or not all(
        isinstance(group, ParameterGroup) for group in built.groups
    ):
        raise ConfigError(
            f"Recipe.groups={built.groups!r}: it must be a list of ParameterGroup, for example "
            '[ParameterGroup("*.bias", weight_decay=0.0)].'
        )
    return built if named is None else replace(built, schedule=named)


def schedule_named(name: str, registry: Registry) -> Schedule | None:
    """The registered schedule; None for those of the launcher. ConfigError for an unknown name."""
    if name in SCHEDULES:
        return None
    return _look_up("schedule.name", name, {**dict.fromkeys(SCHEDULES), **registry.schedules})


def refuse_unusable_metrics(recipe: Recipe) -> None:
    """Raise ConfigError for an invalid metric, a name given twice, and a `compare_by` that no metric gives.

    The names are those that the metrics declare; what they do not declare is checked at the first evaluation.
    """
    declared: dict[str, str] = {}
    for metric in recipe.measures:
        if not isinstance(metric, Metric | LossMetric) or isinstance(metric, type):
            given = f"the class {metric.__name__}" if isinstance(metric, type) else repr(metric)
            raise ConfigError(
                f"Recipe.metrics has {given}, which is not a metric. A metric is an object with "
                "update(outputs, batch) and compute() -> {name: value}."
            )
        for name in declared_names(metric) or ():
            refuse_taken_name(name, name_of(metric), declared)
            declared[name] = name_of(metric)
    if all(declared_names(metric) is not None for metric in recipe.measures):
        refuse_unknown_comparison(recipe.compare_by, declared, recipe.validation_sets)


def refuse_taken_name(name: str, metric: str, taken: Mapping[str, str]) -> None:
    """Raise ConfigError for a metric's name that is `taken` (metric by name) or reserved."""
    if name in RESERVED:
        raise ConfigError(
            f"the metric {metric} gives the name {name!r}, which every evaluation has already. Give it "
            "another name."
        )
    if name in taken:
        raise ConfigError(
            f"the metrics {taken[name]} and {metric} both give the name {name!r}. Give one of them another "
            'name, for instance Classification(..., prefix="...").'
        )


def refuse_unknown_comparison(compare_by: str | None, names: Iterable[str], sets: Iterable[str]) -> None:
    """Raise ConfigError unless `compare_by` is the loss, or one of the names of the metrics, of some set."""
    known = ["loss", *names]
    known += [f"{name}/{each}" for name in sets if name != ONLY_SET for each in known]
    if compare_by is None or compare_by in known:
        return
    close = [name for name in known if name.endswith(f"_{compare_by}")]  # f1 for macro_f1
    raise ConfigError(
        f"the recipe's compare_by={compare_by!r}: its evaluations have no such metric."
        f"{suggestion(close or nearest(str(compare_by), known))} They have {', '.join(known)}."
    )


def refuse_unusable_data(recipe: Recipe) -> None:
    """Raise DataError for an empty or nameless validation set, and for labels without a class.

    Also for a __len__ that returns no number of samples.
    """
    sets = recipe.validation_sets
    if not sets:
        raise DataError("Recipe.validation has no set: give it at least one, by name, or a single one alone.")
    for name, data in sets.items():
        if not isinstance(name, str) or "/" in name or (name == ONLY_SET and data is not recipe.validation):
            raise DataError(
                f"{name!r} in Recipe.validation is not a valid name: it must be a non-empty string "
                "without '/'."
            )
        refuse_no_length(data, set_title(name))
        if isinstance(data, Sized) and len(data) == 0:
            raise DataError(
                f"the {set_title(name)} set of the recipe is empty: an evaluation needs at least one sample. "
                "Give it some, for instance a part of the training set."
            )
    refuse_no_length(recipe.train, "training")
    if recipe.classes is None:
        return
    for kind, data in (*((set_title(name), data) for name, data in sets.items()), ("training", recipe.train)):
        if not isinstance(data, TensorData):
            continue  # it would have to be read
        labels = data.columns.get(recipe.label)
        if labels is None or labels.ndim != 1 or labels.is_floating_point() or not len(labels):
            if kind == "training":
                continue  # only the loss reads these
            given = "there is none" if labels is None else f"it is {labels.dtype} {list(labels.shape)}"
            raise DataError(
                f"the recipe names classes, so its {kind} column {recipe.label} must hold one whole number "
                f"per sample; {given}. Columns: {', '.join(data.columns)}. Set Recipe.label to the right one."
            )
        lowest, highest = int(labels.min()), int(labels.max())
        ignored = kind == "training" and lowest == IGNORED
        if highest >= len(recipe.classes) or (lowest < 0 and not ignored):
            raise DataError(
                f"the {kind} column {recipe.label} goes from {lowest} to {highest}, but the recipe names "
                f"{len(recipe.classes)} classes: a label must lie between 0 and {len(recipe.classes) - 1}. "
                "Correct the labels, or name all classes in Recipe.classes."
            )


def set_title(name: str) -> str:
    """`validation`, or the same with the name of one of several sets."""
    return "validation" if name == ONLY_SET else f"validation ({name})"


def model_builder(config: Config, **facts: Any) -> ModelBuilder:
    """A function that builds the config's model from its options and the facts given by the recipe.

    Facts are what the data dictates (num_classes, ...). ConfigError for an unknown model or option.
    """
    build = _look_up("model.name", config.model.name, registry_of(config.recipes.path).models)
    options = [name for name in inspect.signature(build).parameters if name not in facts]
    for name in config.model.options:
        if name not in options:
            raise ConfigError(_unknown(f"model.{name} (an option of {config.model.name})", name, options))
    return ModelBuilder(config.model.name, functools.partial(build, **facts, **config.model.options))


def registry_of(user_path: str | None) -> Registry:
    """All recipes and models, the project's and the user's. ConfigError for a name given twice."""
    files = sorted(path for path in recipes_dir().glob("*.py") if not path.name.startswith("_"))
    if user_path is not None:
        files.append(_user_file(user_path))
    entries = [(file, *entry) for file in files for entry in _registered_in(_load(file))]
    schedules = _by_name("schedule", entries)
    if taken := sorted(schedules.keys() & set(SCHEDULES)):
        raise ConfigError(
            f'@schedule("{taken[0]}"): the launcher has a schedule of that name. Choose another.'
        )
    return Registry(_by_name("recipe", entries), _by_name("model", entries), schedules)


def _mark(kind: str, name: str) -> Callable[[Function], Function]:
    def mark(function: Function) -> Function:
        setattr(function, REGISTERED, (*getattr(function, REGISTERED, ()), (kind, name)))
        return function

    return mark


def _registered_in(module: ModuleType) -> list[tuple[str, str, Callable[..., Any]]]:
    """(kind, name, function) of what the file itself defines, not of what it imports from another."""
    functions = {id(value): value for value in vars(module).values() if callable(value)}.values()
    return [
        (kind, name, function)
        for function in functions
        if getattr(function, "__module__", None) == module.__name__
        for kind, name in getattr(function, REGISTERED, ())
    ]


def _by_name(
    wanted: str, entries: Iterable[tuple[Path, str, str, Callable[..., Any]]]
) -> dict[str, Callable[..., Any]]:
    found: dict[str, tuple[Path, Callable[..., Any]]] = {}
    for file, kind, name, function in entries:
        if kind != wanted:
            continue
        if name in found:
            first = found[name][0]
            raise ConfigError(
                f'@{kind}("{name}") is given twice: in {first} and in {file}. Rename one of them.'
            )
        found[name] = (file, function)
    return {name: function for name, (_, function) in found.items()}


def _user_file(user_path: str) -> Path:
    path = Path(user_path).expanduser()
    if not path.is_file() or path.suffix != ".py":
        kind = "is a folder" if path.is_dir() else "is not a .py file" if path.exists() else "does not exist"
        raise ConfigError(f"recipes.path={user_path} {kind}. Give the Python file that holds your @recipe.")
    return path


def _load(file: Path) -> ModuleType:
    """Runs a recipe file once per process and version of its text; errors name the file."""
    source = file.read_bytes()
    digest = hashlib.sha256(str(file.resolve()).encode() + b"\0" + source).hexdigest()[:12]
    name = f"launcher_recipe_{file.stem}_{digest}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and torch.compile look a class's module up by name
    try:
        spec.loader.exec_module(module)
    except LauncherError:
        del sys.modules[name]
        raise
    except (Exception, SystemExit) as error:  # a user's file may fail in any way
        del sys.modules[name]
        raise ConfigError(f"recipe file {file} cannot be loaded: {_where(error, file)}.") from error
    return module


def _where(error: BaseException, file: Path) -> str:
    """`line 3: NameError: ...`, the innermost line of `file` that the error passed through."""
    line = error.lineno if isinstance(error, SyntaxError) else None
    traceback = error.__traceback__
    while traceback is not None:
        if traceback.tb_frame.f_code.co_filename == str(file):
            line = traceback.tb_lineno
        traceback = traceback.tb_next
    return f"line {line}: {type(error).__name__}: {error}" if line else f"{type(error).__name__}: {error}"


Found = TypeVar("Found")


TOP_LEVEL = (
    "A function of your own is found if a name at the top level of its file refers to it: assign one that is "
    "made in a loop or a function to such a name."
)


def _look_up(key: str, name: str, known: Mapping[str, Found]) -> Found:
    if name not in known:
        raise ConfigError(f"{_unknown(f'{key}={name}', name, known)} {TOP_LEVEL}")
    return known[name]


def _unknown(what: str, name: str, known: Iterable[str]) -> str:
    choices = sorted(known)
    close = difflib.get_close_matches(name, choices, n=3, cutoff=0.5)
    advice = f"Did you mean {' or '.join(close)}? " if close else ""
    return f"{what} is not known. {advice}Known: {', '.join(choices) or 'none'}."
