"""Lets one rank of a machine write what all of them read: a download, a cache, a tokenizer's files.

The other ranks wait at the store of the process group and not in a collective, which would time out.
"""

from __future__ import annotations

import os
import random
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import numpy
import torch

from launcher.distributed.alone import default_store
from launcher.errors import RecipeError, described
from launcher.os.stdio import write

POLL_S = 0.1
LINE_EVERY_S = 60.0  # that says whom a rank waits for
AFTER_RANK0_S = 1.0
DONE = "done"


@contextmanager
def rank0_first() -> Iterator[None]:
    """A context that rank 0 of each machine enters first, and the other ranks once it has left.

    For files that are written if they are missing. All ranks have to enter it equally often. If the block
    raises on rank 0, the others raise a RecipeError with the text of that exception. A process that trains
    alone enters at once. Random numbers that the block draws do not change those drawn after it, which rank 0
    alone would have drawn.
    """
    with _generators_kept(), _in_turn():
        yield


@contextmanager
def _generators_kept() -> Iterator[None]:
    states = random.getstate(), numpy.random.get_state(), torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(states[0])
        numpy.random.set_state(states[1])
        torch.set_rng_state(states[2])


@contextmanager
def _in_turn() -> Iterator[None]:
    store = default_store()
    if store is None:
        yield
        return
    rank, machine = os.environ["RANK"], os.environ.get("GROUP_RANK") or socket.gethostname()
    entered = store.add(f"rank0_first/entered/{rank}", 1)
    left = f"rank0_first/left/{machine}/{entered}"
    if os.environ.get("LOCAL_RANK", "0") == "0":
        try:
            yield
        except BaseException as error:
            store.set(left, described(error))
            raise
        store.set(left, DONE)
        return
    line_s = time.monotonic() + LINE_EVERY_S
    while not store.check([left]):  # not `wait`, which a signal cannot interrupt
        if time.monotonic() >= line_s:
            line_s += LINE_EVERY_S
            write(f"rank {rank} waits in rank0_first for rank 0 of this machine\n", sys.stderr)
        time.sleep(POLL_S)
    if (said := store.get(left).decode()) != DONE:
        # Rank 0 records its own error meanwhile, with its line: the first one is that of the run.
        time.sleep(AFTER_RANK0_S)
        raise RecipeError(f"rank 0 of this machine failed in rank0_first: {said}")
    yield
