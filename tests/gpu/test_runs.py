"""On a GPU: whole runs, from the command to the exit code."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from scripts.bench import gpu_road
from tests.gpu.conftest import on_cpu

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]
ROOT = Path(__file__).parents[2]
GREEDY = """
import torch
from torch import nn
from launcher.recipe import Recipe, TensorData, cross_entropy, recipe

def loss(network, batch):
    torch.empty(1 << 50, dtype=torch.uint8, device=batch["x"].device)
    return cross_entropy(network, batch)

@recipe("greedy")
def greedy(config):
    data = TensorData({"x": torch.zeros(8, 4), "label": torch.zeros(8, dtype=torch.int64)})
    return Recipe(lambda: nn.Linear(4, 2), data, data, loss, classes=("a", "b"))
"""
CONVOLUTIONS = """
import torch
from torch import nn
from launcher.recipe import Recipe, TensorData, cross_entropy, recipe

def build():
    layers = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.Flatten()
    return nn.Sequential(*layers, nn.Linear(8 * 16, 3))

def loss(network, batch):
    return cross_entropy(network, batch, inputs="x")

@recipe("convolutions")
def convolutions(config):
    x = torch.randn(64, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    data = TensorData({"x": x, "label": torch.arange(64) % 3})
    return Recipe(build, data, data, loss, classes=("a", "b", "c"))
"""


def launched(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "launcher", "recipe=resnet18", "tracker=none", *words],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=200,
    )


def test_two_deterministic_runs_end_with_the_same_bits(device, tmp_path) -> None:
    (tmp_path / "mine.py").write_text(CONVOLUTIONS)
    words = ["recipe.uses=convolutions", "recipes.path=mine.py", "data.batch_size=16", "train.max_steps=8"]
    digests = []
    for name in ("one", "two"):
        done = launched(tmp_path, *words, "train.deterministic=true", f"run.dir={name}")
        assert done.returncode == 0, done.stderr
        digests.append(json.loads((tmp_path / name / "result.json").read_text())["weights_sha256"])
    assert digests[0] == digests[1]


def test_a_run_and_the_run_that_resumes_from_it(device) -> None:
    found = gpu_road.launcher(device, dry_run=True)
    assert found["applied_steps"] + found["skipped_steps"] == 4
    where = "CPU" if on_cpu() else torch.cuda.get_device_name(device)
    assert any(where in decision for decision in found["decisions"])


def test_a_killed_worker_is_started_again_and_goes_on(device) -> None:
    """The parent forks its workers, so it must not have touched CUDA."""
    found = gpu_road.restart(device, dry_run=True)
    assert found["restarts"] >= 1


def test_a_lack_of_memory_ends_a_run_with_exit_code_4(device, tmp_path) -> None:
    (tmp_path / "mine.py").write_text(GREEDY)
    words = ["recipe.uses=greedy", "recipes.path=mine.py", "data.batch_size=8", "train.max_steps=1"]
    done = launched(tmp_path, *words)
    assert done.returncode == 4, done.stderr
    assert "data.micro_batch_size" in done.stderr
