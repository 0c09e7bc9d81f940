"""The search for a micro-batch that fits: the whole share, its half, and so on."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from launcher.data.batch_plan import BatchPlan
from launcher.trainer.builders import micro_batch_finder
from launcher.trainer.builders.micro_batch_finder import (
    candidate_sizes,
    half_of,
)
from launcher.trainer.progress import TrainLength
from tests.configs import composed


def plan_of(share: int, micro_batch: int | None = None, ranks: int = 1) -> BatchPlan:
    return BatchPlan(10 * share * ranks, share * ranks, micro_batch, ranks, 0, 0, drop_last=False)


def test_the_whole_share_comes_first_and_each_size_is_half_of_the_one_before() -> None:
    assert candidate_sizes(plan_of(10)) == [10, 5, 3, 2, 1]
    assert candidate_sizes(plan_of(64)) == [64, 32, 16, 8, 4, 2, 1]
    assert candidate_sizes(plan_of(1)) == [1]


@pytest.mark.parametrize(
    ("share", "micro_batch", "half"),
    [(12, None, 6), (10, 8, 3), (12, 6, 3), (9, None, 5), (2, None, 1), (1, None, None)],
)
def test_half_is_of_what_the_largest_micro_batch_really_has(share, micro_batch, half) -> None:
    """A share of 10 in pieces of at most 8 is 5 and 5."""
    assert half_of(plan_of(share, micro_batch)) == half


def test_cudnn_times_its_algorithms_only_for_the_size_that_is_chosen(monkeypatch) -> None:
    tuned: list[bool] = []

    def fits(context: object, size: int, tried: dict[int, str]) -> bool:
        """Only one sample fits."""
        tuned.append(torch.backends.cudnn.benchmark)
        tried[size] = "" if size == 1 else "memory"
        return size == 1

    monkeypatch.setattr(micro_batch_finder, "_fits", fits)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    telemetry = SimpleNamespace(decision=lambda *words, **values: None)
    context: Any = SimpleNamespace(
        config=composed("data.batch_size=8"),
        telemetry=telemetry,
        plan=plan_of(8),
        length=TrainLength(1, 1, 1),
    )
    assert micro_batch_finder.search(context) == 1
    assert len(tuned) > 1
    assert not any(tuned)
    assert torch.backends.cudnn.benchmark
