"""A rank that crashes in C is named, although the others fail of it too."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.parent import Parent, write_recipe

pytestmark = pytest.mark.timeout(60)


@pytest.mark.parametrize(
    ("crash", "died_by"),
    [
        ("ctypes.string_at(8)", "SIGSEGV"),
        pytest.param("os.abort()", "SIGABRT", marks=pytest.mark.slow),
        pytest.param("signal.raise_signal(7)", "SIGBUS", marks=pytest.mark.slow),
    ],
)
def test_a_rank_that_crashes_is_named(tmp_path: Path, crash: str, died_by: str) -> None:
    write_recipe(tmp_path, f"if step == 4 and RANK == 1: {crash}")
    with Parent(tmp_path, "train.max_steps=100", nproc=3) as parent:
        assert parent.end() == 1
        text = parent.json("result.json")["error"]
        assert text.startswith(f"rank 1 was killed by {died_by}")
        assert ("TORCH_DISTRIBUTED_DEBUG=DETAIL" in text) == (died_by == "SIGABRT")
        assert "Fatal Python error: " in parent.stderr
