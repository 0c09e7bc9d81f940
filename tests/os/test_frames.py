"""What the frames of a failure hold is freed, whatever kind of function they belong to."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

import pytest

from launcher.os.frames import release


class Held:
    """Something that has to be gone, such as a process group."""


def fail(held: Held) -> None:
    raise ValueError("planned")


def in_a_comprehension(held: Held) -> None:
    [fail(held) for _ in range(2)]


def in_a_generator(held: Held) -> None:
    list(fail(held) for _ in range(2))  # noqa: C400


def in_a_lambda(held: Held) -> None:
    (lambda: fail(held))()


def as_a_cause(held: Held) -> None:
    try:
        in_a_comprehension(held)
    except ValueError as error:
        raise RuntimeError("a failure") from error


@pytest.mark.parametrize("way", [in_a_comprehension, in_a_generator, in_a_lambda, as_a_cause])
def test_nothing_is_kept(way: Callable[[Held], None]) -> None:
    held = Held()
    seen = weakref.ref(held)
    try:  # not pytest.raises, which holds the traceback itself
        way(held)
    except (ValueError, RuntimeError) as error:
        del held
        assert seen() is not None
        release(error)
        gc.collect()
        assert seen() is None
    else:
        pytest.fail("nothing was raised")
