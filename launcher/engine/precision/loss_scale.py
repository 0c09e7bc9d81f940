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

    # The counters' names in a saved state, in the order of ScaleState; there the scale is s.
    FIELDS = (
        "exponent",
        "growth_tracker",
        "hysteresis_tracker",
        "applied",
        "skipped",
        "floor_skips",
        "bad_losses",
    )

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

    def tensors(self) -> list[Tensor]:
        """What is held on the device."""
        return [] if self._device is None else [*self.state]

    def restore(self, counters: Mapping[str, int], mode: ScaleMode | None) -> ScaleStart:
        """Restore the counters of a run with this scaling `mode`; None: unknown, taken for this run's.

        Applied and skipped steps, and steps with a loss that was not finite, are always restored. The scale
        and its counters are restored only from dynamic to dynamic scaling, within this run's limits; a static
        scale is always this run's.
        """
        scaling = self.scaling
        fields = dict.fromkeys(self.FIELDS, 0)
        fields |= {"exponent": scaling.exponent, "hysteresis_tracker": scaling.hysteresis}
        fields |= {name: counters[name] for name in ("applied", "skipped", "bad_losses")}
        reason = self._objection(counters["exponent"], mode or scaling.mode)
        if not reason and scaling.mode == "dynamic":
            fields["exponent"] = counters["exponent"]
            fields["growth_tracker"] = min(counters["growth_tracker"], scaling.growth_interval - 1)
            fields["hysteresis_tracker"] = min(counters["hysteresis_tracker"], scaling.hysteresis)
        if not reason and (scaling.mode != "dynamic" or fields["exponent"] == _exponent(scaling.min)):
            fields["floor_skips"] = counters["floor_skips"]
        scale, *others = (fields[name] for name in self.FIELDS)
        self.state = ScaleState(*map(self.placed, (2.0**scale, *others)))
        self.loads, self.loaded = self.loads + 1, counters["applied"]
        return ScaleStart(fields["exponent"], not reason, reason)

    def _objection(self, exponent: int, mode: ScaleMode) -> str:
        """Why this run does not restore a scale of 2^exponent of that `mode`; empty if it does."""
        scaling, low, high = self.scaling, self.scaling.exponent, self.scaling.exponent
        if scaling.mode == "dynamic":
            low, high = _exponent(scaling.min), _exponent(scaling.max)
        if mode == scaling.mode and low <= exponent <= high:
            return ""
        own = f"{scaling.mode}, starts at 2^{scaling.exponent} within 2^{low} to 2^{high}"
        return f"{own}, not from the state's: that is {mode}, 2^{exponent}"

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
