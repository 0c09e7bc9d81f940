"""Background work in pieces with pauses in between, so that it takes little time from the training beside it.

Owns how long a thread pauses after each piece. Without pauses one or two steps beside a write took 2.1 to 2.5
times as long (ResNet-18, two ranks on two cores, n = 8). A low scheduling priority does not serve. Beside
threads that wait without sleeping, as those of OpenMP, such a thread is not run for seconds; and one that
loses its processor while it holds Python's lock stops all the others.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

# After a piece of 1 ms a pause of 39 ms.
SHARE = 0.025  # of the time of one processor
LONGEST_S = 5.0  # for all of the work, if its pauses can achieve that


class Throttle:
    """Runs `size_bytes` of work in pieces: a few ms of each 100. There are no pauses while `hurry` is set.

    A piece should take about a millisecond. All calls must come from one thread.
    """

    def __init__(self, size_bytes: int, hurry: threading.Event) -> None:
        self._left_bytes = size_bytes
        self._hurry = hurry
        self._ends_s = time.monotonic() + LONGEST_S

    def __call__(self, work: Callable[[], object], size_bytes: int) -> None:
        """Do one piece, which is `size_bytes` of the work, and pause."""
        began_s = time.thread_time()
        work()
        used_s = time.thread_time() - began_s
        self._left_bytes -= size_bytes
        left_s = max(0.0, self._ends_s - time.monotonic())
        as_divided_s = left_s * size_bytes / max(1, size_bytes + self._left_bytes)
        self._hurry.wait(min(used_s * (1 / SHARE - 1), as_divided_s))
