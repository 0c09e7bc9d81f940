"""Each benchmark runs and writes its figures, and a side that does other work than ours is noticed."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import nn

from launcher.distributed.env import WorkerEnv
from scripts.bench.all_benchmarks import benchmarks
from scripts.bench.baselines import PEERS, Disagreement, Setup, installed, refuse_disagreement
from scripts.bench.interleaved import interleave
from scripts.bench.ours import ours
from tests.ranks.harness import run_ranks

ROOT = Path(__file__).parents[2]
TINY = {"precision_step": ("--batch", "4"), "links": ("--hosts", "2", "--rates", "300")}


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "benchmark", [each for each in benchmarks() if each.name != "gpu"], ids=lambda each: each.name
)
def test_it_runs_and_writes_its_figures(benchmark, tmp_path) -> None:
    if reason := benchmark.lacking():
        pytest.skip(reason)
    file = tmp_path / "found.json"
    words = [*benchmark.command, "--quick", *TINY.get(benchmark.name, ()), "--json", str(file)]
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *words], env=environ, cwd=tmp_path, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stderr
    content = json.loads(file.read_text())
    assert {"cpu", "torch", "date"} <= set(content["machine"])
    assert {figure["promised"] for figure in content["figures"]} - {None}, "it carries no promise"


def losses_of(names: Sequence[str], half: bool) -> dict[str, list[float]]:
    """The first losses of ours and of these peers, all from the same weights and with the same batch."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 10))
    batch = torch.randn(16, 32), torch.randint(10, (16,))
    setup = Setup(half=half)
    own = ours(copy.deepcopy(model), setup, "fp16" if half else "fp32", emulate=False if half else None)
    sides = {"ours": own} | {name: PEERS[name](copy.deepcopy(model), setup) for name in names}
    return {side: [float(step(batch)) for _ in range(8)] for side, step in sides.items()}


@pytest.mark.parametrize("half", [False, True], ids=["fp32", "fp16"])
def test_the_raw_loop_trains_as_we_do(half) -> None:
    refuse_disagreement(losses_of(["raw"], half), 0.002)


@pytest.mark.slow
@pytest.mark.parametrize("half", [False, True], ids=["fp32", "fp16"])
@pytest.mark.parametrize("name", ["accelerate", "fabric", "lightning"])
def test_each_library_trains_as_we_do(name, half, monkeypatch) -> None:
    monkeypatch.setenv("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # Lightning sets it
    if not installed(name):
        pytest.skip(f"{name} is not installed: it is in the extra bench")
    refuse_disagreement(losses_of([name], half), 0.002)


def losses_of_rank(env: WorkerEnv) -> list[dict[str, list[float]]]:
    return [losses_of(["ddp", "ddp + hook", "replicate"], half) for half in (False, True)]


@pytest.mark.slow
def test_each_peer_on_two_ranks_trains_as_we_do() -> None:
    for rank in run_ranks(2, losses_of_rank):
        for losses in rank:
            refuse_disagreement(losses, 0.002)


@pytest.mark.parametrize("found", [[2.0, 2.0, 2.0], [2.0, 1.5, float("nan")]], ids=["no optimizer", "nan"])
def test_a_side_that_computes_something_else_is_refused(found) -> None:
    with pytest.raises(Disagreement, match="cheat does not train as ours does"):
        refuse_disagreement({"ours": [2.0, 1.5, 1.0], "cheat": found}, 0.01)


def test_the_sides_alternate_and_none_always_follows_the_same() -> None:
    calls: list[str] = []
    sides = {name: lambda name=name: calls.append(name) for name in "abc"}
    interleave(sides, 6, warm_up=0)
    rounds = ["".join(calls[start : start + 3]) for start in range(0, 18, 3)]
    assert all(sorted(each) == ["a", "b", "c"] for each in rounds)
    assert len(set(rounds)) > 3
