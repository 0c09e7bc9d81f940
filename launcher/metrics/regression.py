"""Metrics of a regression: mean errors and the coefficient of determination.

Owns the formulas. Keeps outputs and targets, 16 bytes per sample and target, so that deviations are summed
around the mean of all: exact for targets far from zero.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from launcher.data.tensors import Batch
from launcher.errors import ConfigError
from launcher.metrics.metric import Outputs, chosen, column_of, shape_text


class Regression:
    """`mae` and `rmse`, in the unit of the target, and `r2`, a share of at most 1.

    Reads outputs of floating point [n] or [n, targets], and the numbers `batch[target]` of the same shape;
    [n, 1] and [n] are the same. `output` names the entry where outputs are a mapping; `prefix` goes before
    each name. Several targets are measured each, and their mean is given, as scikit-learn does by default.
    r2 is 1 - (sum of squared errors) / (sum of squared deviations from the mean target). For a constant
    target, which has no deviation, it is 1 where every output is right and 0 otherwise, and NaN for a single
    sample.

    Raises ConfigError for outputs of another shape.
    """

    def __init__(self, target: str = "target", *, output: str | None = None, prefix: str = "") -> None:
        self.target, self.output, self.prefix = target, output, prefix
        # fp64 [samples, targets] of each batch.
        self._outputs: list[Tensor] = []
        self._targets: list[Tensor] = []

    @property
    def names(self) -> tuple[str, ...]:
        """What `compute` returns."""
        return tuple(self.prefix + name for name in ("mae", "rmse", "r2"))

    @property
    def higher_is_better(self) -> dict[str, bool]:
        """Whether more is better, by name: true of r2 alone."""
        return {name: name.endswith("r2") for name in self.names}

    def update(self, outputs: Outputs, batch: Batch) -> None:
        """Add the samples of a batch. Raises ConfigError for outputs that do not fit the targets."""
        given = chosen(outputs, self.output, "Regression")
        targets = column_of(batch, self.target, "Regression", "Regression(target=...)")
        predicted, wanted = _columns(given), _columns(targets)
        if given.is_complex() or predicted is None or wanted is None or predicted.shape != wanted.shape:
            raise ConfigError(
                f"the outputs are {shape_text(given)}, the targets {shape_text(targets)}. Regression needs "
                "both as [samples] or [samples, targets], in one shape: return them in "
                "Loss(sum, count, outputs)."
            )
        self._outputs.append(predicted)
        self._targets.append(wanted)

    def merge(self, other: Regression) -> None:
        """Add the samples that `other` has seen."""
        self._outputs += other._outputs
        self._targets += other._targets

    def compute(self) -> Mapping[str, float]:
        """The three numbers; NaN without samples."""
        found = (math.nan,) * 3
        if sum(map(len, self._targets)):
            found = _measured(torch.cat(self._outputs), torch.cat(self._targets))
        return dict(zip(self.names, found, strict=True))


def _measured(outputs: Tensor, targets: Tensor) -> tuple[float, float, float]:
    errors = outputs - targets
    squared, spread = errors.square().sum(0), (targets - targets.mean(0)).square().sum(0)
    constant = (targets == targets[0]).all(0)  # rounding of the mean would leave a spread above 0
    of_constant = (squared == 0).double() + 0 * squared  # NaN where an output is
    r2 = torch.where(constant, of_constant, 1 - squared / spread)
    r2 = r2 if len(targets) > 1 else torch.full_like(r2, math.nan)
    return float(errors.abs().mean()), float((squared / len(targets)).sqrt().mean()), float(r2.mean())


def _columns(values: Tensor) -> Tensor | None:
    """fp64 [samples, targets]; None for another number of dimensions."""
    if values.ndim not in (1, 2):
        return None
    # A copy: a batch may be reused.
    return (values[:, None] if values.ndim == 1 else values).to(torch.float64, copy=True)
