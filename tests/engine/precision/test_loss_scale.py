"""The loss-scale automaton against the rule of the contract, written out step by step in plain Python."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from launcher.engine.errors import UnusableError
from launcher.engine.precision.found_inf import ON_DEVICE, ON_HOST, next_state
from launcher.engine.precision.loss_scale import LossScale, Scaling, nearest_power_of_two

CLEAN, OVERFLOW, BAD_LOSS, NO_SAMPLES = "clean", "overflow", "bad loss", "no samples"


class Reference:
    """Section 6 of the numerics contract: s, t, h; and the counters that end a run."""

    def __init__(self, s: int, s_min: int, s_max: int, growth_interval: int, hysteresis: int) -> None:
        self.s, self.s_min, self.s_max = s, s_min, s_max
        self.growth_interval, self.hysteresis = growth_interval, hysteresis
        self.t, self.h = 0, hysteresis
        self.applied = self.skipped = self.floor_skips = self.bad_losses = 0

    def step(self, event: str) -> None:
        if event == CLEAN:
            self.applied += 1
            self.floor_skips = self.bad_losses = 0
            self.h = self.hysteresis
            self.t += 1
            if self.t == self.growth_interval:
                self.t = 0
                self.s = min(self.s + 1, self.s_max)
            return
        self.skipped += 1
        if event == OVERFLOW:
            self.floor_skips += self.s == self.s_min
            self.t = 0
            self.h -= 1
            if self.h <= 0:
                self.s = max(self.s - 1, self.s_min)
        if event == BAD_LOSS:
            self.bad_losses += 1

    def state(self) -> list[int]:
        return [self.s, self.t, self.h, self.applied, self.skipped, self.floor_skips, self.bad_losses]


def advance(scale: LossScale, event: str, abandoned: bool = False) -> None:
    """By the form of the rule that the scale's state has: numbers, or tensors."""
    skip = event != CLEAN or abandoned
    flags: list[Any] = [skip, event == OVERFLOW, event == BAD_LOSS, skip and not abandoned]
    if isinstance(scale.state.scale, torch.Tensor):
        flags = [torch.tensor(flag) for flag in flags]
    ops = ON_DEVICE if isinstance(scale.state.scale, torch.Tensor) else ON_HOST
    scale.state = next_state(ops, scale.state, scale.scaling, *flags)


@settings(deadline=None)
@given(
    events=st.lists(st.sampled_from([CLEAN, CLEAN, CLEAN, OVERFLOW, BAD_LOSS, NO_SAMPLES]), max_size=60),
    bounds=st.lists(st.integers(0, 6), min_size=3, max_size=3).map(sorted),
    growth_interval=st.integers(1, 5),
    hysteresis=st.integers(1, 3),
    on_host=st.booleans(),
)
def test_dynamic_scale_follows_the_written_out_rule(
    events, bounds, growth_interval, hysteresis, on_host
) -> None:
    low, start, high = bounds
    scaling = Scaling("dynamic", 2**start, growth_interval, hysteresis, 2**low, 2**high)
    scale = LossScale(scaling, None if on_host else torch.device("cpu"))
    reference = Reference(start, low, high, growth_interval, hysteresis)
    for event in events:
        advance(scale, event)
        reference.step(event)
        assert list(scale.counters().values()) == reference.state()
        assert scale.value().item() == 2.0**reference.s


@pytest.mark.parametrize(("mode", "expected"), [("static", 2.0**10), ("none", 1.0)])
def test_static_scale_and_none_never_move_but_count(mode, expected) -> None:
    scale = LossScale(Scaling(mode=mode, init=2**10, growth_interval=1), None)
    for event in (CLEAN, OVERFLOW, OVERFLOW, BAD_LOSS, OVERFLOW, CLEAN, CLEAN):
        advance(scale, event)
        assert scale.value().item() == expected
    fields = scale.counters()
    assert (fields["applied_steps"], fields["skipped_steps"]) == (3, 4)


@pytest.mark.parametrize("mode", ["static", "none"])
def test_overflows_in_a_row_are_counted_where_the_scale_cannot_fall(mode) -> None:
    scale, counts = LossScale(Scaling(mode=mode), None), []
    for event in (OVERFLOW, BAD_LOSS, OVERFLOW, NO_SAMPLES, CLEAN, OVERFLOW):
        advance(scale, event)
        counts.append(scale.counters()["skips_at_min_scale"])
    assert counts == [1, 1, 2, 2, 0, 1], "only a clean step ends the row"


def test_the_defaults_are_those_of_the_contract() -> None:
    assert Scaling() == Scaling("dynamic", 2**16, growth_interval=2000, hysteresis=1, min=1, max=2**24)


@pytest.mark.parametrize("field", ["init", "min", "max"])
@pytest.mark.parametrize("value", [0, 3, 2**128, 65536.0])
def test_each_of_the_three_scales_is_a_power_of_two(field, value) -> None:
    with pytest.raises(UnusableError, match=f"loss scale {field}="):
        Scaling(**{field: value})


@pytest.mark.parametrize("on_host", [True, False])
def test_scales_are_exact_over_the_whole_range(on_host) -> None:
    for exponent in range(128):
        scale = LossScale(Scaling(init=2**exponent, max=2**127), None if on_host else torch.device("cpu"))
        assert (scale.counters()["exponent"], scale.value().item()) == (exponent, 2.0**exponent)
        assert scale.over(4).item() == 2.0 ** (exponent - 2)


@pytest.mark.parametrize(("value", "power"), [(0, 1), (1, 1), (3, 4), (5, 4), (6, 8), (1000, 1024), (0.3, 1)])
def test_nearest_power_of_two(value, power) -> None:
    assert nearest_power_of_two(value) == power


def test_a_run_that_goes_on_with_a_shorter_interval_grows() -> None:
    scale = LossScale(Scaling(init=8, growth_interval=4), None)
    scale.state = scale.state._replace(growth_tracker=9)  # clean steps counted under a longer one
    advance(scale, CLEAN)
    assert scale.value().item() == 16


def test_an_abandoned_step_changes_nothing() -> None:
    scale = LossScale(Scaling(init=8, growth_interval=4), None)
    advance(scale, CLEAN)
    before = scale.state
    advance(scale, CLEAN, abandoned=True)
    assert scale.state == before
