"""The loop with the engine alone: its losses are those of torch's DDP, and it resumes bit for bit."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from launcher.distributed.env import WorkerEnv
from launcher.engine import Policy
from tests.ranks.harness import run_ranks

FILE = Path(__file__).parents[2] / "recipes/examples/flat_loop.py"
CPU = torch.device("cpu")
EPOCHS = 2


def flat_loop() -> ModuleType:
    spec = importlib.util.spec_from_file_location("flat_loop", FILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def losses_of_both(env: WorkerEnv, policy: str, folder: Path) -> tuple[list[float], list[float]]:
    """Of each step: by the Stepper, and by DDP in fp32 over the same samples."""
    loop = flat_loop()
    ours = loop.train(folder, EPOCHS, Policy.named(policy), CPU)
    data, theirs = loop.digits()[0], list[float]()
    sampler = DistributedSampler(data, env.world_size, env.rank, seed=0)
    model = DistributedDataParallel(loop.network())
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        for inputs, labels in DataLoader(data, loop.BATCH, sampler=sampler):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(inputs), labels)
            loss.backward()
            optimizer.step()
            mean = loss.detach().clone()
            dist.all_reduce(mean)
            theirs.append(float(mean) / env.world_size)
    return ours, theirs


def test_its_losses_are_those_of_the_same_loop_on_ddp_in_fp32(tmp_path) -> None:
    for ours, theirs in run_ranks(2, losses_of_both, "fp32", tmp_path):
        assert len(ours) == len(theirs) == 15 * EPOCHS
        assert ours == pytest.approx(theirs, rel=1e-3)
        assert ours[-1] < 0.3 * ours[0]


def test_in_fp16_it_starts_like_ddp_in_fp32_and_learns_as_much(tmp_path) -> None:
    """Later single losses differ: the small set has steps of large updates, which roundings change."""
    for ours, theirs in run_ranks(2, losses_of_both, "fp16", tmp_path):
        assert ours[:5] == pytest.approx(theirs[:5], rel=0.02)
        assert sum(ours[-10:]) == pytest.approx(sum(theirs[-10:]), rel=0.3)


def ran(folder: Path, *words: str, ranks: int = 1) -> str:
    command = [sys.executable, str(FILE), str(folder), *words]
    if ranks > 1:
        command[1:1] = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    environ = os.environ | {"PYTHONPATH": str(FILE.parents[2]), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.timeout(240)
@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_the_same_command_resumes_and_ends_with_the_same_weights(ranks, tmp_path) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert "epoch 2: loss" in ran(whole, "--epochs", "2", ranks=ranks)
    ran(parts, "--epochs", "1", ranks=ranks)
    resumed = ran(parts, "--epochs", "2", ranks=ranks)
    assert "epoch 2: loss" in resumed
    assert "epoch 1: loss" not in resumed
    one, other = (torch.load(each / "weights.pt", weights_only=True) for each in (whole, parts))
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert float(resumed.split("accuracy ")[1].split(",")[0]) > 0.5


def test_it_is_short_and_needs_only_the_engine() -> None:
    text = FILE.read_text()
    assert len(text.splitlines()) < 120
    assert [line for line in text.splitlines() if "from launcher" in line] == [
        "from launcher.engine import SGD, Policy, Stepper"
    ]
