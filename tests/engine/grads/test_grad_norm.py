"""Sums of squares: not finite if and only if an element is not, at the ends of each dtype's range."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from launcher.engine.grads.grad_norm import CHUNK, SquaresReader, is_not_finite

# Of a chunk, of one and a bit, of none, small ones.
LENGTHS = (CHUNK, 8192, CHUNK + 3, 0, 7, 100)
DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def split(flat: Tensor) -> list[Tensor]:
    return list(torch.split(flat, LENGTHS))


def squares_of(flat: Tensor) -> list[float]:
    found: list[float] = SquaresReader(split(flat)).read().tolist()
    return found


def exact_squares_of(flat: Tensor) -> list[float]:
    return [part.double().square().sum().item() for part in split(flat)]


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_largest_finite_elements_have_a_finite_sum(dtype) -> None:
    flat = torch.full((sum(LENGTHS),), torch.finfo(dtype).max, dtype=dtype)
    assert squares_of(flat) == pytest.approx(exact_squares_of(flat), rel=2e-5)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_sums_are_those_of_fp64(dtype) -> None:
    flat = torch.randn(sum(LENGTHS), generator=torch.Generator().manual_seed(0)).to(dtype)
    assert squares_of(flat) == pytest.approx(exact_squares_of(flat), rel=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("scale", [3e-23, 3e-12, 1e18, 1e22])
def test_squares_beyond_the_range_of_fp32_are_summed(dtype, scale) -> None:
    flat = torch.randn(sum(LENGTHS), generator=torch.Generator().manual_seed(0))
    flat = (flat.double() * scale).to(dtype)
    assert squares_of(flat) == pytest.approx(exact_squares_of(flat), rel=1e-5, abs=0)


def test_the_sum_of_a_large_parameter_is_as_exact_as_that_of_a_small_one() -> None:
    """One norm of as many halves in fp32 would be 4e-4 off."""
    flat = torch.randn(10_000_000, generator=torch.Generator().manual_seed(0)).half()
    found = SquaresReader([flat]).read().item()
    assert found == pytest.approx(flat.double().square().sum().item(), rel=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
def test_one_element_that_is_not_finite_shows_in_its_own_sum_only(dtype, value) -> None:
    for index, length in enumerate(LENGTHS):
        for position in {0, length // 2, length - 1} if length else ():
            flat = torch.ones(sum(LENGTHS), dtype=dtype)
            split(flat)[index][position] = value
            expected = [other != index for other in range(len(LENGTHS))]
            found = SquaresReader(split(flat)).read()
            assert found.isfinite().tolist() == expected, (index, position)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_reader_sees_what_its_parts_hold_now(dtype) -> None:
    flat = torch.full((sum(LENGTHS),), float("nan"), dtype=dtype)
    reader = SquaresReader(split(flat))
    for value in (1.0, 2.0):
        flat.fill_(value)
        assert reader.read().tolist() == pytest.approx([length * value**2 for length in LENGTHS], rel=1e-6)


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("position", [0, 50, 99])
def test_the_check_before_the_exchange_finds_what_is_not_finite(value, position) -> None:
    flats = [torch.ones(100).half(), torch.ones(100)]
    assert not is_not_finite([each for flat in flats for each in torch.aminmax(flat)])
    for flat in flats:
        flat[position] = value
        assert is_not_finite([each for other in flats for each in torch.aminmax(other)])
        flat[position] = 1.0
