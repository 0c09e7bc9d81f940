"""The search for a micro-batch that fits: the whole share, its half, and so on."""

from __future__ import annotations

import pytest

from launcher.data.batch_plan import BatchPlan
from launcher.trainer.builders.micro_batch_finder import candidate_sizes, next_smaller


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
    assert next_smaller(plan_of(share, micro_batch)) == half
