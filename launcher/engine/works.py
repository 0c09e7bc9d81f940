"""How long the works of collectives live: a Gloo thread never holds the last reference to one.

The thread that ran a work drops its reference some time after wait() has returned. If that is the last one,
it frees Python's tensors and needs the interpreter's lock for that; a thread that asks for the lock while the
interpreter shuts down is ended, and the process with it: "terminate called without an active exception",
SIGABRT. Plain torch ends so too after an all-reduce of a tensor. DistributedDataParallel does not, because
Python does not know the tensors of its buckets.
"""

from __future__ import annotations

import atexit
import ctypes
from collections import deque

import torch.distributed as dist
from torch import Tensor

# Of the process, as its end is. A group has two threads, and each of them lags behind by one work at most.
_under_way: set[dist.Work] = set()
_finished: deque[dist.Work] = deque(maxlen=8)


def started(work: dist.Work | None) -> dist.Work:
    """A collective that was called with `async_op=True`: to be given to `wait_for` later."""
    assert work is not None, "this process is not in the group"
    _under_way.add(work)
    return work


def wait_for(work: dist.Work, tensor: Tensor) -> None:
    """Wait for a collective on `tensor` (on CUDA: make the stream wait)."""
    work.wait()
    _under_way.discard(work)
    if tensor.device.type == "cpu":
        _finished.append(work)


def run(work: dist.Work | None, tensor: Tensor) -> None:
    """Start a collective on `tensor`, called with `async_op=True`, and wait for it."""
    wait_for(started(work), tensor)


def release() -> None:
    """Drop all works. Gloo closes a group's connections only when nothing holds one of its works.

    For a rank that has failed and lives on: the others wait in a collective until its connections close.
    """
    _under_way.clear()
    _finished.clear()


@atexit.register
def _keep_all() -> None:
    """Nothing frees them while the interpreter shuts down, whether their threads are done or not."""
    for work in (*_under_way, *_finished):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(work))
