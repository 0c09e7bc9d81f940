"""A process that keeps what it frees does not fault its pages in again."""

from __future__ import annotations

import os
import platform
import resource

import pytest
import torch

from launcher.distributed.env import WorkerEnv
from launcher.process.allocator import OWN_CHOICES, keep_freed_memory
from tests.ranks.harness import run_ranks

pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library than glibc")


def page_faults(env: WorkerEnv, keeps: bool) -> int:
    """Of ten rounds that each need 64 MB for a moment, after the first two."""
    for name in OWN_CHOICES:
        os.environ.pop(name, None)
    assert not keeps or keep_freed_memory()
    before = 0
    for round in range(12):
        if round == 2:
            before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        torch.ones(16 << 20)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


def test_freed_memory_is_there_for_the_next_step() -> None:
    (freed,), (kept,) = run_ranks(1, page_faults, False), run_ranks(1, page_faults, True)
    assert kept < freed / 2  # the heap may grow a few times more, by what other threads hold at its end


@pytest.mark.parametrize("name", OWN_CHOICES)
def test_the_choice_of_the_user_is_left_alone(monkeypatch, name) -> None:
    monkeypatch.setenv(name, "1")
    assert not keep_freed_memory()
