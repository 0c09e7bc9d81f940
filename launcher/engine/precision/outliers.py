"""Steps that are skipped because their loss or gradient norm lies far above those of the steps before.

Owns the statistics of the latest applied steps and the rule. What they are made of has been summed over the
ranks, and every sum here has one fixed order, so all ranks decide alike, also on unlike GPUs. The rule is
that of OLMo-core's SkipStepOptimizer, but with the statistics of applied steps only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import torch
from torch import Tensor

import launcher.engine.limits as limits

# A level that has risen for good would be skipped for ever: after so many in a row the next step is applied.
# The new level is no outlier once 1 / (1 + deviations^2) of the window has it: by default after 4 applied
# steps, 44 steps in all.
MOST_IN_A_ROW = 10
LEAST_RISE = 1e-3  # of the mean: what a nearly constant loss rises by at least in an outlier
LEAST_SPREAD = 1e-9  # of the mean: rounding it leaves about 1e-16 where all values are equal


@dataclass(frozen=True)
class SkipOutliers:
    """Skip a step whose loss or gradient norm is more than `deviations` standard deviations above the mean of
    the last `window` applied steps, and at least 0.1 % above it. The first `window / 2` steps are always
    applied, and those after values that were all equal.
    """

    deviations: Annotated[float, limits.positive] = 6.0
    window: Annotated[int, limits.window] = 128

    def __post_init__(self) -> None:
        limits.require_fields(self, "SkipOutliers")


class OutlierStatistics:
    """Loss and gradient norm of the latest applied steps, where the step is decided. Never waits for it."""

    def __init__(self, options: SkipOutliers, device: torch.device, on_host: bool) -> None:
        self._options, self._on_host = options, on_host
        # [2, window]: losses and norms, the latest last; nan where there were no steps yet.
        self._recent = torch.full((2, options.window), torch.nan, dtype=torch.float64, device=device)
        self._in_a_row = torch.zeros((), dtype=torch.float64, device=device)

    def is_outlier(self, loss: Any, grad_norm: Any) -> Any:
        """Whether a step with these is one: a bool where the host decides, else 0-dim."""
        known = ~self._recent.isnan()
        count = known[0].sum()
        mean = _sum(self._recent.nan_to_num()) / count
        squares = torch.where(known, (self._recent - mean[:, None]).square(), 0.0)
        deviation = (_sum(squares) / count).sqrt()
        rise = torch.maximum(self._options.deviations * deviation, LEAST_RISE * mean.abs())
        # Both are False for nan. Values without any spread say nothing of what is usual.
        beyond = (
            (self._values(loss, grad_norm) > mean + rise) & (deviation > LEAST_SPREAD * mean.abs())
        ).any()
        found = beyond & (2 * count >= self._options.window) & (self._in_a_row < MOST_IN_A_ROW)
        return bool(found) if self._on_host else found

    def record(self, loss: Any, grad_norm: Any, skip: Any, outlier: Any) -> None:
        """Note a step after the verdict on it.

        An overflow or an abandoned step leaves the count of outliers in a row as it is.
        """
        shifted = torch.cat([self._recent[:, 1:], self._values(loss, grad_norm)[:, None]], dim=1)
        skip, outlier = (torch.as_tensor(each, device=self._recent.device) for each in (skip, outlier))
        self._recent = torch.where(skip, self._recent, shifted)
        self._in_a_row = torch.where(skip, self._in_a_row + outlier, 0.0)

    def _values(self, loss: Any, grad_norm: Any) -> Tensor:
        pair = (loss, grad_norm)
        return torch.tensor(pair, dtype=torch.float64) if self._on_host else torch.stack(pair)

    def state(self) -> dict[str, list[float]]:
        """The statistics as numbers, the oldest first. Waits for the device."""
        losses, norms = (row[~row.isnan()].tolist() for row in self._recent)
        return {"losses": losses, "grad_norms": norms, "in_a_row": [self._in_a_row.item()]}

    def load(self, state: Mapping[str, Sequence[float]]) -> None:
        """Continue from a `state`, also of another window."""
        window = self._options.window
        rows = [list(state[name])[-window:] for name in ("losses", "grad_norms")]
        filled = [[torch.nan] * (window - len(row)) + row for row in rows]
        self._recent.copy_(torch.tensor(filled, dtype=torch.float64))
        self._in_a_row.fill_(state["in_a_row"][0])

    def tensors(self) -> dict[str, Tensor]:
        """What must be equal on all ranks."""
        return {"recent losses and gradient norms": self._recent, "outliers in a row": self._in_a_row[None]}


def _sum(values: Tensor) -> Tensor:
    """The sums of the rows, by halves: torch's own sum has another order on another processor."""
    while (length := values.shape[1]) > 1:
        half = length // 2
        rest = values[:, 2 * half :]  # one column, where the length is odd
        values = torch.cat([values[:, :half] + values[:, half : 2 * half], rest], dim=1)
    return values[:, 0]
