"""Metrics of a regression: mean errors and the coefficient of determination.

Owns the formulas and sums that stay exact for targets far from zero: all are fp64, deviations are summed
around the mean.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import astuple, dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from launcher.data.tensors import Batch
from launcher.errors import ConfigError
from launcher.metrics.metric import Outputs, chosen, column_of, shape_text

Float64Array = NDArray[np.float64]


@dataclass(frozen=True)
class _Sums:
    """Sums over some samples, a column for each target: fp64 [targets], but for their number."""

    samples: int
    absolute: Tensor  # sum of |error|
    squared: Tensor  # sum of error^2
    mean: Tensor  # of the targets
    spread: Tensor  # sum of (target - mean)^2
    lowest: Tensor
    highest: Tensor

    @classmethod
    def of(cls, predicted: Tensor, targets: Tensor) -> _Sums:
        """The sums over these samples, at least one: both fp64 [samples, targets]."""
        error, mean = predicted - targets, targets.mean(dim=0)
        spread = (targets - mean).square().sum(dim=0)
        extremes = targets.amin(dim=0), targets.amax(dim=0)
        return cls(len(targets), error.abs().sum(dim=0), error.square().sum(dim=0), mean, spread, *extremes)

    @classmethod
    def none(cls) -> _Sums:
        """The sums over no samples, to which those over any number of targets can be added."""
        return cls(0, *(torch.zeros(0, dtype=torch.float64),) * 6)

    def __add__(self, other: _Sums) -> _Sums:
        """Chan, Golub, LeVeque, 1983: the spread around the common mean."""
        if not self.samples or not other.samples:
            return self if self.samples else other
        samples, distance = self.samples + other.samples, other.mean - self.mean
        return _Sums(
            samples,
            self.absolute + other.absolute,
            self.squared + other.squared,
            self.mean + distance * (other.samples / samples),
            self.spread + other.spread + distance.square() * (self.samples * other.samples / samples),
            torch.minimum(self.lowest, other.lowest),
            torch.maximum(self.highest, other.highest),
        )


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
        self._sums = _Sums.none()

    def __getstate__(self) -> dict[str, Any]:
        """The attributes in plain types, which is all that ranks send to each other."""
        return vars(self) | {"_sums": astuple(self._sums)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state | {"_sums": _Sums(*state["_sums"])})

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
        if len(wanted):
            self._sums += _Sums.of(predicted, wanted)

    def merge(self, other: Regression) -> None:
        """Add the samples that `other` has seen."""
        self._sums += other._sums

    def compute(self) -> Mapping[str, float]:
        """The three numbers; NaN without samples."""
        found = _measured(self._sums) if self._sums.samples else (np.nan,) * 3
        return {name: float(value) for name, value in zip(self.names, found, strict=True)}


def _measured(sums: _Sums) -> tuple[float, float, float]:
    samples, absolute, squared, _, spread, lowest, highest = (
        value.cpu().numpy() if isinstance(value, Tensor) else value for value in astuple(sums)
    )
    constant: Any = lowest == highest  # rounding of the mean would leave a spread above 0
    shares = 1 - squared / np.where(constant, 1, spread)
    r2 = np.where(constant, np.where(squared == 0, 1.0, np.where(np.isnan(squared), np.nan, 0.0)), shares)
    r2 = r2 if samples > 1 else np.full_like(r2, np.nan)
    return float((absolute / samples).mean()), float(np.sqrt(squared / samples).mean()), float(r2.mean())


def _columns(values: Tensor) -> Tensor | None:
    """fp64 [samples, targets]; None for another number of dimensions."""
    if values.ndim not in (1, 2):
        return None
    return (values[:, None] if values.ndim == 1 else values).double()
