"""The loss scale S = 2^s: how it starts, what is kept of it between steps, and what is restored.

S is a power of two within the range of fp32, so S and 1/S are exact: neither can become 0 or inf.
`found_inf.next_state` has the rule by which it changes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple

import torch
from torch import Tensor

import launcher.engine.limits as limits
from launcher.engine.errors import UnusableError
from launcher.engine.precision.policy import Policy, ScaleMode


@dataclass(frozen=True)
class Scaling:
    """How the loss scale starts and changes; all scales are powers of two.

    dynamic: the last of `hysteresis` overflows halves the scale, and an applied step begins their count anew;
    `growth_interval` applied steps in a row double the scale. static: always `init`.
    none: 1. Scales are ints up to 2**127. Raises UnusableError for other values.
    """

    mode: ScaleMode = "dynamic"
    init: Annotated[int, limits.loss_scale] = 65536  # as the next, the default of torch.amp.GradScaler
    growth_interval: Annotated[int, limits.at_least_one] = 2000
    hysteresis: Annotated[int, limits.at_least_one] = 1
    min: Annotated[int, limits.loss_scale] = 1
    max: Annotated[int, limits.loss_scale] = 2**24

    @classmethod
    def of(cls, policy: Policy) -> Scaling:
        """The default of a policy; a static scale is 1024, which rarely overflows."""
        return cls(policy.scale_mode, init=1024 if policy.scale_mode == "static" else 65536)

    def __post_init__(self) -> None:
        limits.require_fields(self, "loss scale")
        if not self.min <= self.init <= self.max:
            raise UnusableError(
                f"loss scale needs min <= init <= max, not {self.min}, {self.init}, {self.max}."
            )

    @property
    def exponent(self) -> int:
        """That of the scale at the start."""
        return 0 if self.mode == "none" else _exponent(self.init)


@dataclass(frozen=True)
class ScaleStart:
    """The loss scale after a state was loaded: 2**exponent.

    `restored`: whether that is the scale of the state. If not, `reason` says why.
    """

    exponent: int
    restored: bool
    reason: str = ""


class ScaleState(NamedTuple):
    """What a loss scale keeps between steps: numbers of the host, or 0-dim fp64 tensors.

    `found_inf.next_state` says how it changes.
    """

    scale: Any  # S = 2^s
    growth_tracker: Any  # clean steps in a row
    hysteresis_tracker: Any  # overflows that are left until one halves the scale
    applied_steps: Any
    skipped_steps: Any
    skips_at_min_scale: Any  # overflows at the smallest scale since the last applied step
    bad_loss_steps: Any  # steps with a non-finite loss since the last applied one


class LossScale:
    """The loss scale of the coming step and its counters, where the step is decided: host or device.

    Nothing here waits for the device but `counters`.
    """

    FIELDS = ("exponent", *ScaleState._fields[1:])  # the names in a saved state, which has s in place of 2^s

    def __init__(self, scaling: Scaling, device: torch.device | None) -> None:
        """`device` None: the host decides each step."""
        self.scaling, self._device = scaling, device
        self.state = ScaleState(*map(self.placed, (2.0**scaling.exponent, 0, scaling.hysteresis, 0, 0, 0, 0)))
        self.loads, self.loaded = 0, 0  # how often counters were restored, and the applied steps of the last

    def placed(self, number: float) -> Any:
        """A number of the host, or 0-dim fp64, where the step is decided."""
        if self._device is None:
            return number
        return torch.tensor(number, dtype=torch.float64, device=self._device)

    def counters(self) -> dict[str, int]:
        """Return the counters by name, with the scale's exponent. Waits for the device."""
        numbers: Sequence[float] = self.state
        if self._device is not None:
            numbers = torch.stack([*self.state]).tolist()
        exponent = math.frexp(numbers[0])[1] - 1
        return dict(zip(self.FIELDS, [exponent, *map(int, numbers[1:])], strict=True))

    def restore(self, counters: Mapping[str, int], mode: ScaleMode | None) -> ScaleStart:
        """Restore the counters of a run with this scaling `mode`; None: unknown, taken for this run's.

        Applied and skipped steps, and steps with a loss that was not finite, are always restored. The scale
        and its counters are restored only from dynamic to dynamic scaling, within this run's limits; a static
        scale is always this run's.
        """
        scaling, exponent, mode = self.scaling, counters["exponent"], mode or self.scaling.mode
        low = high = scaling.exponent
        if scaling.mode == "dynamic":
            low, high = _exponent(scaling.min), _exponent(scaling.max)
        restored = mode == scaling.mode and low <= exponent <= high
        present = ScaleState(
            2.0**scaling.exponent,
            growth_tracker=0,
            hysteresis_tracker=scaling.hysteresis,
            applied_steps=counters["applied_steps"],
            skipped_steps=counters["skipped_steps"],
            skips_at_min_scale=0,
            bad_loss_steps=counters["bad_loss_steps"],
        )
        if restored and scaling.mode == "dynamic":
            present = present._replace(
                scale=2.0**exponent,
                growth_tracker=min(counters["growth_tracker"], scaling.growth_interval - 1),
                hysteresis_tracker=min(counters["hysteresis_tracker"], scaling.hysteresis),
            )
        if restored and exponent == low:  # else the smallest scale was another one
            present = present._replace(skips_at_min_scale=counters["skips_at_min_scale"])
        self.state = ScaleState(*map(self.placed, present))
        self.loads, self.loaded = self.loads + 1, counters["applied_steps"]
        if restored:
            return ScaleStart(exponent, True)
        own = f"{scaling.mode}, starts at 2^{scaling.exponent} within 2^{low} to 2^{high}"
        reason = f"{own}, not from the state's: that is {mode}, 2^{exponent}"
        return ScaleStart(scaling.exponent, False, reason)

    def restart(self) -> None:
        """Return to the initial scale, with its trackers; counters of steps stay."""
        start = (2.0**self.scaling.exponent, 0, self.scaling.hysteresis)
        scale, growth, hysteresis = map(self.placed, start)
        self.state = self.state._replace(
            scale=scale,
            growth_tracker=growth,
            hysteresis_tracker=hysteresis,
            skips_at_min_scale=self.placed(0),
        )

    def value(self) -> Tensor:
        """S as fp32, 0-dim."""
        return self.over(1)

    def over(self, divisor: int) -> Tensor:
        """S / divisor, exact for a power of two: fp32, 0-dim, in one operation."""
        scale = self.state.scale
        if not isinstance(scale, Tensor):
            return torch.full((), scale / divisor, dtype=torch.float32)
        return torch.div(scale, divisor, out=scale.new_empty((), dtype=torch.float32))


def nearest_power_of_two(value: float) -> int:
    """The power of two >= 1 nearest to `value` on the logarithmic scale."""
    return 1 << max(0, round(math.log2(max(value, 1.0))))


def _exponent(power: int) -> int:
    return power.bit_length() - 1
