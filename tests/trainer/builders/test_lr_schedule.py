"""Learning-rate tables against torch's own schedulers and against their definition."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from launcher.errors import ConfigError
from launcher.trainer.builders.lr_schedule import custom_lr_table, learning_rates

NAMES = ["constant", "linear", "cosine", "onecycle"]


@given(st.sampled_from(NAMES), st.integers(1, 500), st.floats(0, 1), st.floats(1e-6, 10))
def test_one_rate_per_step_never_above_the_peak(name, steps, warmup_fraction, peak) -> None:
    rates = learning_rates(name, peak, steps, warmup_fraction)
    assert len(rates) == steps
    assert all(0 <= rate <= peak * (1 + 1e-12) for rate in rates)


@pytest.mark.parametrize("name", ["constant", "linear", "cosine"])
def test_warm_up_rises_linearly_to_the_peak(name) -> None:
    rates = learning_rates(name, 0.4, 100, 0.1)
    assert rates[:10] == pytest.approx([0.04 * (step + 1) for step in range(10)])
    assert rates[10] == pytest.approx(0.4)


@pytest.mark.parametrize(
    ("name", "middle", "end"), [("constant", 1.0, 1.0), ("linear", 0.5, 0.01), ("cosine", 0.5, 0.000246719)]
)
def test_shapes_without_warm_up(name, middle, end) -> None:
    rates = learning_rates(name, 1.0, 100, 0.0)
    assert rates[0] == 1.0
    assert rates[50] == pytest.approx(middle)
    assert rates[99] == pytest.approx(end, rel=1e-4)


def test_cosine_is_torchs_cosine() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.3)
    theirs = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=50)
    assert learning_rates("cosine", 0.3, 50, 0.0) == pytest.approx(lr_table(optimizer, theirs, 50))


@pytest.mark.parametrize(
    ("steps", "fraction"), [(51, 11 / 51), (10, 0.3), (10, 0.2), (100, 0.1), (24, 0.3), (7, 0.1), (5, 0.0)]
)
def test_onecycle_is_torchs_one_cycle(steps, fraction) -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.3)
    theirs = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, 0.3, total_steps=steps, pct_start=fraction, cycle_momentum=False
    )
    expected = lr_table(optimizer, theirs, steps)
    assert learning_rates("onecycle", 0.3, steps, fraction) == pytest.approx(expected)


def lr_table(optimizer, scheduler, steps: int) -> list[float]:
    rates = []
    for step in range(steps):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        if step < steps - 1:
            scheduler.step()
    return rates


def test_a_schedule_of_ones_own_is_torchs_lambda() -> None:
    """The factor of each applied step from 0, on the peak; numbers of NumPy are numbers."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.3)
    theirs = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
    ours = custom_lr_table(lambda step, total: np.float32(1.0) * 0.9**step, "mine", 0.3, 20)
    assert ours == pytest.approx(lr_table(optimizer, theirs, 20), rel=1e-6)
    assert custom_lr_table(lambda step, total: (total - step) / total, "mine", 2.0, 4) == [2.0, 1.5, 1.0, 0.5]


@pytest.mark.parametrize("factor", [math.nan, math.inf, -0.1, 1e308, None, "1"], ids=repr)
def test_what_is_no_factor_is_refused_with_its_step(factor) -> None:
    with pytest.raises(ConfigError, match=r"^mine gives .* for step 2 of 5: it must return the factor"):
        custom_lr_table(lambda step, total: factor if step == 2 else 1, "mine", 10.0, 5)


def test_a_schedule_that_is_always_0_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^mine gives 0 for each of 5 steps.* An integer division \(//\)"):
        custom_lr_table(lambda step, total: (step + 1) // (total + 1), "mine", 10.0, 5)
    assert custom_lr_table(lambda step, total: 0, "mine", 0.0, 2) == [0.0, 0.0], "as optim.lr=0 says"
