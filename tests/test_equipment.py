"""Switches of torch that a run sets."""

from __future__ import annotations

import os

import pytest

from launcher.equipment import apply_switches
from tests.configs import composed


@pytest.mark.parametrize(("given", "processes"), [(None, 1), ("3", 3)])
def test_each_rank_compiles_in_one_process_unless_the_user_says_otherwise(
    monkeypatch, given, processes
) -> None:
    from torch._inductor.config import decide_compile_threads

    monkeypatch.setitem(os.environ, "TORCHINDUCTOR_COMPILE_THREADS", given or "")
    monkeypatch.setitem(os.environ, "TORCHINDUCTOR_CACHE_DIR", "")
    if given is None:
        del os.environ["TORCHINDUCTOR_COMPILE_THREADS"]
    apply_switches(composed())
    assert decide_compile_threads() == processes
