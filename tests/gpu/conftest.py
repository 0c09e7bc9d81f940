"""What every test on a GPU needs: the device, and a process group of one.

LAUNCHER_TEST_DEVICE=cpu runs their code on a CPU, for whoever writes one without a GPU at hand: tests that
measure the device itself are skipped then, and passing says nothing about CUDA.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from scripts.bench.group_of_one import collectives_of_one


def on_cpu() -> bool:
    return os.environ.get("LAUNCHER_TEST_DEVICE") == "cpu"


@pytest.fixture
def device() -> torch.device:
    """The first GPU. Asked for here and not at import, which would initialise CUDA in every session."""
    if on_cpu():
        return torch.device("cpu")
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    return torch.device("cuda", 0)


@pytest.fixture
def gpu(device: torch.device) -> torch.device:
    """The same for what only a GPU has: streams, graphs, allocator statistics."""
    if device.type != "cuda":
        pytest.skip("needs a CUDA device: there is no such thing on a CPU")
    return device


@pytest.fixture
def same_bits() -> Iterator[None]:
    """The same kernels in every run: without this cuDNN may sum in another order each time."""
    with torch.backends.cudnn.flags(enabled=True, benchmark=False, deterministic=True, allow_tf32=False):
        yield


@pytest.fixture
def group_of_one(device: torch.device) -> Iterator[dist.ProcessGroup]:
    """The default group. A Stepper that is given it has collectives, one that is given None has none."""
    with collectives_of_one(device) as group:
        yield group
