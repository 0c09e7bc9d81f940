"""Collectives that wait as NCCL's do: in C, for ever where another rank is lost, and deaf to signals.

Over Gloo a lost rank raises in the ranks that wait for it. `make_deaf` keeps that from Python: the main
thread locks a mutex of C, which a handler of Python cannot interrupt, and another thread unlocks it where the
collective has succeeded.
"""

from __future__ import annotations

import ctypes
import threading
from typing import Any

import torch.distributed as dist

SIZE_BYTES = 64  # more than a pthread_mutex_t of Linux takes
LIBRARY = ctypes.CDLL(None)


def make_deaf() -> None:
    """From here on every wait of this process for a collective is one in C."""
    wait = dist.Work.wait

    def wait_in_c(work: dist.Work, *args: Any) -> bool:
        mutex = ctypes.create_string_buffer(SIZE_BYTES)
        LIBRARY.pthread_mutex_lock(mutex)

        def unlock_when_done() -> None:
            try:
                wait(work, *args)
            except RuntimeError:
                threading.Event().wait()  # NCCL tells nobody in Python
            LIBRARY.pthread_mutex_unlock(mutex)

        threading.Thread(target=unlock_when_done, daemon=True).start()
        LIBRARY.pthread_mutex_lock(mutex)
        return True

    dist.Work.wait = wait_in_c  # type: ignore[method-assign, assignment]
