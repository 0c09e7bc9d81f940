"""A rank that calls a different collective: Gloo aborts some rank, often an innocent one."""

from __future__ import annotations

import os
import re
import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from launcher.distributed.flight_recorder import SIZES
from tests.faults.launching import run
from tests.faults.parent import Parent, write_recipe
from tests.faults.usercode import is_here, own_rank
from tests.limits import at_most

pytestmark = pytest.mark.timeout(60)

USUAL, SMALLER, LARGER = 1000, 7, 100_000


def slow(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.slow)


def assert_blames(text: str, odd: int, size: int, ranks: int) -> None:
    """With three ranks the right one is named and no other, with two ranks neither."""
    if ranks == 2:
        survivor, call = (1 - odd, USUAL) if size < USUAL else (odd, size)
        assert f"rank {survivor} called all_reduce of float [{call}]" in text
        assert (
            f'If that is "{SIZES}", the ranks called collectives of different sizes, rank {1 - survivor} the '
            "smaller one; either side may be wrong."
        ) in text
    elif size < USUAL:
        others = ", ".join(str(rank) for rank in range(ranks) if rank != odd)
        assert f"rank {others} called all_reduce of float [{USUAL}]" in text
        assert (
            f'If that is "{SIZES}", rank {odd} called a collective of a smaller size than the others.' in text
        )
    else:
        assert text.startswith(f"rank {odd} called another collective than the other ranks (")
        assert f"rank {odd}: all_reduce of float [{size}]" in text
        assert text.count(f"all_reduce of float [{USUAL}]") == 1
        assert "Every rank must call the same collectives" in text


@pytest.mark.parametrize(
    ("ranks", "odd", "size"),
    [
        (2, 0, LARGER),
        (3, 0, LARGER),
        (3, 1, SMALLER),
        *(slow(2, *case) for case in ((0, SMALLER), (1, SMALLER), (1, LARGER))),
        *(slow(3, *case) for case in ((0, SMALLER), (2, SMALLER), (1, LARGER), (2, LARGER))),
    ],
)
def test_the_parent_names_who_sends_another_size(tmp_path: Path, ranks, odd, size) -> None:
    call = f"torch.distributed.all_reduce(torch.ones({size} if RANK == {odd} else {USUAL}))"
    write_recipe(tmp_path, f"if step == 4: {call}")
    with Parent(tmp_path, "train.max_steps=100", nproc=ranks) as parent:
        assert parent.end() == 1
        text = str(parent.json("result.json")["error"])
        assert_blames(text, odd, size, ranks)
        assert f"error: {text}" in parent.stderr
        if ranks == 2 or size < USUAL:
            assert re.match(r"rank \d was killed by SIGABRT \(pid \d+\) in compute of step 4, while", text)


@pytest.mark.parametrize("died_by", ["SIGSEGV", slow("SIGABRT")])
def test_the_parent_names_who_calls_one_more(tmp_path: Path, died_by: str) -> None:
    """Gloo aborts another rank. Where memory was overwritten before it noticed, that rank dies by SIGSEGV."""
    jump = "LIBC.signal(signal.SIGABRT, ctypes.c_void_p(8))" if died_by == "SIGSEGV" else ""
    one_more = f"if step == 4 and RANK == 1: torch.distributed.all_reduce(torch.ones({LARGER}))"
    write_recipe(tmp_path, one_more, in_build=jump or "pass")
    with Parent(tmp_path, "train.max_steps=100", nproc=3) as parent:
        assert parent.end() == 1
        text = parent.json("result.json")["error"]
        assert text.startswith("rank 1 called another collective than the other ranks (")
        assert ("Segmentation fault" in parent.stderr) == (died_by == "SIGSEGV")


@pytest.mark.parametrize(
    ("crash", "died_by"),
    [
        ("ctypes.string_at(8)", "SIGSEGV"),
        slow("os.abort()", "SIGABRT"),
        slow("signal.raise_signal(7)", "SIGBUS"),
    ],
)
def test_a_crash_for_another_reason_is_the_rank_s_own(tmp_path: Path, crash: str, died_by: str) -> None:
    write_recipe(tmp_path, f"if step == 4 and RANK == 1: {crash}")
    with Parent(tmp_path, "train.max_steps=100", nproc=3) as parent:
        assert parent.end() == 1
        text = parent.json("result.json")["error"]
        assert text.startswith(f"rank 1 was killed by {died_by}")
        assert ", while rank 0, 2 called all_reduce of float [" in text
        assert "Fatal Python error: " in parent.stderr


@pytest.mark.slow
def test_an_abort_of_the_only_worker_shows_its_stack(tmp_path: Path) -> None:
    write_recipe(tmp_path, "if step == 4: os.abort()")
    with Parent(tmp_path, "train.max_steps=100", nproc=1) as parent:
        assert parent.end() == 1
        assert parent.json("result.json")["error"].startswith("rank 0 was killed by SIGABRT")
        assert "Fatal Python error: Aborted" in parent.stderr


def all_reduce(network: Any, batch: Any, odd: int, size: int) -> None:
    if is_here(network, 3):
        torch.distributed.all_reduce(torch.ones(size if own_rank() == odd else USUAL))


@pytest.mark.parametrize(
    ("ranks", "odd", "size"),
    [
        (3, 2, LARGER),
        slow(3, 0, LARGER),
        slow(3, 1, SMALLER),
        slow(3, 2, SMALLER),
        slow(2, 0, LARGER),
        slow(2, 1, SMALLER),
    ],
)
def test_without_a_parent_rank_0_writes_it_down(tmp_path: Path, ranks, odd, size) -> None:
    """Of the cases in which Gloo does not abort rank 0 itself."""
    ended = run(tmp_path / "run", ranks=ranks, user_code=partial(all_reduce, odd=odd, size=size))
    assert all(ended.codes), ended
    text = str(ended.result["error"])
    assert_blames(text if size > USUAL and ranks == 3 else text.partition("\n")[2], odd, size, ranks)
    if size > USUAL and ranks == 3:
        assert ended.codes[0] == 1
        assert f"error: {text[:60]}" in ended.outputs[0]
    assert ended.seconds < at_most(30)


def die_beside_a_comprehension(network: Any, batch: Any) -> None:
    if is_here(network, 3):
        if own_rank() == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        group = torch.distributed.group.WORLD
        [torch.distributed.all_reduce(torch.ones(size), group=group) for size in (USUAL, USUAL)]


@pytest.mark.slow
def test_a_rank_that_waits_for_a_comprehension_says_its_calls_in_time(tmp_path: Path) -> None:
    """Rank 1 is connected with 0 and 2, which have lost 3, and whose comprehensions hold the group."""
    ended = run(tmp_path / "run", ranks=4, user_code=die_beside_a_comprehension)
    assert all(ended.codes), ended
    text = str(ended.result["error"])
    assert "Rank 3 has ended or does not answer; rank 0, 1, 2 called all_reduce of float [1000]." in text


@pytest.mark.slow
def test_without_a_parent_all_leave_where_rank_0_was_aborted(tmp_path: Path) -> None:
    ended = run(tmp_path / "run", ranks=3, user_code=partial(all_reduce, odd=1, size=LARGER))
    assert all(ended.codes), ended
    assert ended.seconds < at_most(15)
    named = "error: rank 1 called another collective than"
    # A rank that has left before the other noticed could not know.
    assert any(named in output for output in ended.outputs) or ended.codes != [-6, 1, 1], ended
