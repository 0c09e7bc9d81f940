"""What is measured on nodes without rank 0, and what earlier processes of a run have measured."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from launcher.config.schema import RunConfig
from launcher.distributed.env import WorkerEnv
from launcher.distributed.preflight import Peer
from launcher.telemetry import Telemetry
from launcher.telemetry.event_log import read_events
from launcher.telemetry.gpu import measure_gpus
from launcher.telemetry.gpu.sampler import energy_before_j
from tests.configs import composed
from tests.telemetry.made import made

PEERS = [Peer(device="CPU", gpu=None, pid=number, host="h") for number in (1, 2)]


def env_of(rank: int, local_rank: int) -> WorkerEnv:
    return WorkerEnv(rank, 2, local_rank, 1, torch.device("cpu"), None)


@pytest.mark.parametrize(
    ("nvml", "local_rank", "gpu", "measures"),
    [
        ("true", 0, None, True),
        ("true", 1, None, False),
        ("auto", 0, None, False),
        ("auto", 0, "GPU-1", True),
        ("false", 0, "GPU-1", False),
    ],
)
def test_the_first_rank_of_a_node_measures_where_it_is_wanted(
    tmp_path: Path, nvml: str, local_rank: int, gpu: str | None, measures: bool
) -> None:
    (tmp_path / "logs").mkdir()
    config = dataclasses.replace(composed(f"telemetry.nvml={nvml}"), run=RunConfig(str(tmp_path)))
    with Telemetry() as telemetry:
        peers = [dataclasses.replace(peer, gpu=gpu) for peer in PEERS]
        assert (measure_gpus(config, env_of(1, local_rank), peers, telemetry) is not None) == measures


def test_a_node_without_rank_0_writes_its_measurements_and_warnings_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    config = dataclasses.replace(composed("telemetry.nvml=auto"), run=RunConfig(str(tmp_path)))
    peers = [dataclasses.replace(peer, gpu="GPU-of-no-driver") for peer in PEERS]
    with Telemetry() as telemetry:
        measure_gpus(config, env_of(1, 0), peers, telemetry)
        telemetry.emit(made("step", 1, loss=0.5))
        telemetry.emit(made("gpu", 1, power_w=300.0))
        telemetry.warn("hot")
    found = [(event["event"], event["step"]) for event in read_events(tmp_path / "logs" / "gpu-rank1.jsonl")]
    assert found == [("gpu", 1), ("warning", 1)]


def test_the_energy_of_earlier_processes_is_the_largest_that_was_recorded(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    assert energy_before_j(file) == 0
    gpu = '{"event": "gpu", "time": 1.5, "step": 1, "run_energy_j": '
    file.write_text(f'{gpu}5.0}}\n{gpu}7.5}}\n{{"loss": 9}}\n{gpu}"nan"}}\n{gpu}')
    assert energy_before_j(file) == 7.5
