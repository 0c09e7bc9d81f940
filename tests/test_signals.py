"""Signals become requests; one that comes too late to be heeded is not swallowed where others wait for it."""

from __future__ import annotations

import os
import signal

import pytest

from launcher.errors import DivergedError, PreemptedError
from launcher.signals import heeded


@pytest.fixture
def usual_course():
    """The signals that arrive as if there were no run, instead of ending this process."""
    received: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: received.append(number))
    yield received
    signal.signal(signal.SIGTERM, before)


def test_requests_are_flags(usual_course) -> None:
    with heeded(alone=False) as requests:
        assert (requests.stop, requests.take_save()) == (None, False)
        os.kill(os.getpid(), signal.SIGUSR1)
        assert (requests.take_save(), requests.take_save()) == (True, False)
        for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGINT):
            os.kill(os.getpid(), number)
        assert requests.stop == signal.SIGTERM
    assert usual_course == []
    os.kill(os.getpid(), signal.SIGTERM)
    assert usual_course == [signal.SIGTERM]


def test_a_second_ctrl_c_interrupts_unless_it_is_the_first_one_passed_on() -> None:
    with heeded(alone=True) as requests:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        assert requests.stop == signal.SIGINT
        requests._since_s -= 2
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


def fail_after_a_sigterm(error: Exception, alone: bool) -> None:
    with heeded(alone):
        os.kill(os.getpid(), signal.SIGTERM)
        raise error


@pytest.mark.parametrize(
    ("error", "alone", "passed_on"),
    [
        (RuntimeError("connection reset by peer"), False, True),
        (RuntimeError("a bug"), True, False),
        (PreemptedError("saved"), False, False),
        (DivergedError("on all ranks alike"), False, False),
    ],
)
def test_a_sigterm_that_comes_too_late(usual_course, error, alone, passed_on) -> None:
    with pytest.raises(type(error)):
        fail_after_a_sigterm(error, alone)
    assert usual_course == [signal.SIGTERM] * passed_on
