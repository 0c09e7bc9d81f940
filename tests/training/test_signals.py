"""Signals become requests; one that comes too late to be heeded is not swallowed where others wait for it."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from launcher.errors import DivergedError, PreemptedError
from launcher.training.signals import heeded


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
        signal.raise_signal(signal.SIGUSR1)
        assert (requests.take_save(), requests.take_save()) == (True, False)
        for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGINT):
            signal.raise_signal(number)
        assert requests.stop == signal.SIGTERM
    assert usual_course == []
    signal.raise_signal(signal.SIGTERM)
    assert usual_course == [signal.SIGTERM]


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGQUIT])
def test_a_hangup_and_a_quit_are_requests_to_stop(number) -> None:
    with heeded(alone=True) as requests:
        signal.raise_signal(number)
        assert requests.stop == number
    assert signal.getsignal(number) == signal.SIG_DFL


def test_a_hangup_that_was_ignored_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with heeded(alone=True) as requests:
            signal.raise_signal(signal.SIGHUP)
            assert requests.stop is None
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


START = [sys.executable, "-m", "launcher", "recipe=resnet18", "--cfg", "job"]
ROOT = Path(__file__).parents[2]


def mask(pid: int, name: str) -> int:
    """The signals that the process ignores (SigIgn) or catches (SigCgt), by the kernel's word."""
    (found,) = re.findall(rf"{name}:\s*(\w+)", Path(f"/proc/{pid}/status").read_text())
    return int(found, 16)


def wait_for_handler(process: subprocess.Popen[str], number: int, name: str) -> None:
    while not mask(process.pid, name) >> (number - 1) & 1:
        assert process.poll() is None, "it ended before it had a handler"


def test_a_request_to_save_during_the_start_kills_nothing() -> None:
    process = subprocess.Popen(START, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    wait_for_handler(process, signal.SIGUSR1, "SigIgn")
    while process.poll() is None:
        process.send_signal(signal.SIGUSR1)
        time.sleep(0.005)
    assert process.communicate()[0]
    assert process.returncode == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT])
def test_a_stop_during_the_start_has_a_reason(number) -> None:
    process = subprocess.Popen(START, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    wait_for_handler(process, number, "SigCgt")
    process.send_signal(number)
    (line,) = process.communicate()[1].splitlines()
    assert line.startswith(f"error: stopped by {number.name} while nothing was trained;")
    assert process.returncode == 128 + number


def test_a_hangup_that_is_ignored_stops_no_start() -> None:
    """As nohup asks for."""
    process = subprocess.Popen(["nohup", *START], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    wait_for_handler(process, signal.SIGUSR1, "SigIgn")
    process.send_signal(signal.SIGHUP)
    assert process.communicate()[0]
    assert process.returncode == 0


def test_a_second_ctrl_c_interrupts_unless_it_is_the_first_one_passed_on() -> None:
    with heeded(alone=True) as requests:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        assert requests.stop == signal.SIGINT
        requests._since_s -= 2
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def fail_after_a_sigterm(error: Exception, alone: bool) -> None:
    with heeded(alone):
        signal.raise_signal(signal.SIGTERM)
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
