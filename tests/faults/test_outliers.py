"""A run that skips outliers: all ranks skip the same steps, which are named, counted and resumed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.faults.launching import Ended, run

RECIPE = Path(__file__).with_name("outlying.py")
SCALE = ("precision.loss_scale.init_scale=16", "precision.loss_scale.growth_interval=1000")
SLOW = ("optim.lr=1e-4", "train.epochs=4")  # the outlier of the first steps, which is applied, changes little


def trained(directory: Path, *words: str, **options: Any) -> Ended:
    common = (f"recipes.path={RECIPE}", "recipe.uses=outlying", *SCALE)
    return run(
        directory,
        *common,
        "precision.skip_outliers=6",
        "precision.outlier_window=8",
        *SLOW,
        *words,
        **options,
    )


def outliers(ended: Ended) -> list[int]:
    return [event["step"] for event in ended.events("outlier")]


def test_outliers_are_skipped_by_all_ranks_named_and_counted_and_a_resume_ends_alike(tmp_path: Path) -> None:
    whole = trained(tmp_path / "whole", ranks=2)
    assert whole.digest  # all codes are 0
    assert len(outliers(whole)) >= 2
    assert whole.result["outlier_steps"] == whole.result["skipped_steps"] == len(outliers(whole))
    assert [event["count"] for event in whole.events("outlier")] == [*range(1, len(outliers(whole)) + 1)]
    assert not whole.events("overflow")
    assert f"step {outliers(whole)[0]} was skipped as an outlier: its loss " in whole.warnings[0]
    start = f"checkpoint.resume={whole.checkpoints[20]}"
    resumed = trained(tmp_path / "resumed", start, ranks=2)
    assert resumed.digest == whole.digest
    assert resumed.result["outlier_steps"] == whole.result["outlier_steps"]
    assert outliers(resumed) == [step for step in outliers(whole) if step > 20]


@pytest.mark.slow
def test_without_the_key_no_finite_step_is_skipped(tmp_path: Path) -> None:
    ended = trained(tmp_path / "run", "precision.skip_outliers=null", "precision.outlier_window=128")
    assert ended.result["skipped_steps"] == 0
    assert "outlier_steps" not in ended.result
