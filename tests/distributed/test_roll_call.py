"""Who is named where ranks wait: from the places of all ranks, without a process."""

from __future__ import annotations

import pytest

from launcher.distributed.heartbeat import Beat
from launcher.distributed.roll_call import last_ranks, who_stalls


def at(step: int, phase: str) -> Beat:
    return Beat(phase, step, 301.0)


@pytest.mark.parametrize(
    ("places", "under_way", "named"),
    [
        ({0: at(9, "report"), 1: at(8, "compute")}, True, "rank 1 hangs: in compute of step 8 for 301 s"),
        ({0: at(9, "report"), 1: at(9, "report")}, True, "all ranks wait in report of step 9"),
        ({0: at(9, "report")}, True, "rank 1 does not answer"),
        ({0: at(9, "finishing"), 1: None}, True, ""),
        ({0: at(9, "finishing"), 1: at(9, "finishing")}, True, ""),
        ({0: at(9, "report"), 1: None}, True, "rank 0 hangs: in report of step 9"),
        ({0: at(0, "loading data"), 1: at(0, "loading data")}, False, ""),
        ({0: at(0, "comparing the data"), 1: at(0, "loading data")}, False, "rank 1 hangs: while loading"),
        ({0: at(1, "compute"), 1: at(1, "compute")}, False, ""),
        ({0: at(1, "report"), 1: at(1, "compute")}, False, "rank 1 hangs: in compute of step 1"),
        ({0: at(9, "compute"), 1: at(9, "compute")}, True, "all ranks wait in compute of step 9"),
        ({0: at(0, "meeting the other ranks"), 1: at(0, "meeting the other ranks")}, False, "all ranks wait"),
    ],
)
def test_who_stalls(places: dict[int, Beat | None], under_way: bool, named: str) -> None:
    text = who_stalls(places, 2, under_way)
    assert text.startswith(named)
    assert bool(text) == bool(named)


def test_ranks_that_are_behind_all_others() -> None:
    places = {0: at(8, "wire"), 1: at(8, "compute"), 2: None, 3: at(8, "compute")}
    assert list(last_ranks(places)) == [1, 3]
