"""reduce_lr_on_plateau.factor on two ranks: the rate falls on both, and over a resume to the same weights."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.launching import run

WORDS = (
    *("train.max_steps=8", "train.eval_every_steps=2", "checkpoint.every_steps=1", "schedule=constant"),
    *(
        "reduce_lr_on_plateau.factor=0.5",
        "reduce_lr_on_plateau.patience=0",
        "reduce_lr_on_plateau.threshold=0.9",
        "train.log_every_steps=1",
    ),
)


@pytest.mark.slow
def test_a_resumed_run_has_the_rates_and_the_weights_of_the_whole_one(tmp_path: Path) -> None:
    whole = run(tmp_path / "whole", *WORDS, ranks=2)
    assert whole.codes == [0, 0], whole
    rates = [event["lr"] for event in whole.events("step")]
    assert rates[-1] < rates[0]
    resumed = run(tmp_path / "from5", *WORDS, f"checkpoint.resume={whole.checkpoints[5]}", ranks=2)
    assert resumed.digest == whole.digest
    assert [event["lr"] for event in resumed.events("step")] == rates[5:]
