"""The pace of work in the background: in pieces, with pauses while no processor is free.

Owns how long a thread pauses between two pieces of its work. A low scheduling priority does not serve. Beside
threads that wait without sleeping, as those of OpenMP, such a thread is not run for seconds; and one that
loses its processor while it holds Python's lock stops all the others.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

SHARE = 0.025  # of the time of one processor, while none is free
LONGEST_S = 5.0  # for all of the work, if its pauses can achieve that
FREE = 0.8  # processors that were idle
MEASURED_S = 0.1  # the kernel counts hundredths of a second
UPTIME = Path("/proc/uptime")  # seconds since boot, and idle seconds of all processors together


class Pace:
    """Runs `size_bytes` of work in pieces: at once while a processor is free, else a few ms of each 100.

    A piece should take about a millisecond. All calls must come from one thread. There are no pauses while
    `hurry` is set.
    """

    def __init__(self, size_bytes: int, hurry: threading.Event) -> None:
        self._left_bytes = size_bytes
        self._hurry = hurry
        self._ends_s = time.monotonic() + LONGEST_S
        self._before = _Moment.now()
        self._free = False  # until it is measured

    def __call__(self, work: Callable[[], object], size_bytes: int) -> None:
        """Do one piece, which is `size_bytes` of the work."""
        began_s = time.thread_time()
        work()
        used_s = time.thread_time() - began_s
        self._left_bytes -= size_bytes
        if not self._processor_is_free():
            self._hurry.wait(self._pause_s(used_s, size_bytes))

    def _processor_is_free(self) -> bool:
        """Whether one was, but for this thread, when it was last measured."""
        before = self._before
        if time.monotonic() - before.at_s >= MEASURED_S:
            now = _Moment.now()
            idle_s = now.idle_s - before.idle_s + now.used_s - before.used_s
            self._free = idle_s >= FREE * (now.at_s - before.at_s)
            self._before = now
        return self._free

    def _pause_s(self, used_s: float, size_bytes: int) -> float:
        """As long as keeps the share, unless all pieces together would then take too long."""
        left_s = max(0.0, self._ends_s - time.monotonic())
        return min(used_s * (1 / SHARE - 1), left_s * size_bytes / max(1, size_bytes + self._left_bytes))


@dataclass(frozen=True)
class _Moment:
    """Seconds: a clock, time that processors were idle, time that this thread has used."""

    at_s: float
    idle_s: float
    used_s: float

    @classmethod
    def now(cls) -> _Moment:
        return cls(time.monotonic(), _idle_s(), time.thread_time())


def _idle_s() -> float:
    """Sum of the idle seconds of this process's processors; constant where the system does not tell."""
    with suppress(OSError, ValueError, IndexError, AttributeError):
        if len(os.sched_getaffinity(0)) == os.cpu_count():  # else others' idle time would be counted
            return float(UPTIME.read_text().split()[1])
    return 0.0
