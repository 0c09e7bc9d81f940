"""A run that is done and trained longer: its schedule is another one, and that is said."""

from __future__ import annotations

import pytest

from tests.faults.launching import EPOCH, run

pytestmark = pytest.mark.timeout(90)


def test_both_rates_are_named_and_the_advice_keeps_the_old_one(tmp_path) -> None:
    directory = tmp_path / "run"
    first = run(directory, "train.epochs=1")
    last = first.events("step")[-1]["lr"]
    longer = run(directory, "train.epochs=2")
    assert longer.codes == [0], longer
    (text,) = (each for each in longer.warnings if "schedule" in each)
    rate = next(event["lr"] for event in longer.events("step") if event["step"] == EPOCH + 1)
    assert f"was for {EPOCH} steps and is for {2 * EPOCH} now" in text
    assert f"was {last:.3g} in the last step, and is {rate:.3g} in step {EPOCH + 1}." in text
    assert rate > 10 * last

    other = tmp_path / "other"
    run(other, "train.epochs=1")
    kept = run(other, "train.epochs=2", *text.partition("To keep the old one: ")[2].split())
    assert [event["lr"] for event in kept.events("step")][EPOCH:] == pytest.approx([last] * EPOCH, rel=0.01)
    assert not any("To keep the old one" in each for each in kept.warnings)


def test_a_run_that_is_stopped_and_resumed_has_no_other_rate(tmp_path) -> None:
    run(tmp_path / "run", "train.epochs=1", "schedule=constant")
    longer = run(tmp_path / "run", "train.epochs=2", "schedule=constant")
    assert longer.codes == [0]
    assert not any("To keep the old one" in each for each in longer.warnings)
