"""Which occurrences are due for a warning."""

from __future__ import annotations

from launcher.trainer.warning_log import PowerOfTenThrottle


def test_the_first_the_tenth_and_the_hundredth_of_each_are_due() -> None:
    found = PowerOfTenThrottle()
    assert [times for _ in range(1100) if (times := found.add(3))] == [1, 10, 100, 1000]
    assert (found.add(0), found.add(0)) == (1, 0), "each has a count of its own"
