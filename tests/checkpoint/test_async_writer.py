"""Pauses of work in the background. Of times only lower bounds are asserted: the machine may be busy."""

from __future__ import annotations

import threading
import time

from launcher.checkpoint import async_writer as throttle
from launcher.checkpoint.async_writer import WriteThrottle


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


def test_pauses_keep_the_share() -> None:
    pauses, began_s = Pauses(), time.monotonic()
    steady = WriteThrottle(pauses)
    for _ in range(10):
        compute()
        steady.pause()
    assert time.monotonic() - began_s >= 0.01 / throttle.SHARE
    assert len(pauses.seconds) == 10
    assert min(pauses.seconds) >= 0.001 * (1 / throttle.SHARE - 1)


def test_pauses_end_in_time_whatever_the_share(monkeypatch) -> None:
    monkeypatch.setattr(throttle, "SHARE", 1e-9)
    monkeypatch.setattr(throttle, "LONGEST_S", 0.2)
    pauses = Pauses()
    steady = WriteThrottle(pauses)
    for _ in range(10):
        compute()
        steady.pause()
    assert sum(pauses.seconds) <= 0.2 + 1e-9


def test_a_pause_ends_when_there_is_a_hurry(monkeypatch) -> None:
    monkeypatch.setattr(throttle, "SHARE", 1e-9)
    monkeypatch.setattr(throttle, "LONGEST_S", 3600.0)
    hurry, done = threading.Event(), threading.Event()

    def write() -> None:
        steady = WriteThrottle(hurry)
        compute()
        done.set()
        steady.pause()
        compute()
        steady.pause()  # would pause for most of an hour

    thread = threading.Thread(target=write)
    thread.start()
    assert done.wait(20)
    hurry.set()
    thread.join(20)
    assert not thread.is_alive()
