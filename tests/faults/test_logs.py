"""What the console and logs/rank<k>.log have: launch.log_level, and one traceback for each crash."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.launching import Ended, run
from tests.faults.parent import Parent, write_recipe

pytestmark = pytest.mark.timeout(90)
TWO_STEPS = ("train.max_steps=2", "checkpoint.every_steps=null")
FAILING = "raise ValueError('no loss today')"


def of_level(ended: Ended, rank: int, level: str) -> list[str]:
    return [line for line in ended.log(rank).splitlines() if f" {level} launcher: " in line]


def kinds_of_lines(ended: Ended) -> list[str]:
    """The first word of each line of the console; the verdict on the time may differ."""
    return [line.partition(" ")[0] for line in ended.outputs[0].splitlines() if "-bound: " not in line]


@pytest.mark.slow
def test_the_level_is_that_of_the_logs_and_the_console_is_the_same(tmp_path: Path) -> None:
    fine = run(tmp_path / "fine", *TWO_STEPS, "launch.log_level=debug", ranks=2)
    assert fine.codes == [0, 0], fine
    for rank in (0, 1):
        steps = [line.partition("DEBUG launcher: ")[2][:7] for line in of_level(fine, rank, "DEBUG")]
        assert steps == ["step 1:", "step 2:"], "one line per step and rank"
        (start,) = of_level(fine, rank, "INFO")
        assert f"rank {rank} of 2, process " in start
    coarse = run(tmp_path / "rude", *TWO_STEPS, "launch.log_level=error", ranks=2)
    assert [coarse.log(rank) for rank in (0, 1)] == ["", ""]
    assert kinds_of_lines(fine) == kinds_of_lines(coarse)


@pytest.mark.slow
def test_a_failure_is_logged_under_every_level(tmp_path: Path) -> None:
    write_recipe(tmp_path, in_step=FAILING)
    with Parent(tmp_path, "launch.log_level=error") as parent:
        assert parent.end() == 1
        for rank in (0, 1):
            assert "ERROR launcher: rank" in (parent.run_dir / "logs" / f"rank{rank}.log").read_text()
