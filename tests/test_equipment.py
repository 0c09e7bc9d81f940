"""Switches of torch that a config names."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

from launcher.equipment import apply_switches
from tests.configs import composed


@pytest.fixture
def switches(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")  # noted, so that it is as before afterwards
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/nowhere")
    yield monkeypatch
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("wish", [True, False])
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # the compiler's own, at import
def test_deterministic_means_matrix_products_too(switches, wish) -> None:
    """torch refuses those on CUDA unless cuBLAS has a workspace of a fixed size."""
    apply_switches(composed(f"train.deterministic={str(wish).lower()}"))
    assert torch.are_deterministic_algorithms_enabled() is wish
    assert os.environ.get("CUBLAS_WORKSPACE_CONFIG") == (":4096:8" if wish else None)


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_a_workspace_of_the_users_own_is_kept(switches) -> None:
    switches.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    apply_switches(composed("train.deterministic=true"))
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"


@pytest.mark.parametrize(("given", "processes"), [(None, 1), ("3", 3)])
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_each_rank_compiles_in_one_process_unless_the_user_says_otherwise(switches, given, processes) -> None:
    from torch._inductor.config import decide_compile_threads

    switches.setenv("TORCHINDUCTOR_COMPILE_THREADS", given or "")  # noted, as above
    if given is None:
        switches.delenv("TORCHINDUCTOR_COMPILE_THREADS")
    apply_switches(composed())
    assert decide_compile_threads() == processes
