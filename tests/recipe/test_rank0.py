"""A file that a recipe writes if it is missing is written once, by rank 0, and read by all."""

from __future__ import annotations

import random
from pathlib import Path

import numpy
import pytest
import torch

from launcher.recipe import rank0_first
from tests.faults.parent import Parent, write_recipe

CACHED = """
from pathlib import Path
from launcher.recipe import rank0_first

def cached():
    for number in range(2):
        with rank0_first():
            if not Path(f"cache-{number}").exists():
                time.sleep(0.5)
                IN_BLOCK
                with open("written", "a") as file:
                    file.write(f"{RANK} ")
                Path(f"cache-{number}").touch()
    return torch.randn(32, 4)  # the same on all ranks, whatever the block has drawn


@recipe("tiny")
"""


def run(directory: Path, in_block: str, nproc: int | None) -> tuple[int, str]:
    write_recipe(directory)
    recipe = directory / "tiny.py"
    text = recipe.read_text().replace('@recipe("tiny")', CACHED.replace("IN_BLOCK", in_block))
    recipe.write_text(
        text.replace("x = torch.randn(32, 4, generator=torch.Generator().manual_seed(0))", "x = cached()")
    )
    with Parent(directory, "train.epochs=1", nproc=nproc) as parent:
        return parent.end(), parent.stderr


@pytest.mark.parametrize("nproc", [2, None])
def test_one_rank_writes_and_the_others_read(tmp_path: Path, nproc) -> None:
    assert run(tmp_path, "torch.rand(3)", nproc)[0] == 0
    assert (tmp_path / "written").read_text() == "0 0 "


def test_so_it_is_within_build_model(tmp_path: Path) -> None:
    """There the process group is hidden from the recipe."""
    write_recipe(tmp_path, in_build="cached()")
    recipe = tmp_path / "tiny.py"
    recipe.write_text(recipe.read_text().replace('@recipe("tiny")', CACHED.replace("IN_BLOCK", "pass")))
    with Parent(tmp_path, "train.epochs=1", nproc=2) as parent:
        assert parent.end() == 0, parent.stderr
    assert (tmp_path / "written").read_text() == "0 0 "


def test_an_exception_of_rank_0_is_that_of_the_run(tmp_path: Path) -> None:
    code, stderr = run(tmp_path, "raise OSError('no route to the mirror')", 2)
    assert code == 1
    assert "error: rank 0 failed: " in stderr
    assert "OSError: no route to the mirror" in stderr
    assert not (tmp_path / "written").exists()
    assert "rank 1" not in stderr, "which only waited"


def test_what_the_block_draws_changes_nothing_that_is_drawn_after_it() -> None:
    """A process that trains alone resumes with the file there, and then draws nothing in the block."""

    def drawn() -> list[float]:
        return [random.random(), float(numpy.random.random()), float(torch.rand(()))]

    random.seed(0), numpy.random.seed(0), torch.manual_seed(0)
    expected = drawn()
    random.seed(0), numpy.random.seed(0), torch.manual_seed(0)
    with rank0_first():
        drawn()
    assert drawn() == expected
