"""On two GPUs of one machine: ranks over NCCL, each wire, and one GPU shown to each rank."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = [pytest.mark.gpus2, pytest.mark.timeout(300)]
ROOT = Path(__file__).parents[2]
RUN = ("recipe=resnet18", "data=synthetic", "tracker=none", "train.max_steps=8", "data.batch_size=32")
RUN += ("ddp.check_replicas_every_steps=2", "checkpoint.every_steps=4")


@pytest.fixture(autouse=True)
def two_gpus() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")


@pytest.mark.parametrize(
    "words", [(), ("ddp.shard_optimizer=true",), ("data.micro_batch_size=4",)], ids=" ".join
)
def test_two_ranks_train_alike(tmp_path, words) -> None:
    """The comparison of the replicas ends a run whose ranks drift apart."""
    launched = [sys.executable, "-m", "launcher", *RUN, *words, "launch.nproc=2", f"run.dir={tmp_path}/run"]
    done = subprocess.run(
        launched, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert (result["world_size"], result["applied_steps"] + result["skipped_steps"]) == (2, 8)
    assert "over NCCL" in done.stdout


def start_shown(rank: int, gpu: int, folder: Path) -> subprocess.Popen[str]:
    """One rank as a scheduler starts it that shows each task one GPU."""
    environ = {
        "RANK": str(rank),
        "WORLD_SIZE": "2",
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29611",
        "CUDA_VISIBLE_DEVICES": str(gpu),
        "PYTHONPATH": str(ROOT),
    }
    command = [sys.executable, "-m", "launcher", *RUN, f"run.dir={folder}/run", "launch.init_timeout_s=60"]
    return subprocess.Popen(
        command, env=os.environ | environ, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


@pytest.mark.parametrize(("gpus", "fails"), [((0, 1), False), ((0, 0), True)])
def test_ranks_that_see_one_gpu_each(tmp_path, gpus, fails) -> None:
    ranks = [start_shown(rank, gpu, tmp_path) for rank, gpu in enumerate(gpus)]
    try:
        told = [rank.communicate(timeout=200)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert any(rank.returncode for rank in ranks) == fails, told
    assert any("use the same GPU" in text for text in told) == fails
