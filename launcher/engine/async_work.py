"""Keeps the `dist.Work` of collectives alive: a Gloo thread never holds the last reference to one.

Owns the collectives on one tensor that are waited for at once, too.

The thread that ran a collective drops its reference some time after wait() has returned. If that is the last
reference, the thread frees Python tensors, for which it needs the GIL. A thread that requests the GIL during
interpreter shutdown is terminated, and the process aborts with SIGABRT ("terminate called without an active
exception"). Plain torch aborts the same way after an all-reduce of a tensor. DistributedDataParallel does
not, because its bucket tensors have no Python objects.
"""

from __future__ import annotations

import atexit
import ctypes
import time
from collections import deque

import torch.distributed as dist
from torch import Tensor

Group = dist.ProcessGroup | None  # None: one process

KEPT_S = 1.0  # longer than a thread of Gloo takes to drop a finished work, on a loaded machine too

# Per process, as interpreter shutdown is.
_under_way: set[dist.Work] = set()
_finished: deque[tuple[float, dist.Work]] = deque()  # with when


def started(work: dist.Work | None) -> dist.Work:
    """Register a collective called with `async_op=True`; pass the result to `wait_for` later."""
    assert work is not None, "this process is not in the group"
    _under_way.add(work)
    return work


def wait_for(work: dist.Work | None, tensor: Tensor) -> None:
    """Wait for a collective on `tensor` that was `started` (on CUDA: make the stream wait)."""
    assert work is not None
    work.wait()
    _under_way.discard(work)
    if tensor.device.type == "cpu":
        now = time.monotonic()
        _finished.append((now, work))
        while now - _finished[0][0] > KEPT_S:
            _finished.popleft()


def run(work: dist.Work | None, tensor: Tensor) -> None:
    """Start a collective on `tensor`, called with `async_op=True`, and wait for it."""
    wait_for(started(work), tensor)


def all_reduce(tensor: Tensor, group: Group, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> None:
    """Replace `tensor` by the sum, or another `op`, over the ranks. `group` None is one process."""
    if group is not None:
        run(dist.all_reduce(tensor, op=op, group=group, async_op=True), tensor)


def broadcast(tensor: Tensor, group: dist.ProcessGroup, rank: int = 0) -> None:
    """Replace `tensor` by that of `rank` of the group."""
    run(dist.broadcast(tensor, group=group, group_src=rank, async_op=True), tensor)


def release() -> None:
    """Drop all works. Gloo closes a group's connections only when none of its works is referenced.

    For a rank that has failed but keeps running: other ranks wait in a collective until its connections
    close.
    """
    _under_way.clear()
    _finished.clear()


@atexit.register
def _keep_all() -> None:
    """Leak a reference to each work, so that nothing frees one during interpreter shutdown."""
    for work in (*_under_way, *(work for _, work in _finished)):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(work))
