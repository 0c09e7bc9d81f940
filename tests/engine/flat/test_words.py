"""Bits as words: every element of every tensor is in exactly one part, whatever its place in memory."""

from __future__ import annotations

import pytest
import torch

from launcher.engine import SGD, Policy, Stepper
from launcher.engine.flat.words import words_of


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.int64, torch.bool])
@pytest.mark.parametrize("first", [0, 1, 4, 8])
def test_each_changed_element_changes_one_part(dtype, first) -> None:
    for size in (0, 1, 3, 8, 21):
        tensor = torch.zeros(40, dtype=dtype)[first : first + size]
        for index in range(size):
            before = [part.clone() for part in words_of(tensor)]
            tensor[index] = 1
            after = words_of(tensor)
            differ = [not torch.equal(one, two) for one, two in zip(before, after, strict=True)]
            assert sorted(differ) == [False, True]


def test_words_are_eight_bytes_where_the_tensor_begins_at_a_multiple_of_eight() -> None:
    memory = torch.zeros(64, dtype=torch.float16)
    assert [len(part) for part in words_of(memory[4:27])] == [5, 3]
    assert [len(part) for part in words_of(memory[3:26])] == [0, 23]


def test_gaps_and_dimensions_are_kept_as_elements() -> None:
    square = torch.arange(16.0).reshape(4, 4)
    for tensor in (square, square.t(), square[:, 1], torch.tensor(1.0)):
        words, rest = words_of(tensor)
        assert len(words) == 0
        assert rest.shape == tensor.shape


def test_a_buffer_that_was_found_changed_stays_so_until_a_state_is_loaded() -> None:
    model = torch.nn.BatchNorm1d(2)
    stepper = Stepper(model, SGD(lr=0.1), Policy.fp32())
    start = stepper.state().clone()
    assert not any(stepper.changed_buffers().values())
    model.running_mean.add_(1)
    assert [name for name, changed in stepper.changed_buffers().items() if changed] == ["running_mean"]
    model.running_mean.sub_(1)
    assert stepper.changed_buffers()["running_mean"]
    stepper.load(start)
    assert not any(stepper.changed_buffers().values())
