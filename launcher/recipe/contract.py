"""What a recipe is: the contract between a training task and the program.

Owns `Recipe`, the `Loss` of its forward pass, and the facts that others read from them. Never finds, checks
or builds one.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from launcher.config.schema import Config
from launcher.data.labels import IGNORED
from launcher.data.reader import Collate, Indexed
from launcher.data.sources import ONLY_SET
from launcher.data.tensors import Batch, TensorData
from launcher.engine import ParameterGroup
from launcher.errors import ConfigError, counted
from launcher.metrics import Classification, LossMetric, Metric
from launcher.metrics.metric import shape_text

Schedule = Callable[[int, int], float]  # (applied step from 0, their total) -> factor on optim.lr
# Columns in memory, a map-style data set of torch or Hugging Face, or a stream.
Source = TensorData | Indexed | Iterable[Any]
# (model, index) -> texts, numbers and pictures by name, for the console, metrics.jsonl and the tracker.
# Called on rank 0 alone: it must not communicate, and only read the model, which is in evaluation mode.
# `index.epoch` counts from 0, `index.global_step` from 1.
AfterEvaluation = Callable[[nn.Module, Any], Mapping[str, Any]]


@dataclass(frozen=True)
class Loss:
    """The result of a forward pass on one micro-batch. The loss of a step is the sum over all `count`."""

    sum: Tensor  # fp32, 0-dim: over the samples (or tokens) of the micro-batch, not their mean
    count: float | Tensor  # how many samples (or tokens) carry loss, or their weights' sum; 0-dim if a tensor
    # What metrics read, in evaluations only: logits [n, classes], predicted classes int64 [n], or any tensor
    # [n, ...] or mapping of tensors.
    outputs: Tensor | Mapping[str, Tensor] | None = None


LossFunction = Callable[[nn.Module, Batch], Loss]


def loss_of(loss: LossFunction, network: nn.Module, batch: Batch) -> Loss:
    """The result of a recipe's loss. Raises ConfigError unless it is a Loss whose sum is one fp32 number."""
    found: object = loss(network, batch)
    if not isinstance(found, Loss):
        given = type(found).__name__
    elif not isinstance(found.sum, Tensor):
        given = f"Loss({type(found.sum).__name__}, ...)"
    elif found.sum.ndim or found.sum.dtype != torch.float32:
        given = f"Loss({shape_text(found.sum)}, ...)"
    else:
        return found
    raise ConfigError(
        f"the recipe's loss returned a {given}. Return Loss(sum, count, outputs): the sum of the losses as "
        "one number in float32, a tensor, computed from network(x).float(); the number of samples; and what "
        "metrics read, such as the logits."
    )


def with_label_smoothing(loss: LossFunction, smoothing: float) -> LossFunction:
    """The loss with `label_smoothing=smoothing` in training, and without it in evaluations."""
    if not smoothing:
        return loss

    @functools.wraps(loss)
    def smoothed(network: nn.Module, batch: Batch) -> Loss:
        options = {"label_smoothing": smoothing} if network.training else {}
        return loss(network, batch, **options)

    return smoothed


@dataclass(frozen=True)
class Recipe:
    """A training task: the data, the model, the loss, and what is measured.

    `loss(network, batch)` is called within the precision context, on each micro-batch and in evaluations.
    Transforms take and return a batch on the device. The generators of Python, NumPy and torch, the device's
    too, are seeded before each micro-batch: what a transform draws is the same after a resume.
    """

    build_model: Callable[[], nn.Module]
    train: Source
    validation: Source | Mapping[str, Source]  # of several sets by name the first is the one compared by
    loss: LossFunction  # calls the model; logits become fp32 before the loss
    train_transform: Callable[[Batch], Batch] | None = None
    eval_transform: Callable[[Batch], Batch] | None = None
    classes: tuple[str, ...] | None = None  # None: the labels of the data are no classes
    label_column: str = "label"  # the column with the true class
    metrics: Sequence[Metric | LossMetric] | None = None  # None: Classification where there are classes
    monitor: str | None = None  # val_loss, a metric, or SET/METRIC; None: accuracy if measured, else val_loss
    collate: Collate | None = None  # samples of a data set -> named tensors; None: torch's default_collate
    lengths: Sequence[int] | Tensor | None = None  # of the training samples: those alike share batches
    on_eval_end: AfterEvaluation | None = None  # what to show of the model; see the type
    groups: Sequence[ParameterGroup] = ()  # rates of parameters by name; those of optim.groups come first
    schedule: Schedule | None = None  # replaces schedule.name of the config, and its warmup_fraction

    @property
    def metrics_or_default(self) -> tuple[Metric | LossMetric, ...]:
        """The metrics of its evaluations."""
        if self.metrics is not None:
            return tuple(self.metrics)
        return () if self.classes is None else (Classification(self.classes, self.label_column),)

    @property
    def validation_sets(self) -> dict[str, Source]:
        """The sets to evaluate on, by name; a single one has the name ""."""
        sets = self.validation
        return dict(sets) if isinstance(sets, Mapping) else {ONLY_SET: sets}


def normalisation_of(recipe: Recipe) -> Mapping[str, Any] | None:
    """Mean and deviation per channel that its eval_transform applies to images, if it applies any."""
    transform = recipe.eval_transform and inspect.unwrap(recipe.eval_transform)
    return getattr(transform, "normalisation", None)


@dataclass(frozen=True)
class ModelBuilder:
    """Builds a new model, registered under `name`, on each call."""

    name: str
    build: Callable[[], nn.Module]

    def __call__(self) -> nn.Module:
        return self.build()


def model_name(recipe: Recipe, network: nn.Module) -> str:
    """The name of its model in the registry, which the config may not name; of a recipe's own its class."""
    builder = inspect.unwrap(recipe.build_model)
    return builder.name if isinstance(builder, ModelBuilder) else type(network).__name__


def data_name(config: Config, recipe: Recipe) -> str:
    """The name of its training data, which the config may not name; of a recipe's own that of the recipe."""
    name: str = getattr(recipe.train, "name", None) or config.recipe.uses
    return name


def class_loss(logits: Tensor, labels: Tensor, label_smoothing: float = 0.0) -> Tensor:
    """Summed cross-entropy of fp32 logits [n, classes, ...] against labels as of `cross_entropy`.

    `label_smoothing` is the probability that is spread over all classes.
    """
    return F.cross_entropy(
        logits, labels, reduction="sum", ignore_index=IGNORED, label_smoothing=label_smoothing
    )


def cross_entropy(
    network: nn.Module,
    batch: Batch,
    inputs: str = "image",
    labels: str = "label",
    label_smoothing: float = 0.0,
) -> Loss:
    """Summed cross-entropy of `network(batch[inputs])` [n, classes, ...] against `batch[labels]` [n, ...].

    Counts the labels that carry loss: those of int64 that are not IGNORED (-100), or all probabilities of
    classes (floating-point, of the logits' shape; fp32 is used). `label_smoothing` is
    that of train.label_smoothing, as for any loss that has an argument of this name.
    """
    found: object = network(batch[inputs])
    expected = batch[labels]
    if not isinstance(found, Tensor):
        raise ConfigError(
            f"the model returned a {type(found).__name__}: cross_entropy needs a tensor of logits. Return "
            "one from the model, or write a loss that selects it: see recipes/README.md."
        )
    logits = found.float()
    # The mode of emulation leaves fp32 as it is, and takes longer than most of these calls.
    with torch._C.DisableTorchFunction():
        shape, num_samples = logits.shape, len(expected)
        if len(shape) < 2 or shape[0] != num_samples:
            raise ConfigError(
                f"the model returned the shape {list(shape)} for {counted(num_samples, 'sample')}: "
                f"cross_entropy needs [{num_samples}, classes], one value per sample and class."
            )
        if expected.is_floating_point():
            expected = expected.float()
        loss = class_loss(logits, expected, label_smoothing)
        return Loss(loss, _labels_with_loss(logits, expected), logits.detach())


def _labels_with_loss(logits: Tensor, labels: Tensor) -> int | Tensor:
    """How many. On a device a tensor for classes, since reading it would wait for the device."""
    if labels.is_floating_point():
        return logits.numel() // logits.shape[1]
    return (labels != IGNORED).sum()
