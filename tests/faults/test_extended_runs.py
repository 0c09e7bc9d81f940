"""A run that is done and trained longer: its schedule is another one, and that is said."""

from __future__ import annotations

import pytest

from tests.faults.launching import run

pytestmark = pytest.mark.timeout(90)


@pytest.mark.slow
@pytest.mark.parametrize(("schedule", "warns"), [("linear", True), ("constant", False)])
def test_a_longer_run_says_that_its_schedule_is_spread_anew(tmp_path, schedule, warns) -> None:
    for steps in (2, 4):
        ended = run(tmp_path / "run", f"schedule={schedule}", f"train.max_steps={steps}")
        assert ended.codes == [0], ended
    text = "train.max_steps is 2 there and 4 here: the schedule is spread over the new length"
    assert any(text in each for each in ended.warnings) == warns
