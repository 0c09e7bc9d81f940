"""The built-in metrics of a regression against scikit-learn's."""

from __future__ import annotations

import math

import pytest
import torch

from launcher.errors import ConfigError
from launcher.metrics import Regression
from tests.metrics.figures import FIGURES


def measured(outputs: torch.Tensor, targets: torch.Tensor, parts: int = 1) -> dict[str, float]:
    whole = Regression()
    for pair in zip(outputs.tensor_split(parts), targets.tensor_split(parts), strict=True):
        other = Regression()
        other.update(pair[0], {"target": pair[1]})
        whole.merge(other)
    return dict(whole.compute())


@pytest.mark.parametrize("parts", [1, 2, 3, 50])
@pytest.mark.parametrize("case", FIGURES["regression"])
def test_they_equal_those_of_scikit_learn_in_any_number_of_parts(case, parts):
    targets, outputs = (torch.tensor(case[name], dtype=torch.float64) for name in ("targets", "outputs"))
    assert measured(outputs, targets, parts) == pytest.approx(case["metrics"], rel=1e-9)


@pytest.mark.parametrize(("error", "r2"), [(0.0, 1.0), (0.5, 0.0), (math.nan, math.nan)])
def test_a_constant_target_has_no_share_to_explain(error, r2):
    targets = torch.full((7,), 0.1)
    found = measured(targets + error, targets, parts=3)
    assert found["r2"] == pytest.approx(r2, nan_ok=True)


def test_a_single_sample_has_errors_and_no_r2():
    found = measured(torch.tensor([2.0]), torch.tensor([1.0]))
    assert (found["mae"], found["rmse"]) == (1.0, 1.0)
    assert math.isnan(found["r2"])
    assert all(math.isnan(value) for value in Regression().compute().values())


def test_a_column_of_outputs_fits_a_row_of_targets():
    assert measured(torch.tensor([[1.0], [2.0]]), torch.tensor([1.0, 4.0]))["mae"] == 1.0


@pytest.mark.parametrize(
    ("outputs", "targets", "message"),
    [
        (torch.zeros(4, 2), torch.zeros(4), r"float32 \[4, 2\], the targets float32 \[4\]"),
        (torch.zeros(3), torch.zeros(4), r"float32 \[3\]"),
        (torch.zeros(4, 1, 1), torch.zeros(4, 1, 1), r"\[4, 1, 1\]"),
        (torch.zeros(()), torch.zeros(()), "Regression needs both as"),
    ],
)
def test_outputs_that_do_not_fit_the_targets_are_refused(outputs, targets, message):
    with pytest.raises(ConfigError, match=message):
        Regression().update(outputs, {"target": targets})


def test_names_say_which_way_is_better():
    named = Regression(prefix="price_")
    assert named.names == ("price_mae", "price_rmse", "price_r2")
    assert named.higher_is_better == {"price_mae": False, "price_rmse": False, "price_r2": True}
