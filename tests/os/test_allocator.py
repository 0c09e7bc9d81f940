"""A process that keeps what it frees does not fault its pages in again."""

from __future__ import annotations

import os
import platform
import resource
import subprocess
import sys

import pytest
import torch

from launcher.distributed.env import WorkerEnv
from launcher.os.allocator import OWN_CHOICES, tune_malloc
from tests.ranks.harness import run_ranks

pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library than glibc")


def page_faults(env: WorkerEnv, keeps: bool) -> int:
    """Of ten rounds that each need 64 MB for a moment, after the first two."""
    for name in OWN_CHOICES:
        os.environ.pop(name, None)
    assert not keeps or tune_malloc()
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
    assert not tune_malloc()


@pytest.mark.parametrize(("given", "found"), [(None, "1"), ("0", "0")])
def test_torch_is_asked_for_huge_pages_unless_the_user_has_decided(given, found) -> None:
    """Before torch is imported, which reads the variable once."""
    environ = {name: value for name, value in os.environ.items() if name != "THP_MEM_ALLOC_ENABLE"}
    environ |= {} if given is None else {"THP_MEM_ALLOC_ENABLE": given}
    code = (
        "import os, sys; from launcher.__main__ import main; main(['--version']); "
        "assert 'torch' not in sys.modules; print(os.environ['THP_MEM_ALLOC_ENABLE'])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1] == found
