"""Sums of squares: not finite if and only if an element is not, at the ends of each dtype's range."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext

import pytest
import torch

from launcher.engine.wire.grad_norm import CHUNK, SumOfSquares
from launcher.engine.wire.reducer import not_finite

# Two that a compiled kernel reads side by side, one of an odd length, one without elements, two small ones.
LENGTHS = (CHUNK, 8192, CHUNK + 3, 0, 7, 100)
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
# Torch's own compiler uses torch.jit when it is first imported.
JIT = pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
FORMS = [
    "plain",
    pytest.param("in blocks", marks=JIT),
    pytest.param("compiled", marks=[JIT, pytest.mark.slow]),
]


@pytest.fixture(params=FORMS)
def sums(request) -> Iterator[SumOfSquares]:
    """`in blocks` runs what a compiler would be given, without one."""
    compiled = request.param != "plain"
    with torch.compiler.set_stance("force_eager") if request.param == "in blocks" else nullcontext():
        yield SumOfSquares(torch.device("cpu"), compiled)


def split(flat: torch.Tensor) -> list[torch.Tensor]:
    return list(torch.split(flat, LENGTHS))


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_largest_finite_elements_have_a_finite_sum(sums, dtype) -> None:
    flat = torch.full((sum(LENGTHS),), torch.finfo(dtype).max, dtype=dtype)
    exact = [length * torch.finfo(dtype).max ** 2 for length in LENGTHS]
    assert sums.over(split(flat))().tolist() == pytest.approx(exact, rel=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_sums_are_those_of_fp64(sums, dtype) -> None:
    flat = torch.randn(sum(LENGTHS), generator=torch.Generator().manual_seed(0)).to(dtype)
    exact = [part.double().square().sum().item() for part in split(flat)]
    assert sums.over(split(flat))().tolist() == pytest.approx(exact, rel=3e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("scale", [3e-23, 3e-12, 1e18, 1e22])
def test_squares_beyond_the_range_of_fp32_are_summed(sums, dtype, scale) -> None:
    flat = torch.randn(sum(LENGTHS), generator=torch.Generator().manual_seed(0))
    flat = (flat.double() * scale).to(dtype)
    exact = [part.double().square().sum().item() for part in split(flat)]
    assert sums.over(split(flat))().tolist() == pytest.approx(exact, rel=3e-6, abs=0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
def test_one_element_that_is_not_finite_shows_in_its_own_sum_only(sums, dtype, value) -> None:
    for index, length in enumerate(LENGTHS):
        for position in {0, length // 2, length - 1} if length else ():
            parts = split(torch.ones(sum(LENGTHS), dtype=dtype))
            parts[index][position] = value
            expected = [other != index for other in range(len(LENGTHS))]
            assert sums.over(parts)().isfinite().tolist() == expected, (index, position)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_look_sees_what_its_parts_hold_now_and_not_what_lies_between_them(sums, dtype) -> None:
    flat = torch.full((40000,), float("nan"), dtype=dtype)
    bounds = [(0, 5), (32, 40), (64, 8256), (8256, 16448), (16480, 24672), (24704, 30000), (30016, 30017)]
    parts = [flat[start:stop] for start, stop in bounds]
    look = sums.over([*parts, torch.full((7,), 3.0, dtype=dtype), flat[:5]])  # the last two lie elsewhere
    for value in (1.0, 2.0):
        for part in parts:
            part.fill_(value)
        lengths = [part.numel() for part in parts]
        assert look().tolist() == [*(value**2 * length for length in lengths), 63.0, value**2 * 5]


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_bits_of_a_sum_do_not_depend_on_the_parameters_beside_it(sums, dtype) -> None:
    lengths = (3, 4000, 8191, 8192, 5000, 17, CHUNK, 2048, 100, 70_000)
    flat = torch.randn(sum(lengths), generator=torch.Generator().manual_seed(0)).to(dtype)
    parts = list(torch.split(flat, lengths))
    together = sums.over(parts)()
    for border in range(1, len(parts)):
        divided = torch.cat([sums.over(parts[:border])(), sums.over(parts[border:])()])
        assert divided.tolist() == together.tolist(), border


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan, -torch.nan])
@pytest.mark.parametrize("index", [0, 1, 63, 64, 300, 999, 1100, 1199])
def test_the_look_before_the_wire_finds_what_is_not_finite(dtype, value, index) -> None:
    memory = torch.full((1200,), torch.finfo(dtype).max, dtype=dtype)
    memory[::2] *= -1  # extremes that would add up to more than fp16 or fp32 can hold
    memory[1000:1100] = torch.nan  # between the parts, as an earlier step may leave it
    parts = [memory[:64], memory[64:64], memory[64:1000], memory[1100:]]
    look = SumOfSquares(torch.device("cpu")).finite_over(parts)
    assert look().isfinite().all()
    assert not not_finite(look())
    memory[index] = value
    assert not_finite(look())


def test_the_look_before_the_wire_at_no_elements_is_finite() -> None:
    assert not not_finite(SumOfSquares(torch.device("cpu")).finite_over([torch.empty(0)])())
