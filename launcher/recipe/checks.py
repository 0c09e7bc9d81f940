"""Refuses a recipe that cannot be trained, before a model is built.

Each error names the value, the rule and what to change. What has to be read is checked where it is read.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from launcher.config.messages import nearest, suggestion
from launcher.data.labels import IGNORED, no_class
from launcher.data.sources import ONLY_SET, length_of, set_title
from launcher.data.tensors import TensorData
from launcher.errors import ConfigError, DataError
from launcher.metrics import LossMetric, Metric
from launcher.metrics.metric import RESERVED, declared_names, name_of
from launcher.recipe.contract import Recipe

MONITOR = "the recipe's monitor"


def refuse_unusable_metrics(recipe: Recipe) -> None:
    """Raise ConfigError for what is no metric, a name given twice, and a `monitor` that no metric gives.

    The names are those that the metrics declare; what they do not declare is checked at the first evaluation.
    """
    declared: dict[str, str] = {}
    for metric in recipe.metrics_or_default:
        if not isinstance(metric, Metric | LossMetric) or isinstance(metric, type):
            given = f"the class {metric.__name__}" if isinstance(metric, type) else repr(metric)
            raise ConfigError(
                f"Recipe.metrics has {given}, which is not a metric. A metric is an object with "
                "update(outputs, batch) and compute() -> {name: value}."
            )
        for name in declared_names(metric) or ():
            refuse_taken_name(name, name_of(metric), declared)
            declared[name] = name_of(metric)
    if all(declared_names(metric) is not None for metric in recipe.metrics_or_default):
        refuse_unknown_metric(MONITOR, recipe.monitor, declared, recipe.validation_sets)


def refuse_taken_name(name: str, metric: str, taken: Mapping[str, str]) -> None:
    """Raise ConfigError for a metric's name that is `taken` (metric by name) or reserved."""
    if name in RESERVED:
        raise ConfigError(
            f"the metric {metric} gives the name {name!r}, which every evaluation has already. Rename it."
        )
    if name in taken:
        raise ConfigError(
            f"the metrics {taken[name]} and {metric} both give the name {name!r}. Give one of them another "
            'name, for instance Classification(..., prefix="...").'
        )


def refuse_unknown_metric(key: str, monitor: str | None, metrics: Iterable[str], sets: Iterable[str]) -> None:
    """Raise ConfigError unless `monitor` is the loss or one of the metrics; of a named set as SET/METRIC."""
    known = ["val_loss", *metrics]
    known += [f"{name}/{each}" for name in sets if name != ONLY_SET for each in known]
    if monitor is None or monitor in known:
        return
    close = [name for name in known if name.endswith(f"_{monitor}")]  # f1 for macro_f1
    raise ConfigError(
        f"{key}={monitor}: the evaluations of this recipe have no such metric."
        f"{suggestion(close or nearest(str(monitor), known))} They have {', '.join(known)}."
    )


def checked(recipe: Recipe, may_lack: bool) -> Recipe:
    """The recipe. Raises ConfigError or DataError for one that cannot be trained.

    One that `may_lack` validation loses its empty sets, of which nothing was held out on purpose.
    """
    if may_lack:
        sets = {name: each for name, each in recipe.validation_sets.items() if length_of(each) != 0}
        recipe = recipe if ONLY_SET in sets else replace(recipe, validation=sets)
    refuse_unusable_metrics(recipe)
    refuse_unusable_data(recipe, may_lack)
    return recipe


def refuse_unusable_data(recipe: Recipe, may_lack: bool = False) -> None:
    """Raise DataError for an empty or nameless validation set, and for labels without a class.

    A recipe that `may_lack` validation may have none.
    """
    sets = recipe.validation_sets
    if not sets and not may_lack:
        raise DataError("Recipe.validation has no set: give it at least one, by name, or a single one alone.")
    for name, data in sets.items():
        if not isinstance(name, str) or "/" in name or (name == ONLY_SET and data is not recipe.validation):
            raise DataError(
                f"{name!r} in Recipe.validation is not a valid name: it must be a non-empty string "
                "without '/'."
            )
        if length_of(data) == 0:
            raise DataError(
                f"the {set_title(name)} set of the recipe is empty: an evaluation needs at least one sample. "
                "Give it some, for instance a part of the training set."
            )
    if recipe.classes is None:
        return
    for kind, data in (*((set_title(name), data) for name, data in sets.items()), ("training", recipe.train)):
        if not isinstance(data, TensorData):
            continue  # it would have to be read
        labels = data.columns.get(recipe.label_column)
        if labels is None or labels.ndim != 1 or labels.is_floating_point() or not len(labels):
            continue  # what reads them says what it needs
        lowest, highest = map(int, labels.long().aminmax())  # torch has none of uint16 and uint32
        ignored = lowest == IGNORED and (kind == "training" or any(map(_ignores, recipe.metrics_or_default)))
        if highest >= len(recipe.classes) or (lowest < 0 and not ignored):
            wrong = (labels.long() >= len(recipe.classes)) | (labels.long() < 0)
            if ignored:
                wrong &= labels != IGNORED
            first = int(wrong.nonzero()[0])
            label = int(labels[first])
            found = f"the {kind} column {recipe.label_column} of sample {first} is {label}"
            raise no_class(found, label, len(recipe.classes))


def _ignores(metric: object) -> bool:
    """Whether a metric, of the launcher or of torchmetrics, leaves out what the loss does."""
    return bool(getattr(metric, "ignore_index", None) == IGNORED)
