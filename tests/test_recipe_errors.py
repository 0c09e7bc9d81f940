"""Exceptions of torch that a recipe's data brings about, and the rule that the message adds."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from launcher.errors import DataError
from launcher.recipe_errors import guarding

LOG = Path("/run/logs/rank0.log")
NORMS: dict[str, tuple[nn.Module, Tensor, str]] = {
    "batch norm": (nn.BatchNorm1d(3), torch.ones(1, 3), "A batch norm divides by the variance of a channel"),
    "of images": (nn.BatchNorm2d(3), torch.ones(1, 3, 1, 1), "set data.drop_last=true if it is the rest of"),
    "instance norm": (
        nn.InstanceNorm2d(3),
        torch.ones(4, 3, 1, 1),
        "An instance norm divides by the",
    ),
}


@pytest.mark.parametrize("name", NORMS)
def test_a_norm_of_a_single_value_says_what_it_needs(name: str) -> None:
    norm, x, rule = NORMS[name]

    def loss(batch: dict[str, Tensor]) -> Tensor:
        return norm(batch["x"])

    with pytest.raises(DataError) as caught, guarding("the recipe's loss", LOG, {"x": x}):
        loss({"x": x})
    text = str(caught.value)
    assert text.count("\n") == 0
    assert f"at {__file__}:" in text
    assert rule in text
