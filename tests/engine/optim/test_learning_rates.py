"""One rate per applied step, on the host and on a device."""

from __future__ import annotations

import pytest
import torch

from launcher.engine.optim.learning_rates import LearningRates


@pytest.mark.parametrize("device", [None, torch.device("cpu")])
def test_the_last_rate_holds_for_ever_after(device) -> None:
    rates = LearningRates([0.5, 0.25, 0.125], device)

    def at(step: int) -> float:
        return float(rates.at(step if device is None else torch.tensor(float(step), dtype=torch.float64)))

    assert [at(step) for step in (0, 1, 2, 3, 99)] == [0.5, 0.25, 0.125, 0.125, 0.125]
    rates.replace(2.0)
    assert [at(step) for step in (0, 7)] == [2.0, 2.0]
