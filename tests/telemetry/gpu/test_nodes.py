"""Where a run measures its GPUs, and what earlier processes of it have measured."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from launcher.config.schema import RunConfig
from launcher.distributed.env import WorkerEnv
from launcher.distributed.preflight import RankInfo
from launcher.telemetry import Telemetry
from launcher.telemetry.gpu import measure_gpus
from launcher.telemetry.gpu.sampler import energy_before_j
from tests.configs import composed

PEERS = [RankInfo(device="CPU", gpu=None, pid=number, host="h") for number in (1, 2)]


def env_of(rank: int) -> WorkerEnv:
    return WorkerEnv(rank, 2, 0, 1, torch.device("cpu"), None)


@pytest.mark.parametrize(
    ("nvml", "rank", "gpu", "measures"),
    [
        ("true", 0, None, True),
        ("true", 1, None, False),
        ("auto", 0, None, False),
        ("auto", 0, "GPU-1", True),
        ("false", 0, "GPU-1", False),
    ],
)
def test_rank_0_measures_where_it_is_wanted(
    tmp_path: Path, nvml: str, rank: int, gpu: str | None, measures: bool
) -> None:
    config = dataclasses.replace(composed(f"telemetry.gpu_stats={nvml}"), run=RunConfig(str(tmp_path)))
    with Telemetry() as telemetry:
        peers = [dataclasses.replace(peer, gpu=gpu) for peer in PEERS]
        assert (measure_gpus(config, env_of(rank), peers, telemetry) is not None) == measures


def test_the_energy_of_earlier_processes_is_the_largest_that_was_recorded(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    assert energy_before_j(file) == 0
    gpu = '{"event": "gpu", "time": 1.5, "step": 1, "run_energy_j": '
    file.write_text(f'{gpu}5.0}}\n{gpu}7.5}}\n{{"loss": 9}}\n{gpu}"nan"}}\n{gpu}')
    assert energy_before_j(file) == 7.5
