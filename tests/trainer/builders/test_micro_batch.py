"""The search for the largest micro-batch: it finds it, in at most 8 trials, the whole share first."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from launcher.data.batch_plan import BatchPlan
from launcher.trainer.builders import micro_batch_finder
from launcher.trainer.builders.micro_batch_finder import (
    MOST_TRIALS,
    bisect_largest,
    candidate_sizes,
    next_smaller,
)
from launcher.trainer.progress import TrainLength
from tests.configs import composed


def plan_of(share: int, micro_batch: int | None = None, ranks: int = 1) -> BatchPlan:
    return BatchPlan(10 * share * ranks, share * ranks, micro_batch, ranks, 0, 0, drop_last=False)


def searched(share: int, limit: int) -> tuple[int | None, list[int]]:
    tried: list[int] = []

    def fits(size: int) -> bool:
        tried.append(size)
        return size <= limit

    return bisect_largest(candidate_sizes(plan_of(share)), fits), tried


@pytest.mark.parametrize("share", [1, 2, 3, 8, 10, 97, 128, 1000, 4096])
def test_it_finds_the_largest_size_that_makes_a_difference(share) -> None:
    sizes = candidate_sizes(plan_of(share))
    for limit in {0, 1, 2, share // 3, share // 2, share - 1, share}:
        found, tried = searched(share, limit)
        assert found == max((size for size in sizes if size <= limit), default=None)
        assert len(tried) == len(set(tried)) <= MOST_TRIALS
        assert tried[0] == share
        if found is not None:
            assert found in tried, "what was not tried may not fit"


def test_every_number_of_micro_batches_has_its_smallest_size() -> None:
    assert candidate_sizes(plan_of(10)) == [10, 5, 4, 3, 2, 1]
    assert candidate_sizes(plan_of(1)) == [1]


def test_where_eight_trials_do_not_decide_it_takes_one_that_fits() -> None:
    share = 10**6
    for limit in (1, 7, 400, 3000, 600_000):
        found, tried = searched(share, limit)
        assert found in tried
        assert found is not None
        assert found <= limit
        assert len(tried) == MOST_TRIALS
    assert searched(share, 0)[1][-1] == 1


@pytest.mark.parametrize(
    ("share", "micro_batch", "half"),
    [(12, None, 6), (10, 8, 3), (12, 6, 3), (9, None, 5), (2, None, 1), (1, None, None)],
)
def test_half_is_of_what_the_largest_micro_batch_really_has(share, micro_batch, half) -> None:
    """A share of 10 in pieces of at most 8 is 5 and 5."""
    assert next_smaller(plan_of(share, micro_batch)) == half


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
