"""Sums of squares: not finite if and only if an element is not, at the ends of each dtype's range."""

from __future__ import annotations

import pytest
import torch

from launcher.engine.layout import Slot
from launcher.engine.sums import CHUNK, SumOfSquares

SIZE = CHUNK + 3


def slots() -> list[Slot]:
    size = torch.Size([SIZE])
    return [Slot(str(i), i, size, (1,), i * SIZE, SIZE) for i in range(2)] + [
        Slot("empty", 2, torch.Size([0]), (1,), 2 * SIZE, 0)
    ]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_the_largest_finite_elements_have_a_finite_sum(dtype) -> None:
    flat = torch.full((2 * SIZE,), torch.finfo(dtype).max, dtype=dtype)
    sums = SumOfSquares(torch.device("cpu"))([slot.flat(flat) for slot in slots()])
    exact = SIZE * torch.finfo(dtype).max ** 2
    assert sums.tolist() == pytest.approx([exact, exact, 0.0], rel=1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("position", [0, CHUNK, SIZE - 1])
def test_one_element_that_is_not_finite_shows_in_its_own_sum_only(dtype, value, position) -> None:
    flat = torch.ones(2 * SIZE, dtype=dtype)
    flat[SIZE + position] = value
    sums = SumOfSquares(torch.device("cpu"))([slot.flat(flat) for slot in slots()])
    assert sums.isfinite().tolist() == [True, False, True]
    assert sums[0] == SIZE
