"""Which rank called another collective than the others, from what they called; and torch's record of it."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from launcher.distributed import flight_recorder
from launcher.distributed.env import WorkerEnv
from launcher.distributed.failures import is_loss
from launcher.distributed.flight_recorder import Call, called, disagreement, latest_calls, loss
from tests.ranks.harness import run_ranks

FIRST = {"0/7": Call("barrier")}
USUAL, SMALL, LARGE = ({"0/8": Call(f"all_reduce of float [{n}]", 4 * n)} for n in (5, 2, 9))
BROADCAST = {"0/8": Call("broadcast of float [5]", 20)}


@pytest.mark.parametrize(
    ("said", "world_size", "text"),
    [
        ({0: USUAL, 1: USUAL, 2: USUAL}, 3, ""),
        ({0: USUAL, 2: USUAL}, 3, ""),
        ({1: USUAL}, 2, ""),
        ({}, 2, ""),
        ({0: FIRST, 1: FIRST | USUAL}, 2, ""),  # not there yet
        ({0: USUAL, 1: LARGE, 2: USUAL}, 3, "rank 1 called another"),
        ({0: USUAL, 1: BROADCAST, 2: USUAL}, 3, "rank 1 called another"),
        ({0: USUAL, 1: LARGE}, 3, "rank 1 called another"),  # Gloo aborted rank 2, which expected less
        ({0: USUAL, 1: SMALL, 2: USUAL}, 4, "the ranks called different"),  # rank 3 expected little too
        ({0: USUAL, 1: LARGE, 2: USUAL}, 4, "rank 1 called another"),
        ({0: USUAL, 2: LARGE}, 4, "the ranks called different"),  # two are missing: nobody knows
        ({0: USUAL, 1: BROADCAST}, 3, "the ranks called different"),
        ({0: USUAL, 1: LARGE}, 2, "the ranks called different"),
        ({0: USUAL, 1: USUAL, 2: LARGE, 3: LARGE}, 4, "the ranks called different"),
        ({0: USUAL, 1: LARGE, 2: SMALL}, 3, "the ranks called different"),
        ({0: FIRST | USUAL, 1: FIRST | LARGE, 2: FIRST}, 3, "rank 1 called another"),
    ],
)
def test_only_those_are_named_whom_most_contradict(said, world_size, text) -> None:
    found = disagreement(said, world_size)
    assert found.startswith(text)
    assert bool(found) == bool(text)


def test_a_difference_is_shown_with_the_calls_and_the_rule() -> None:
    found = disagreement({0: USUAL, 1: LARGE, 2: USUAL}, 3)
    assert "(rank 0: all_reduce of float [5], rank 1: all_reduce of float [9], rank 2: all" in found
    assert found.endswith("depends on the rank or on its data.")


@pytest.mark.parametrize(
    ("said", "world_size", "text"),
    [
        ({0: USUAL, 2: USUAL}, 3, "Rank 1 has ended or does not answer; rank 0, 2 called all_reduce of"),
        ({0: USUAL}, 2, "Rank 1 has ended"),
        ({0: USUAL}, 3, "Another rank was lost; rank 0 called all_reduce of float [5]. If one's"),
        ({0: USUAL, 1: USUAL}, 2, ""),
        ({0: {}}, 2, ""),
    ],
)
def test_who_was_lost_is_the_only_one_missing(said, world_size, text) -> None:
    found = loss(said, world_size)
    assert found.startswith(text)
    assert bool(found) == bool(text)


def test_calls_are_listed_by_what_was_called() -> None:
    assert called({2: "b", 0: "a", 1: "b"}) == "rank 0 called a and rank 1, 2 called b"


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (RuntimeError("[gloo/transport/tcp/pair.cc:537] Read error: Connection reset by peer."), True),
        (RuntimeError("[gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 9000ms"), False),
        (RuntimeError("a size does not fit"), False),
        (ValueError("gloo"), False),
    ],
)
def test_a_loss_is_another_rank_s_closed_connection(error, expected) -> None:
    assert is_loss(error) == expected


def calls_of_a_rank(env: WorkerEnv) -> list[tuple[str, int]]:
    dist.all_reduce(torch.ones(3, 4, dtype=torch.half))
    dist.barrier()
    dist.all_to_all_single(torch.ones(4), torch.ones(4))
    return [(call.text, call.size_bytes) for call in latest_calls().values()][-3:]


def test_torch_records_what_was_called() -> None:
    expected = [
        ("all_reduce of half [3, 4]", 24),
        ("barrier", 0),
        ("all_to_all", 0),  # whose sizes may differ between the ranks
    ]
    assert run_ranks(2, calls_of_a_rank) == [expected, expected]


@pytest.mark.parametrize("dump", [None, lambda **_: "{}", lambda **_: "no JSON", lambda: "{}"])
def test_without_a_record_nothing_is_known(monkeypatch, dump) -> None:
    monkeypatch.setattr(torch._C._distributed_c10d, flight_recorder.DUMP, dump)
    assert latest_calls() == {}
