"""Exponents of gradients, counted, against the plain definition."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from launcher.engine import SGD, Policy, Scaling, Stepper
from launcher.telemetry.events import GradientsEvent, LayerShares
from launcher.trainer.diagnostics.exponents import (
    FIRST_EXPONENT,
    LAST_EXPONENT,
    count_exponents,
)
from launcher.trainer.progress import StepIndex
from tests.engine.observe import train
from tests.models import features, mlp

DTYPES = [torch.float16, torch.bfloat16, torch.float32]


def count(gradients: dict[str, Tensor], scale: float = 1.0) -> GradientsEvent:
    return count_exponents(gradients).read(StepIndex(0, 0, 1), scale)


def plain_histogram(gradient: Tensor) -> list[int]:
    bins = [0] * (LAST_EXPONENT - FIRST_EXPONENT + 1)
    for value in gradient.flatten().double().abs().tolist():
        if value:
            exponent = math.frexp(value)[1] - 1 if math.isfinite(value) else LAST_EXPONENT
            bins[min(max(exponent, FIRST_EXPONENT), LAST_EXPONENT) - FIRST_EXPONENT] += 1
    return bins


@given(
    st.lists(st.floats(width=32) | st.sampled_from([0.0, -0.0, 2**-24, 2**-25, 65504.0]), min_size=1),
    st.sampled_from(DTYPES),
)
def test_the_histogram_is_that_of_the_definition(values: list[float], dtype: torch.dtype) -> None:
    gradient = torch.tensor(values).to(dtype)
    found = count({"w": gradient})
    assert list(found.histogram) == plain_histogram(gradient)
    assert found.zeros == int((gradient == 0).sum())
    assert found.zeros + sum(found.histogram) == gradient.numel()


@pytest.mark.parametrize("scale", [1, 128, 65536, 2**24])
def test_shares_are_those_of_rounding_to_fp16(scale: int) -> None:
    generator = torch.Generator().manual_seed(0)
    exact = torch.randn(20_000, generator=generator) * 2.0 ** torch.randint(
        -45, 0, (20_000,), generator=generator
    )
    on_wire = exact * scale
    shares = count({"w": on_wire}, scale).layers["w"]
    assert shares.zero_share == pytest.approx(float((on_wire.half() == 0).double().mean()))
    assert shares.zero_share_at_scale_1 == pytest.approx(float((exact.half() == 0).double().mean()))
    assert shares.near_max_share == pytest.approx(float((on_wire.abs() >= 2**14).double().mean()))


def test_a_subnormal_half_has_its_own_exponent() -> None:
    found = count({"w": torch.tensor([2**-24, 3 * 2**-24, 2**-15, 2**-14], dtype=torch.float16)})
    assert {e: n for e, n in enumerate(found.histogram, FIRST_EXPONENT) if n} == {
        -24: 1,
        -23: 1,
        -15: 1,
        -14: 1,
    }


def test_layers_keep_apart_and_add_up() -> None:
    gradients = {
        "dead": torch.zeros(2, 3, dtype=torch.float16),
        "large": torch.full((6,), -20000.0, dtype=torch.float16),
        "none": torch.zeros(0, 4),
        "strided": torch.ones(4, 4, dtype=torch.float32).t()[::2],
    }
    found = count(gradients, 1024)
    assert found.layers == {
        "dead": LayerShares(1.0, 1.0, 0.0),
        "large": LayerShares(0.0, 0.0, 1.0),
        "none": LayerShares(0.0, 0.0, 0.0),
        "strided": LayerShares(0.0, 0.0, 0.0),
    }
    assert (found.zero_share, found.zero_share_at_scale_1, found.near_max_share) == (0.3, 0.3, 0.3)


@pytest.mark.parametrize("policy", [Policy.fp16(), Policy.fp32(), Policy.amp_bf16()], ids=lambda p: p.name)
def test_a_steps_gradients_are_counted_and_left_alone(policy: Policy) -> None:
    stepper = Stepper(mlp(), SGD(0.1), policy, scaling=Scaling(policy.scale_mode, init=4096))
    train(stepper, *features(8, 0))
    gradients = stepper.layout.gradients()
    before = {name: gradient.clone() for name, gradient in gradients.items()}
    found = count(gradients, 4096)
    assert found.layers.keys() == stepper.layout.parameters.keys()
    assert all(torch.equal(gradient, before[name]) for name, gradient in gradients.items())
    assert list(found.histogram) == [
        sum(bins) for bins in zip(*map(plain_histogram, before.values()), strict=True)
    ]
