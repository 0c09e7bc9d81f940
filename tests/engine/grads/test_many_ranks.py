"""What one rank of thousands does in a step: the calls do not grow with the number of ranks."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from torch import nn

from launcher.engine import SGD, DDPOptions, Policy, Stepper
from launcher.engine.grads.collectives import sum_of_rows
from tests.meta_device import fake_group

WIRES = {"native": DDPOptions(), "sharded": DDPOptions(shard_optimizer=True)}


def calls_of_a_step(ddp: DDPOptions, world_size: int) -> int:
    """Calls of functions, built-in ones included, in backward(), step() and read()."""
    with fake_group(world_size) as group:
        model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
        stepper = Stepper(model, SGD(0.1), Policy.fp16(), group, ddp=ddp, reference_count=4, emulate=True)
        for _ in range(2):
            with stepper.forward():
                loss = model(torch.full((4, 16), 0.25)).float().square().sum()
            number = 0

            def count(frame: Any, event: str, arg: object) -> None:
                nonlocal number
                number += event in ("call", "c_call")

            sys.setprofile(count)
            try:
                stepper.backward(loss, 4)
                stepper.step().read()
            finally:
                sys.setprofile(None)
    return number


@pytest.mark.parametrize("ddp", WIRES.values(), ids=WIRES)
def test_a_step_on_thousands_of_ranks_makes_hardly_more_calls_than_on_eight(ddp) -> None:
    few, many = calls_of_a_step(ddp, 8), calls_of_a_step(ddp, 4096)
    assert many < few + 150, (few, many)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("num_rows", [1, 2, 3, 4, 7, 8, 33, 1000])
def test_rows_are_summed_in_fp32(num_rows, dtype) -> None:
    rows = torch.randn(num_rows, 50, generator=torch.Generator().manual_seed(num_rows)).to(dtype)
    exact = rows.double().sum(dim=0)
    allowed = rows.double().abs().sum(dim=0) * 2.0**-24 * num_rows.bit_length()
    total = sum_of_rows(rows.clone())
    assert total.dtype == torch.float32
    assert ((total.double() - exact).abs() <= allowed).all()


@pytest.mark.parametrize("num_rows", [2, 3, 8, 33, 1000])
def test_the_bits_of_a_sum_do_not_depend_on_the_elements_beside_it(num_rows) -> None:
    generator = torch.Generator().manual_seed(0)
    octaves = torch.randint(-8, 8, (num_rows, 200), generator=generator)
    rows = (torch.randn(num_rows, 200, generator=generator) * torch.exp2(octaves)).half()
    whole = sum_of_rows(rows.clone())
    for cut in (1, 7, 32, 199):
        parts = [sum_of_rows(part.contiguous()) for part in (rows[:, :cut], rows[:, cut:])]
        assert torch.equal(torch.cat(parts), whole)


def test_an_infinity_or_nan_of_any_rank_stays() -> None:
    for bad in (float("inf"), float("-inf"), float("nan")):
        for row in range(5):
            rows = torch.ones(5, 3, dtype=torch.float16)
            rows[row, 1] = bad
            assert sum_of_rows(rows).isfinite().tolist() == [True, False, True]
