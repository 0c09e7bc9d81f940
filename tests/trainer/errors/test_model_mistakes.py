"""Which module of a model was given what it cannot compute with, and parameters that it does not hold."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from launcher.trainer.errors.model_mistakes import (
    SHAPES,
    failing_module_inputs,
    unregistered_parameters,
)


class Net(nn.Module):
    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.body = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)


class Own(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x @ torch.ones(3, 3)


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (nn.BatchNorm1d(5), (4, 6)),
        (nn.LayerNorm(5), (4, 6)),
        (Own(), (4, 6)),
        (nn.Conv2d(3, 8, 3), (4, 2)),
        (nn.Conv2d(3, 8, 9), (4, 3, 4, 4)),
        (nn.GRU(3, 4), (4, 2, 5)),
    ],
    ids=str,
)
def test_the_innermost_module_is_named_with_what_it_was_given(
    layer: nn.Module, shape: tuple[int, ...]
) -> None:
    for model, title in (
        (layer, "the model"),
        (nn.Sequential(nn.Identity(), layer), "module 1"),
        (Net(layer), "module body.0"),
    ):
        with pytest.raises((RuntimeError, ValueError)) as caught:
            model(torch.zeros(shape))
        assert failing_module_inputs(caught.value) == f"{title}, {layer!r}, was given {list(shape)}"
        assert SHAPES.search(str(caught.value))


def test_parameters_that_the_model_does_not_hold_are_counted() -> None:
    class Listing(Net):
        """Has a head in a plain list, which registers nothing."""

        def __init__(self) -> None:
            super().__init__(nn.Linear(3, 3))
            self.heads = [nn.Linear(3, 2)]

        def forward(self, x: Tensor) -> Tensor:
            return self.heads[0](super().forward(x))

    x = torch.ones(4, 3, requires_grad=True)  # as for a gradient penalty
    model, centers = Net(nn.Linear(3, 2)), nn.Parameter(torch.zeros(2))
    assert unregistered_parameters(model(x).sum(), model) == ""
    assert unregistered_parameters((model(x) - centers.detach()).sum(), model) == ""
    assert "on 1 parameters that the model does not hold, of the shapes [2]:" in unregistered_parameters(
        (model(x) - centers).sum() + centers.sum(), model
    )
    listing = Listing()
    assert "on 2 parameters that the model does not hold" in unregistered_parameters(
        listing(x).sum(), listing
    )
    listing.heads[0].requires_grad_(False)
    assert unregistered_parameters(listing(x).sum(), listing) == ""


def test_a_model_of_one_layer_is_named_with_its_sizes() -> None:
    with pytest.raises(RuntimeError) as caught:
        nn.Linear(64, 10)(torch.zeros(32, 2))
    assert failing_module_inputs(caught.value).startswith(
        "the model, Linear(in_features=64, out_features=10, "
    )


def test_an_error_outside_of_a_model_names_no_module() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.zeros(2, 3) @ torch.zeros(4, 5)
    assert failing_module_inputs(caught.value) == ""


@pytest.mark.parametrize(
    "text",
    [
        "CUDA error: an illegal memory access was encountered",
        "Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu!",
        "[gloo] broadcast failed: Connection closed by peer",
        "expected scalar type Half but found Float",
    ],
)
def test_other_errors_are_not_about_shapes(text: str) -> None:
    assert SHAPES.search(text) is None
