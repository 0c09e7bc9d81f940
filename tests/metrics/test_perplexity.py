from __future__ import annotations

import math

import pytest

from launcher.metrics import Perplexity


@pytest.mark.parametrize(
    ("loss_sum", "count", "expected"),
    [(0.0, 3, 1.0), (7 * math.log(50257), 7, 50257.0), (1e6, 10, math.inf), (math.inf, 10, math.inf)],
)
def test_perplexity_is_exp_of_the_mean_loss_per_token(loss_sum, count, expected):
    assert Perplexity().of_loss(loss_sum, count) == {"perplexity": pytest.approx(expected, rel=1e-12)}


def test_a_loss_that_is_no_number_has_none():
    assert math.isnan(Perplexity().of_loss(math.nan, 3)["perplexity"])
