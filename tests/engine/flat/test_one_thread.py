"""Building and loading copy parameter by parameter in one thread, whatever the number of threads."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from launcher.engine import AdamW, Stepper, WeightAverage
from launcher.engine.flat.allocation import one_thread
from tests.models import mlp

THREADS = 2


class Copies(TorchDispatchMode):
    """The number of threads of each copy into a view as large as a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.threads: list[int] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten.copy_.default and args[0].shape == args[1].shape == (16, 8):
            self.threads.append(torch.get_num_threads())
        return func(*args, **(kwargs or {}))


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(THREADS)
    yield
    torch.set_num_threads(before)


def test_parameters_are_copied_in_one_thread() -> None:
    with Copies() as building:
        stepper = Stepper(mlp(), AdamW(0.01))
    average = WeightAverage(stepper, 0.9)
    state, averaged = stepper.state(), average.state()
    with Copies() as loading:
        stepper.load(state)
        average.load(averaged)
    assert building.threads == [1]
    assert loading.threads == [1] * 4  # weights, two states, average
    assert torch.get_num_threads() == THREADS


def test_the_number_of_threads_comes_back_after_an_error() -> None:
    with pytest.raises(RuntimeError, match="size of tensor"), one_thread():
        torch.zeros(2).copy_(torch.zeros(3))
    assert torch.get_num_threads() == THREADS
