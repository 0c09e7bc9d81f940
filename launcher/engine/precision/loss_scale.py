"""The loss-scale state machine, in integers: on the device, or where the host decides in Python's numbers.

Owns how the scale S = 2^s changes and the counters that must survive a crash. Integers make S and 1/S exact:
neither can become 0 or inf. Nothing here waits for the device.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import get_args

import torch
from torch import Tensor

import launcher.engine.limits as limits
from launcher.engine.errors import UnusableError
from launcher.engine.precision.policy import Policy, ScaleMode

APPLIED = 3  # of LossScale.FIELDS


@dataclass(frozen=True)
class Scaling:
    """How the loss scale starts and changes; all scales are powers of two.

    dynamic: an overflow takes one of `hysteresis` lives, and halves the scale when none is left; a clean
    step restores all lives; `growth_interval` clean steps in a row double the scale. static: always `init`.
    none: 1. Scales are ints up to 2**127. Raises UnusableError for other values.
    """

    mode: ScaleMode = "dynamic"
    init: int = 65536
    growth_interval: int = 2000
    hysteresis: int = 1
    min: int = 1
    max: int = 2**24

    @classmethod
    def of(cls, policy: Policy) -> Scaling:
        """The default of a policy; a static scale is 1024, which rarely overflows."""
        return cls(policy.scale_mode, init=1024 if policy.scale_mode == "static" else 65536)

    def __post_init__(self) -> None:
        for name in ("init", "min", "max"):
            limits.loss_scale.require(f"loss scale {name}", getattr(self, name))
        for name in ("growth_interval", "hysteresis"):
            limits.at_least_one.require(f"loss scale {name}", getattr(self, name))
        if self.mode not in get_args(ScaleMode):
            raise UnusableError(
                f"loss scale mode={self.mode!r}: it must be one of {', '.join(get_args(ScaleMode))}."
            )
        if not self.min <= self.init <= self.max:
            raise UnusableError(
                f"loss scale needs min <= init <= max, not {self.min}, {self.init}, {self.max}."
            )


@dataclass(frozen=True)
class ScaleStart:
    """The loss scale after a state was loaded: 2**exponent.

    `restored`: whether that is the scale of the state. If not, `reason` says why.
    """

    exponent: int
    restored: bool
    reason: str = ""


class LossScale:
    """The state machine's state: one int64 tensor on the device, or on the host a list, by field.

    exponent s; clean steps in a row `t`; lives `h`; applied and skipped steps; overflows in a row at the
    smallest scale; non-finite losses in a row.
    """

    FIELDS = ("exponent", "clean", "lives", "applied", "skipped", "floor_skips", "bad_losses")

    def __init__(self, scaling: Scaling, device: torch.device, on_host: bool | None = None) -> None:
        """`on_host`: whether the host decides each step, and holds the state; None: on a CPU."""
        self.scaling = scaling
        start = 0 if scaling.mode == "none" else _exponent(scaling.init)
        fields = [start, 0, scaling.hysteresis, 0, 0, 0, 0]
        self.present: Tensor | list[int] = fields
        if not (device.type == "cpu" if on_host is None else on_host):
            self.present = torch.tensor(fields, dtype=torch.int64, device=device)
        self.loads, self.loaded = 0, 0  # how often counters were restored, and the applied steps of the last

    @property
    def state(self) -> Tensor:
        """int64 [FIELDS]. To be read only: where the host decides it is a copy."""
        return self.present if isinstance(self.present, Tensor) else torch.tensor(self.present)

    @property
    def exponent(self) -> Tensor:
        return self.state[0]

    @property
    def applied(self) -> Tensor:
        return self.state[APPLIED]

    def become(self, after: Tensor | list[int]) -> None:
        """Take the next state, on the device in the memory of the present one."""
        if isinstance(self.present, list):
            self.present = after.tolist() if isinstance(after, Tensor) else after
        else:
            self.present.copy_(after if isinstance(after, Tensor) else torch.tensor(after))

    def start_at(self, exponent: int) -> int:
        """Set s, within its limits, before the first step; returns it."""
        low, high = _exponent(self.scaling.min), _exponent(self.scaling.max)
        exponent = min(max(exponent, low), high)
        self.present[0] = exponent
        return exponent

    def restore(self, counters: Mapping[str, int], mode: ScaleMode | None) -> ScaleStart:
        """Restore the counters of a run with this scaling `mode`; None: unknown, taken for this run's.

        Applied and skipped steps, and losses in a row that were not finite, are always restored. The scale
        and its counters are restored only from dynamic to dynamic scaling, within this run's limits; a static
        scale is always this run's.
        """
        scaling = self.scaling
        own = 0 if scaling.mode == "none" else _exponent(scaling.init)
        fields = dict.fromkeys(self.FIELDS, 0) | {"exponent": own, "lives": scaling.hysteresis}
        fields |= {name: counters[name] for name in ("applied", "skipped", "bad_losses")}
        reason = self._objection(counters["exponent"], mode or scaling.mode)
        if not reason and scaling.mode == "dynamic":
            fields["exponent"] = counters["exponent"]
            fields["clean"] = min(counters["clean"], scaling.growth_interval - 1)
            fields["lives"] = min(counters["lives"], scaling.hysteresis)
        if not reason and (scaling.mode != "dynamic" or fields["exponent"] == _exponent(scaling.min)):
            fields["floor_skips"] = counters["floor_skips"]
        self.become([fields[name] for name in self.FIELDS])
        self.loads, self.loaded = self.loads + 1, counters["applied"]
        return ScaleStart(fields["exponent"], not reason, reason)

    def _objection(self, exponent: int, mode: ScaleMode) -> str:
        """Why this run does not restore a scale of 2^exponent of that `mode`; empty if it does."""
        scaling, saved = self.scaling, f"{mode} loss scale of 2^{exponent}"
        if mode == "none":
            saved = "run without a loss scale"
        if scaling.mode == "dynamic":
            inside = _exponent(scaling.min) <= exponent <= _exponent(scaling.max)
            if mode == "dynamic" and inside:
                return ""
            limits = "" if mode != "dynamic" else f", which is not within {scaling.min} to {scaling.max}"
            return f"starts at {scaling.init}, not from the state's: that is of a {saved}{limits}"
        own = 1 if scaling.mode == "none" else scaling.init
        if mode == scaling.mode and exponent == _exponent(own):
            return ""
        return f"{scaling.mode}, {own} throughout: the state is of a {saved}"

    def value(self) -> Tensor:
        """S as fp32, 0-dim: built from its bits, so exact."""
        return power_of_two(self.exponent)

    def over(self, divisor: int) -> Tensor:
        """S / divisor, exact for a power of two: fp32, 0-dim."""
        if isinstance(self.present, list):  # one operation
            return torch.full((), math.ldexp(1.0, self.present[0]) / divisor, dtype=torch.float32)
        return self.value() / divisor


def next_state(
    scaling: Scaling, state: Tensor, skipped: Tensor, bad_loss: Tensor, overflow: Tensor, abandoned: Tensor
) -> Tensor:
    """The state after one step, int64 [FIELDS]. All flags are bool, 0-dim, equal on all ranks.

    `overflow` is a step whose gradient is not finite although every loss was; only that lowers the scale. A
    non-finite loss (`bad_loss`) cannot be the scale's fault. An `abandoned` step changes nothing, and is not
    counted.
    """
    s, t, h, applied, skips, floor, bad = state.unbind()
    clean, at_floor = ~skipped, overflow
    if scaling.mode == "dynamic":
        low, high = _exponent(scaling.min), _exponent(scaling.max)
        at_floor = overflow & (s == low)
        grown = clean & (t >= scaling.growth_interval - 1)
        lowered = overflow & (h <= 1)
        s = (s + grown).add(lowered, alpha=-1).clamp(low, high)
        t = (t + clean) * ~(grown | overflow)
        h = torch.where(clean, scaling.hysteresis, h.add(overflow, alpha=-1))
    floor, bad = (floor + at_floor) * skipped, (bad + bad_loss) * skipped
    after = torch.stack([s, t, h, applied + clean, skips + skipped, floor, bad])
    return torch.where(abandoned, state, after)


def next_fields(
    scaling: Scaling, fields: Sequence[int], skipped: bool, bad_loss: bool, overflow: bool, abandoned: bool
) -> list[int]:
    """`next_state` in Python's numbers."""
    if abandoned:
        return list(fields)
    s, t, h, applied, skips, floor, bad = fields
    clean, at_floor = not skipped, overflow
    if scaling.mode == "dynamic":
        low, high = _exponent(scaling.min), _exponent(scaling.max)
        at_floor = overflow and s == low
        grown = clean and t >= scaling.growth_interval - 1
        lowered = overflow and h <= 1
        s = min(max(s + grown - lowered, low), high)
        t = 0 if grown or overflow else t + clean
        h = scaling.hysteresis if clean else h - overflow
    floor, bad = (floor + at_floor) * skipped, (bad + bad_loss) * skipped
    return [s, t, h, applied + clean, skips + skipped, floor, bad]


def power_of_two(exponent: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """2^exponent as fp32 or fp64, exact, for integer exponents in [-126, 127]; same shape."""
    if dtype == torch.float64:
        return ((exponent + 1023) << 52).view(torch.float64)
    return ((exponent + 127) << 23).to(torch.int32).view(torch.float32)


def nearest_power_of_two(value: float) -> int:
    """The power of two >= 1 nearest to `value` on the logarithmic scale."""
    return 1 << max(0, round(math.log2(max(value, 1.0))))


def _exponent(power: int) -> int:
    return power.bit_length() - 1
