"""Which loss scale a run starts with that loads the state of a run under other rules."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest

from launcher.engine import AdamW, Policy, Scaling, Stepper
from launcher.engine.state import EngineState
from tests.engine.observe import state_digest, train
from tests.models import features, mlp

POLICIES = ("fp32", "amp_fp16", "fp16", "pure_fp16", "bf16", "amp_bf16")
SCALINGS: dict[str, Scaling | None] = {
    "policy's own": None,
    "dynamic": Scaling(init=2**10, growth_interval=3, hysteresis=2),
    "narrow": Scaling(init=2**6, growth_interval=2, hysteresis=1, min=2**5, max=2**7),
    "static": Scaling("static", init=128),
    "none": Scaling("none"),
}
RUNS = [(policy, name) for policy in POLICIES for name in SCALINGS]


def stepper_of(policy: str, scaling: str) -> Stepper:
    return Stepper(
        mlp(), AdamW(0.01), Policy.named(policy), scaling=SCALINGS[scaling], reference_count=8, emulate=True
    )


def state_of(policy: str, scaling: str, steps: int = 4) -> EngineState:
    stepper = stepper_of(policy, scaling)
    for seed in range(steps):
        train(stepper, *features(8, seed))
    return stepper.state().clone()


@pytest.fixture(scope="module")
def states() -> dict[tuple[str, str], EngineState]:
    return {run: state_of(*run) for run in RUNS}


@pytest.mark.sampled(every=10)
@pytest.mark.parametrize("saved", RUNS, ids="-".join)
def test_a_state_brings_its_scale_only_where_mode_and_limits_allow_it(states, saved) -> None:
    state = states[saved]
    for run in RUNS:
        stepper = stepper_of(*run)
        scaling, own = stepper.scale.scaling, stepper.counters()
        start = stepper.load(state)
        now = stepper.counters()
        inside = scaling.min <= 2 ** state.counters["exponent"] <= scaling.max
        taken = scaling.mode == state.scale_mode == "dynamic" and inside
        assert now["exponent"] == (state.counters if taken else own)["exponent"] == start.exponent
        assert now["hysteresis_tracker"] == min(
            (state.counters if taken else own)["hysteresis_tracker"], scaling.hysteresis
        )
        assert now["growth_tracker"] == (
            min(state.counters["growth_tracker"], scaling.growth_interval - 1) if taken else 0
        )
        for name in ("applied_steps", "skipped_steps"):
            assert now[name] == state.counters[name]
        same_constant = scaling.mode == state.scale_mode and own["exponent"] == state.counters["exponent"]
        assert start.restored == (taken or (scaling.mode != "dynamic" and same_constant))
        assert start.restored == (start.reason == "")
        assert train(stepper, *features(8, 9)).scale == 2.0 ** now["exponent"]


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("run", RUNS, ids="-".join)
def test_a_plain_resume_is_bit_for_bit(states, run) -> None:
    for state in (states[run], floored(states[run])):
        stepper = stepper_of(*run)
        assert stepper.load(state).restored
        assert stepper.state().counters == state.counters
    undisturbed, resumed = stepper_of(*run), stepper_of(*run)
    for seed in range(4):
        train(undisturbed, *features(8, seed))
    resumed.load(states[run])
    for stepper, seed in itertools.product((undisturbed, resumed), range(4, 8)):
        train(stepper, *features(8, seed))
    assert state_digest(undisturbed, counters=True) == state_digest(resumed, counters=True)


def floored(state: EngineState) -> EngineState:
    """In a row of overflows at a constant scale, or at the smallest."""
    if state.scale_mode == "dynamic":
        return state
    return replace(
        state, counters=state.counters | {"skips_at_min_scale": 3, "skipped_steps": 5, "bad_loss_steps": 1}
    )


def test_overflows_at_the_smallest_scale_count_only_where_it_is_still_the_smallest() -> None:
    state = state_of("fp16", "narrow", 0)
    at_floor = replace(state, counters=state.counters | {"exponent": 5, "skips_at_min_scale": 4})
    for low, count in ((2**5, 4), (2**4, 0)):
        stepper = Stepper(mlp(), AdamW(0.01), scaling=Scaling(init=64, min=low))
        assert stepper.load(at_floor).restored
        assert stepper.counters()["skips_at_min_scale"] == count


def test_the_reason_names_both_scales() -> None:
    cases = {
        ("fp32", "none", "fp16", "policy's own"): (
            "dynamic, starts at 2^16 within 2^0 to 2^24, not from the state's: that is none, 2^0"
        ),
        ("fp16", "dynamic", "fp16", "static"): (
            "static, starts at 2^7 within 2^7 to 2^7, not from the state's: that is dynamic, 2^11"
        ),
        ("fp16", "dynamic", "fp16", "narrow"): (
            "dynamic, starts at 2^6 within 2^5 to 2^7, not from the state's: that is dynamic, 2^11"
        ),
    }
    for (*saved, policy, scaling), reason in cases.items():
        assert stepper_of(policy, scaling).load(state_of(*saved)).reason == reason


@pytest.mark.parametrize(
    "change",
    [
        {"counters": {"exponent": 3}},
        {"reference_count": 3},
    ],
    ids=str,
)
def test_numbers_that_no_run_has_are_refused_before_anything_changes(change: dict[str, Any]) -> None:
    state, stepper = state_of("fp16", "dynamic"), stepper_of("fp16", "dynamic")
    fields = {key: value for key, value in change.items() if hasattr(state, key)}
    counters = {key: value for key, value in change.items() if not hasattr(state, key)}
    before = state_digest(stepper, counters=True)
    with pytest.raises(ValueError, match="state"):
        stepper.load(replace(state, **({"counters": state.counters | counters} | fields)))
    assert state_digest(stepper, counters=True) == before
