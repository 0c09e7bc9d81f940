"""The loss-scale state machine: on the device, or where the host decides in Python's numbers.

Owns how the scale S = 2^s changes and the counters that must survive a crash. S is a power of two within the
range of fp32, so S and 1/S are exact: neither can become 0 or inf. Nothing here waits for the device.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

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


class LossScale:
    """The state machine's state, by field: a list of ints on the host, or one fp64 tensor on the device.

    exponent s; clean steps in a row `t`; lives `h`; applied and skipped steps; overflows in a row at the
    smallest scale; non-finite losses in a row. The device holds 2^s in place of s, which saves a step the
    kernels that compute it; the counts are exact in fp64.
    """

    FIELDS = ("exponent", "clean", "lives", "applied", "skipped", "floor_skips", "bad_losses")

    def __init__(self, scaling: Scaling, device: torch.device, on_host: bool | None = None) -> None:
        """`on_host`: whether the host decides each step, and holds the state; None: on a CPU."""
        self.scaling = scaling
        fields = [scaling.exponent, 0, scaling.hysteresis, 0, 0, 0, 0]
        self.present: Tensor | list[int] = fields
        if not (device.type == "cpu" if on_host is None else on_host):
            self.present = torch.tensor(with_scale(fields), dtype=torch.float64, device=device)
        self.loads, self.loaded = 0, 0  # how often counters were restored, and the applied steps of the last

    @property
    def state(self) -> Tensor:
        """int64 [FIELDS]. A copy."""
        if isinstance(self.present, list):
            return torch.tensor(self.present)
        state = self.present.long()
        state[0] = (self.present[0].view(torch.int64) >> 52) - 1023  # the exponent of a power of two
        return state

    @property
    def memory(self) -> Tensor:
        """What is held on the device; a copy where the host holds it."""
        return self.present if isinstance(self.present, Tensor) else torch.tensor(self.present)

    @property
    def applied(self) -> Tensor:
        """0-dim; fp64 on the device, where it is a view."""
        return torch.as_tensor(self.present[APPLIED])

    def become(self, after: Any) -> None:
        """Take the next state in the form of the present one, on the device in its memory."""
        if isinstance(self.present, Tensor):
            self.present.copy_(after)
        else:
            self.present = after

    def restore(self, counters: Mapping[str, int], mode: ScaleMode | None) -> ScaleStart:
        """Restore the counters of a run with this scaling `mode`; None: unknown, taken for this run's.

        Applied and skipped steps, and losses in a row that were not finite, are always restored. The scale
        and its counters are restored only from dynamic to dynamic scaling, within this run's limits; a static
        scale is always this run's.
        """
        scaling = self.scaling
        fields = dict.fromkeys(self.FIELDS, 0)
        fields |= {"exponent": scaling.exponent, "lives": scaling.hysteresis}
        fields |= {name: counters[name] for name in ("applied", "skipped", "bad_losses")}
        reason = self._objection(counters["exponent"], mode or scaling.mode)
        if not reason and scaling.mode == "dynamic":
            fields["exponent"] = counters["exponent"]
            fields["clean"] = min(counters["clean"], scaling.growth_interval - 1)
            fields["lives"] = min(counters["lives"], scaling.hysteresis)
        if not reason and (scaling.mode != "dynamic" or fields["exponent"] == _exponent(scaling.min)):
            fields["floor_skips"] = counters["floor_skips"]
        after = [fields[name] for name in self.FIELDS]
        on_host = isinstance(self.present, list)
        self.become(after if on_host else torch.tensor(with_scale(after), dtype=torch.float64))
        self.loads, self.loaded = self.loads + 1, counters["applied"]
        return ScaleStart(fields["exponent"], not reason, reason)

    def _objection(self, exponent: int, mode: ScaleMode) -> str:
        """Why this run does not restore a scale of 2^exponent of that `mode`; empty if it does."""
        scaling, saved = self.scaling, f"{mode} loss scale of 2^{exponent}"
        if mode == "none":
            saved = "run without a loss scale"
        if scaling.mode != "dynamic":
            same = mode == scaling.mode and exponent == scaling.exponent
            text = f"{scaling.mode}, {2**scaling.exponent} throughout: the state is of a {saved}"
            return "" if same else text
        if mode != "dynamic":
            return f"starts at {scaling.init}, not from the state's: that is of a {saved}"
        if _exponent(scaling.min) <= exponent <= _exponent(scaling.max):
            return ""
        limits = f"which is not within {scaling.min} to {scaling.max}"
        return f"starts at {scaling.init}, not from the state's: that is of a {saved}, {limits}"

    def value(self) -> Tensor:
        """S as fp32, 0-dim."""
        return self.over(1)

    def over(self, divisor: int) -> Tensor:
        """S / divisor, exact for a power of two: fp32, 0-dim, in one operation."""
        if isinstance(self.present, list):
            return torch.full((), math.ldexp(1.0, self.present[0]) / divisor, dtype=torch.float32)
        scale = self.present[0]
        return torch.div(scale, divisor, out=scale.new_empty((), dtype=torch.float32))


def next_fields(
    scaling: Scaling, fields: Sequence[int], skipped: bool, bad_loss: bool, overflow: bool, abandoned: bool
) -> list[int]:
    """The state after one step, FIELDS numbers. All flags are equal on all ranks.

    `overflow` is a step whose gradient is not finite although every loss was; only that lowers the scale. A
    non-finite loss (`bad_loss`) cannot be the scale's fault. An `abandoned` step changes nothing, and is not
    counted.
    """
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


def with_scale(fields: Sequence[int]) -> list[float]:
    """The fields as a device holds them: 2^s in place of s."""
    return [math.ldexp(1.0, fields[0]), *fields[1:]]


@dataclass(frozen=True)
class Transitions:
    """`next_fields` as a table for a device, which computes the next state in one operation.

    The next state is `factors * state + terms`, where these depend only on some yes-or-no questions about the
    state and the step. Each is whether a number is outside of two bounds, both allowed.
    """

    bounds: list[tuple[float, float]]  # of the state's fields
    highest: float  # above this scale it cannot grow
    rows: list[list[float]]  # factors, terms and whether the step is skipped, by the answers

    @classmethod
    def of(cls, scaling: Scaling) -> Transitions:
        """The table of `next_fields` for all answers, so that the rule is written once."""
        low, high, due = _exponent(scaling.min), _exponent(scaling.max), scaling.growth_interval - 1
        bounds = [(-math.inf, math.inf)] * len(LossScale.FIELDS)
        bounds[0] = (math.ldexp(1.0, low + 1), math.inf)  # outside: it cannot fall
        bounds[1] = (-math.inf, due - 1)  # outside: it grows after this step, if that is clean
        bounds[2] = (2.0, math.inf)  # outside: an overflow takes the last life
        rows = []
        for outside in itertools.product((False, True), repeat=NUM_QUESTIONS):
            at_low, is_due, last, at_high, *step = outside
            no_samples, bad_loss, not_finite, abandoned = step
            overflow = not_finite and not bad_loss
            skipped = no_samples or bad_loss or not_finite or abandoned
            exponent = low if at_low else high if at_high else low + 1
            # Two states with these answers: one gives the sum, the other the product.
            states = [
                [exponent, due + n if is_due else due - 1 - n, 1 - n if last else 2 + n, n, n, n, n]
                for n in (0, 1)
            ]
            one, other = (next_fields(scaling, s, skipped, bad_loss, overflow, abandoned) for s in states)
            pairs = list(zip(states[0][1:], states[1][1:], one[1:], other[1:], strict=True))
            factors = [(to - at) / (x - b) for b, x, at, to in pairs]
            terms = [at - factor * b for factor, (b, _, at, _) in zip(factors, pairs, strict=True)]
            rows.append([math.ldexp(1.0, one[0] - exponent), *factors, 0.0, *terms, float(skipped)])
        return cls(bounds, math.ldexp(1.0, high - 1), rows)


NUM_QUESTIONS = 8  # of Transitions: four about the state, four about the step


def nearest_power_of_two(value: float) -> int:
    """The power of two >= 1 nearest to `value` on the logarithmic scale."""
    return 1 << max(0, round(math.log2(max(value, 1.0))))


def _exponent(power: int) -> int:
    return power.bit_length() - 1
