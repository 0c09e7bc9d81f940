"""What the frames of a failure hold is freed, whatever kind of function they belong to."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator

import pytest

from launcher.os.frames import release


class Held:
    """Something that has to be gone, such as a process group."""


def fail(held: Held) -> None:
    raise ValueError("planned")


def in_a_loop(held: Held) -> None:
    for _ in range(2):
        fail(held)


def in_a_comprehension(held: Held) -> None:
    [fail(held) for _ in range(2)]


def in_nested_comprehensions(held: Held) -> None:
    [[fail(held) for _ in range(2)] for _ in range(2)]


def in_its_innermost_frame(held: Held) -> None:
    [int("planned") for _ in range(2) if held]


def in_a_generator(held: Held) -> None:
    list(fail(held) for _ in range(2))  # noqa: C400


def in_a_generator_function(held: Held) -> None:
    def failing(held: Held) -> Iterator[None]:
        yield fail(held)

    list(failing(held))


def in_a_lambda(held: Held) -> None:
    (lambda: fail(held))()


def within_a_decorator(held: Held) -> None:
    def guarded(function: Callable[[], None]) -> Callable[[], None]:
        return lambda: function()

    guarded(lambda: fail(held))()


def as_a_cause(held: Held) -> None:
    try:
        in_a_comprehension(held)
    except ValueError as error:
        raise RuntimeError("a failure") from error


def while_another_is_handled(held: Held) -> None:
    try:
        in_a_lambda(held)
    except ValueError:
        raise RuntimeError("a failure") from None


WAYS = [
    in_a_loop,
    in_a_comprehension,
    in_nested_comprehensions,
    in_its_innermost_frame,
    in_a_generator,
    in_a_generator_function,
    in_a_lambda,
    within_a_decorator,
    as_a_cause,
    while_another_is_handled,
]


@pytest.mark.sampled(every=7, first=3)
@pytest.mark.parametrize("way", WAYS)
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
