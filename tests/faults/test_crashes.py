"""A rank that dies in C beside others: its own crash, or Gloo's abort of a rank that received too much."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.parent import Parent, write_recipe

pytestmark = pytest.mark.timeout(60)


def test_an_abort_by_gloo_names_the_rank_and_what_to_look_for(tmp_path: Path) -> None:
    call = "torch.distributed.all_reduce(torch.ones(100_000 if RANK == 0 else 1000))"
    write_recipe(tmp_path, f"if step == 4: {call}")
    with Parent(tmp_path, "train.max_steps=100", nproc=2) as parent:
        assert parent.end() == 1
        text = str(parent.json("result.json")["error"])
        assert text.startswith("rank 1 was killed by SIGABRT")
        assert "look for a collective in the recipe that not every rank calls" in text
        assert f"error: {text}" in parent.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("crash", "died_by"),
    [("ctypes.string_at(8)", "SIGSEGV"), ("os.abort()", "SIGABRT"), ("signal.raise_signal(7)", "SIGBUS")],
)
def test_a_crash_of_one_rank_is_named_with_its_stack(tmp_path: Path, crash: str, died_by: str) -> None:
    write_recipe(tmp_path, f"if step == 4 and RANK == 1: {crash}")
    with Parent(tmp_path, "train.max_steps=100", nproc=3) as parent:
        assert parent.end() == 1
        assert parent.json("result.json")["error"].startswith(f"rank 1 was killed by {died_by}")
        assert "Fatal Python error: " in parent.stderr
