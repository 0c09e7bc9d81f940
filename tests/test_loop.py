"""The course of a run: how many steps, and after which of them it evaluates."""

import pytest

from launcher.loop import Course


@pytest.mark.parametrize(
    ("epochs", "max_steps", "every", "total", "evaluated"),
    [
        (3, None, 1, 30, [10, 20, 30]),
        (3, None, 2, 30, [20, 30]),
        (3, None, 5, 30, [30]),
        (3, 25, 1, 25, [10, 20, 25]),
        (3, 7, 1, 7, [7]),
        (3, 1000, 1, 30, [10, 20, 30]),
    ],
)
def test_course(epochs, max_steps, every, total, evaluated) -> None:
    course = Course.of(10, epochs, max_steps, every)
    assert course.total_steps == total
    assert [step for step in range(1, total + 1) if course.evaluates_after(step)] == evaluated
