"""Waits for what other ranks set in the store, with the errors of those that do not. Imports no torch."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from launcher.errors import StalledError

if TYPE_CHECKING:
    import torch.distributed as dist


def awaited(
    store: dist.Store, key: str, wait_s: float, rank: int, what: str, failure: Exception | None
) -> bytes:
    """The value that rank 0 sets. Raises `failure`, or else StalledError, if it does not."""
    from torch.distributed import DistError

    began = time.monotonic()
    try:
        if arrived(store, [key], wait_s):
            return store.get(key)
        text = "Rank 0 is still starting, hangs, or has died: its output says which."
    except DistError:
        text = "Then the store was gone: rank 0 or its torchrun has ended or died, or the link to it is down."
    waited_s = time.monotonic() - began
    raise failure or StalledError(
        f"rank {rank} waited {waited_s:.0f} s for rank 0 to hand over {what}. {text}"
    )


def arrived(store: dist.Store, keys: list[str], wait_s: float) -> bool:
    """Whether all keys are set within the time. Raises DistError if the store is gone.

    Asks again and again: a wait of the store's own would handle no signal, and print C++ frames at its end.
    """
    began = time.monotonic()
    while not store.check(keys):
        waited_s = time.monotonic() - began
        if waited_s >= wait_s:
            return False
        time.sleep(min(0.02 + waited_s / 50, 0.5))
    return True


def unset(store: dist.Store, keys: Sequence[str]) -> str:
    """The ranks, counted from 1, whose keys are not set, as part of a sentence."""
    return ", ".join(str(rank) for rank, key in enumerate(keys, start=1) if not store.check([key]))
