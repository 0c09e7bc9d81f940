"""Pauses of work in the background. Of times only lower bounds are asserted: the machine may be busy."""

from __future__ import annotations

import os
import threading
import time

import pytest

from launcher.checkpoint import pace
from launcher.checkpoint.pace import Pace


class Pauses(threading.Event):
    """Records for how long it was waited for."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds: list[float] = []

    def wait(self, timeout: float | None = None) -> bool:
        assert timeout is not None
        self.seconds.append(timeout)
        return super().wait(timeout)


def compute(seconds: float = 0.001) -> None:
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


@pytest.fixture
def uptime(tmp_path, monkeypatch):
    """What the system says of idle processors: none, until the file is written again."""
    file = tmp_path / "uptime"
    file.write_text("1000.00 50.00\n")
    monkeypatch.setattr(pace, "UPTIME", file)
    monkeypatch.setattr(os, "cpu_count", lambda: len(os.sched_getaffinity(0)))  # also where it may use fewer
    return file


def test_pauses_keep_the_share_while_no_processor_is_free(uptime) -> None:
    pauses, began_s = Pauses(), time.monotonic()
    steady = Pace(10, pauses)
    for _ in range(10):
        steady(compute, 1)
    assert time.monotonic() - began_s >= 0.01 / pace.SHARE
    assert len(pauses.seconds) == 10
    assert min(pauses.seconds) >= 0.001 * (1 / pace.SHARE - 1)


def test_no_pauses_while_a_processor_is_free(uptime, monkeypatch) -> None:
    pauses = Pauses()
    steady = Pace(1000, pauses)
    monkeypatch.setattr(pace, "MEASURED_S", 0.02)

    def piece(idle_s: float) -> None:
        time.sleep(0.03)
        uptime.write_text(f"1000.00 {idle_s}\n")
        compute()

    steady(lambda: piece(50.0), 1)
    assert len(pauses.seconds) == 1
    steady(lambda: piece(1e6), 1)
    steady(compute, 1)  # too soon to measure again
    assert len(pauses.seconds) == 1
    steady(lambda: piece(1e6), 1)  # none is idle any more
    assert len(pauses.seconds) == 2


def test_the_processor_that_the_work_itself_uses_was_free(uptime, monkeypatch) -> None:
    pauses = Pauses()
    steady = Pace(1000, pauses)
    monkeypatch.setattr(pace, "MEASURED_S", 0.02)
    monkeypatch.setattr(pace, "FREE", 1e-3)  # this thread gets that much of one on any machine
    steady(lambda: compute(2 * pace.MEASURED_S), 1)
    assert not pauses.seconds


def test_pauses_end_in_time_whatever_the_share(uptime, monkeypatch) -> None:
    monkeypatch.setattr(pace, "SHARE", 1e-9)
    monkeypatch.setattr(pace, "LONGEST_S", 0.2)
    pauses = Pauses()
    steady = Pace(10, pauses)
    for _ in range(10):
        steady(compute, 1)
    assert sum(pauses.seconds) <= 0.2 + 1e-9
    assert pauses.seconds[0] >= 0.01, "spread evenly"


def test_a_pause_ends_when_there_is_a_hurry(uptime, monkeypatch) -> None:
    monkeypatch.setattr(pace, "SHARE", 1e-9)
    monkeypatch.setattr(pace, "LONGEST_S", 3600.0)
    hurry, done = threading.Event(), threading.Event()
    steady = Pace(3, hurry)
    thread = threading.Thread(target=lambda: steady(lambda: (compute(), done.set()), 1))
    thread.start()
    assert done.wait(20)
    hurry.set()
    thread.join(20)
    assert not thread.is_alive()
    steady(compute, 2)  # would pause for most of an hour


@pytest.mark.parametrize("text", [None, "", "1000.00\n", "a b\n"])
def test_unknown_idle_time_counts_as_none(uptime, text: str | None) -> None:
    assert pace._idle_s() == 50.0
    uptime.unlink() if text is None else uptime.write_text(text)
    assert pace._idle_s() == 0.0


def test_idle_processors_that_this_process_may_not_use_are_not_free(uptime, monkeypatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: len(os.sched_getaffinity(0)) + 1)
    assert pace._idle_s() == 0.0
