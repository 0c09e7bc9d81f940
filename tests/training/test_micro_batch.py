"""The search for the largest micro-batch: it finds it, in at most 8 trials, the whole share first."""

from __future__ import annotations

import pytest

from launcher.training.micro_batch import MOST_TRIALS, largest_that_fits, sizes_to_try


def searched(share: int, limit: int) -> tuple[int | None, list[int]]:
    tried: list[int] = []

    def fits(size: int) -> bool:
        tried.append(size)
        return size <= limit

    return largest_that_fits(sizes_to_try(share), fits), tried


@pytest.mark.parametrize("share", [1, 2, 3, 8, 10, 97, 128, 1000, 4096])
def test_it_finds_the_largest_size_that_makes_a_difference(share) -> None:
    sizes = sizes_to_try(share)
    for limit in {0, 1, 2, share // 3, share // 2, share - 1, share}:
        found, tried = searched(share, limit)
        assert found == max((size for size in sizes if size <= limit), default=None)
        assert len(tried) == len(set(tried)) <= MOST_TRIALS
        assert tried[0] == share
        if found is not None:
            assert found in tried, "what was not tried may not fit"


def test_every_number_of_micro_batches_has_its_smallest_size() -> None:
    assert sizes_to_try(10) == [10, 5, 4, 3, 2, 1]
    assert sizes_to_try(1) == [1]


def test_where_eight_trials_do_not_decide_it_takes_one_that_fits() -> None:
    share = 10**6
    for limit in (1, 7, 400, 3000, 600_000):
        found, tried = searched(share, limit)
        assert found in tried
        assert found is not None
        assert found <= limit
        assert len(tried) == MOST_TRIALS
    assert searched(share, 0)[1][-1] == 1
