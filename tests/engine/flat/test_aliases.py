"""Tensors of a model that share memory without being one: kept among buffers, else refused by name."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from safetensors.torch import save
from torch import Tensor, nn

from launcher.engine import SGD, EngineState, Policy, Scaling, Stepper, UnusableError, WeightAverage
from launcher.engine.flat.aliases import neighbourhoods
from tests.engine.observe import state_digest, train
from tests.models import conv_net, features, mlp


def tied_through_data(model: nn.Sequential) -> None:
    model.append(nn.Linear(8, 16))
    model[3].weight.data = model[0].weight.data


def rows_of_another(model: nn.Sequential) -> None:
    model.append(nn.Linear(8, 4))
    model[3].weight = nn.Parameter(model[0].weight.data[12:])


def frozen_alias(model: nn.Sequential) -> None:
    tied_through_data(model)
    model[3].requires_grad_(False)


def buffer_of_a_weight(model: nn.Sequential) -> None:
    model[0].register_buffer("last", model[0].weight.data[-1])


def buffer_of_a_frozen_bias(model: nn.Sequential) -> None:
    model[0].bias.requires_grad_(False)
    model[0].register_buffer("last", model[0].bias.data.view(torch.int32))


def expanded(model: nn.Sequential) -> None:
    model[0].bias = nn.Parameter(torch.zeros(1).expand(16))


def two_dtypes(model: nn.Sequential) -> None:
    model[0].register_buffer("bits", torch.zeros(4, dtype=torch.int32))
    model[0].register_buffer("values", model[0].bits.view(torch.float32))


def expanded_element(model: nn.Sequential) -> None:
    model[0].register_buffer("values", torch.zeros(4))
    model[0].register_buffer("first", model[0].values[0].expand(3))


REFUSED: dict[Callable[[nn.Sequential], None], str] = {
    tied_through_data: r"0\.weight and 3\.weight share memory through their data",
    rows_of_another: r"0\.weight and 3\.weight share memory through their data",
    frozen_alias: r"0\.weight and 3\.weight share memory through their data",
    buffer_of_a_weight: r"0\.weight and 0\.last share memory through their data",
    buffer_of_a_frozen_bias: r"0\.bias and 0\.last share memory through their data",
    expanded: r"parameter 0\.bias has 16 elements, several of which are one place",
    two_dtypes: r"buffers 0\.bits, 0\.values share memory, and one has another dtype",
    expanded_element: r"buffers 0\.first, 0\.values share memory, and one .* is expanded",
}


@pytest.mark.parametrize("tie", REFUSED, ids=lambda tie: tie.__name__)
def test_what_flat_memory_would_part_is_refused_by_name(tie) -> None:
    model = mlp()
    tie(model)
    before = [(p.data_ptr(), p.dtype) for p in model.parameters()]
    with pytest.raises(UnusableError, match=REFUSED[tie]):
        Stepper(model, SGD(0.1))
    assert [(p.data_ptr(), p.dtype) for p in model.parameters()] == before


def test_neighbours_in_one_memory_are_not_aliases() -> None:
    """Columns of one matrix, halves of one vector, and the parameters of a model that has a Stepper."""
    model = mlp()
    both = torch.randn(8, 4)
    columns = [nn.Parameter(both[:, :2]), nn.Parameter(both[:, 2:])]
    model.columns = nn.ParameterList(columns)
    model.register_buffer("first", torch.arange(8.0)[:4])
    model.register_buffer("table", torch.zeros(1).expand(4))
    assert neighbourhoods(dict(model.named_parameters())) == [["columns.0", "columns.1"]]
    values = [p.detach().clone() for p in columns]
    Stepper(model, SGD(0.1), Policy.fp32())
    assert not neighbourhoods(dict(model.named_parameters()) | dict(model.named_buffers()))
    assert all(map(torch.equal, columns, values))
    Stepper(model, SGD(0.1), Policy.fp16())


class Sharing(nn.Module):
    """Buffers in one memory: a whole, its rows, its transpose, and two apart from it."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.net = conv_net()
        self.register_buffer("before", torch.full((3,), 7.0))
        whole = torch.arange(12, dtype=dtype).view(3, 4)
        self.register_buffer("row", whole[1])
        self.register_buffer("whole", whole)
        self.register_buffer("turned", whole.t())
        self.register_buffer("after", torch.full((2,), 5, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        self.row.add_(1)
        return self.net(x)

    def is_whole(self) -> bool:
        views = (self.whole[1], self.whole.t())
        return all(map(torch.equal, (self.row, self.turned), views))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int64])
def test_buffers_that_share_memory_still_do(dtype) -> None:
    model, other = Sharing(dtype), Sharing(dtype)
    scaling = Scaling(init=1024)
    stepper, twin = (Stepper(each, SGD(0.1), Policy.fp16(), scaling=scaling) for each in (model, other))
    kept = torch.float32 if dtype == torch.float16 else dtype
    assert model.turned.dtype == model.row.dtype == kept
    start = model.whole.clone()
    assert torch.equal(start, torch.arange(12, dtype=kept).view(3, 4))
    x, classes = features(8, 0, (3, 8, 8))
    train(stepper, x, classes)
    assert model.is_whole()
    assert torch.equal(model.whole[1], start[1] + 1)
    assert train(stepper, x * float("inf"), classes).skipped
    assert torch.equal(model.whole[1], start[1] + 1)
    assert torch.equal(model.before, torch.full((3,), 7.0))
    assert torch.equal(model.after, torch.full((2,), 5, dtype=kept))

    save(flat := stepper.state().tensors())  # safetensors refuses tensors that share memory
    twin.load(EngineState.from_tensors(flat))
    assert other.is_whole()
    for each in (stepper, twin):
        average = WeightAverage(each, 0.5)
        train(each, x, classes)
        average.update(1)
        before = state_digest(each)
        with average.in_model():
            assert each.model.is_whole()
        assert state_digest(each) == before
    assert state_digest(stepper) == state_digest(twin)
    Stepper(model, SGD(0.1))
    assert model.is_whole()
