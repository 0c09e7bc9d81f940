"""Training aids that change what a recipe's loss is given: label smoothing and mixup.

Owns how a config turns them on for a recipe, and the refusal of a loss that could not use them. A loss takes
part by naming the arguments `label_smoothing` and `mixed`, which only training gives; an evaluation measures
the plain loss.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from launcher.config.schema import Config
from launcher.data.batch_plan import BatchPlan
from launcher.data.tensors import Batch, TensorData
from launcher.errors import ConfigError
from launcher.recipe.contract import Loss, Mixed, Recipe

IMAGE = "image"
MIXED_LABEL, MIXED_SHARE = "mixed_label", "mixed_share"  # columns that mixup adds to a batch
COLUMN = 3  # of the noise: cropping and mirroring read the first three
TABLE = 4096  # quantiles of the Beta distribution


def with_training_aids(recipe: Recipe, config: Config) -> Recipe:
    """The recipe with the aids that the config asks for. Raises ConfigError for a loss without them."""
    smoothing, alpha = config.train.label_smoothing, config.data.augment.mixup
    if smoothing:
        _require_argument(recipe, "label_smoothing", f"train.label_smoothing={smoothing:g}")
    if alpha:
        _require_argument(recipe, "mixed", f"data.augment.mixup={alpha:g}")
        _require_images(recipe, alpha)
        recipe = replace(recipe, train_transform=Mixup(alpha, recipe.label, recipe.train_transform))
    if not (smoothing or alpha):
        return recipe
    return replace(recipe, loss=_aided(recipe.loss, {"label_smoothing": smoothing} if smoothing else {}))


def _aided(loss: Callable[..., Loss], arguments: dict[str, Any]) -> Callable[[nn.Module, Batch], Loss]:
    """`loss` with the arguments of training, wherever the network is trained."""

    @functools.wraps(loss)
    def call(network: nn.Module, batch: Batch) -> Loss:
        if not network.training:
            return loss(network, batch)
        if MIXED_LABEL not in batch:
            return loss(network, batch, **arguments)
        plain = {name: column for name, column in batch.items() if name not in (MIXED_LABEL, MIXED_SHARE)}
        mixed = Mixed(batch[MIXED_LABEL], batch[MIXED_SHARE])
        return loss(network, plain, mixed=mixed, **arguments)

    return call


def _require_argument(recipe: Recipe, name: str, wish: str) -> None:
    named = False
    with suppress(TypeError, ValueError):  # of C, without a signature
        named = name in inspect.signature(recipe.loss).parameters
    if not named:
        title = getattr(recipe.loss, "__qualname__", type(recipe.loss).__name__)
        raise ConfigError(
            f"{wish}: the recipe's loss, {title}, has no argument {name}, so this would change nothing. Give "
            "it one, handed on to launcher.recipe.class_loss, or use launcher.recipe.cross_entropy."
        )


def _require_images(recipe: Recipe, alpha: float) -> None:
    columns = recipe.train.columns if isinstance(recipe.train, TensorData) else {IMAGE, recipe.label}
    lacking = [name for name in (IMAGE, recipe.label) if name not in columns]
    if recipe.classes is None or lacking:
        reason = f"the training set has no column {lacking[0]}" if lacking else "the recipe has no classes"
        raise ConfigError(
            f"data.augment.mixup={alpha:g} mixes images and their classes, but {reason}. Set "
            "data.augment.mixup=0."
        )


def refuse_split_pairs(plan: BatchPlan, alpha: float, total_steps: int) -> None:
    """Raise ConfigError where two samples that are mixed would be on two ranks, or in two micro-batches.

    `total_steps` are those of the run: what it never reaches may be odd.
    """
    if not alpha:
        return
    last = min(plan.steps_per_epoch, total_steps) - 1
    for step in {0, last}:  # all but the last of an epoch are as large as the first
        batch = plan.global_batch(step)
        ranks = (replace(plan, rank=rank) for rank in range(plan.world_size))
        parts = [part for rank in ranks for part in rank.micro_positions(step)]  # one after another
        if any((part.stop - batch.start) % 2 for part in parts[:-1]):
            raise ConfigError(
                f"data.augment.mixup={alpha:g} mixes samples in pairs, but a micro-batch of the {len(batch)} "
                f"samples of step {step + 1} of an epoch has an odd number of samples. Choose a "
                "data.batch_size and data.micro_batch that leave an even number to each rank, or set "
                "data.drop_last=true if it is the rest of an epoch."
            )


@dataclass(frozen=True)
class Mixup:
    """A transform of training batches: each image becomes a mean of itself and its neighbour.

    Zhang et al. 2018 (arXiv:1710.09412). The samples at the positions 2 i and 2 i + 1 of a batch, whose order
    is random, are mixed with each other: l * x + (1 - l) * y and l * y + (1 - l) * x, with l of
    Beta(alpha, alpha). Pairs and l depend on seed, epoch and step only, so they are the same on any number of
    ranks. The last of an odd number of samples stays as it is.
    """

    alpha: float
    label: str
    transform: Callable[[Batch, Tensor], Batch] | None
    _quantiles: dict[torch.device, Tensor] = field(default_factory=dict)

    def __call__(self, batch: Batch, noise: Tensor) -> Batch:
        """`noise` fp32 [n, 4]. Adds the neighbour's label, int64 [n], and the share of the own one, [n]."""
        if self.transform is not None:
            batch = self.transform(batch, noise)
        images, labels = batch.get(IMAGE), batch.get(self.label)
        if images is None or labels is None or not images.is_floating_point() or labels.ndim != 1:
            raise ConfigError(
                f"data.augment.mixup={self.alpha:g} needs a column {IMAGE} of floating-point numbers and a "
                f"column {self.label} with a class for each sample, after the recipe's train_transform. The "
                f"batch has {', '.join(batch)}. Set data.augment.mixup=0."
            )
        positions = torch.arange(len(labels), device=labels.device)
        partner = (positions ^ 1).clamp(max=len(labels) - 1)  # the last of an odd number is its own
        share = self._shares(noise)
        weight = share.view(-1, *[1] * (images.ndim - 1)).to(images.dtype)
        mixed = torch.lerp(images.index_select(0, partner), images, weight)
        return {**batch, IMAGE: mixed, MIXED_LABEL: labels.index_select(0, partner), MIXED_SHARE: share}

    def _shares(self, noise: Tensor) -> Tensor:
        """fp32 [n], equal within a pair."""
        pairs = noise[:, COLUMN].clone()
        pairs[1::2] = pairs[: len(pairs) // 2 * 2 : 2]
        return self._table(noise.device).index_select(0, (pairs * TABLE).long())

    def _table(self, device: torch.device) -> Tensor:
        # cached: a copy from the host in every step would synchronize with the device
        if device not in self._quantiles:
            from scipy.special import betaincinv

            middles = (torch.arange(TABLE, dtype=torch.float64) + 0.5) / TABLE
            quantiles = torch.from_numpy(betaincinv(self.alpha, self.alpha, middles.numpy()))
            self._quantiles[device] = quantiles.float().to(device)
        return self._quantiles[device]
