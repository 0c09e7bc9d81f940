"""Starts the measurement of a node's GPUs where the config and the run's devices ask for it."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from launcher.config.schema import Config
from launcher.run_dir.records import METRICS
from launcher.telemetry.gpu.devices import Rank
from launcher.telemetry.gpu.sampler import GpuSampler, NodeLog, energy_before_j
from launcher.telemetry.stream import Telemetry

if TYPE_CHECKING:
    from launcher.distributed.env import WorkerEnv
    from launcher.distributed.preflight import Peer


def measure_gpus(
    config: Config, env: WorkerEnv, peers: Sequence[Peer], telemetry: Telemetry
) -> GpuSampler | None:
    """One sampler on each node, at its first rank; it is closed with the telemetry. None elsewhere."""
    if env.local_rank != 0 or not _is_wanted(config.telemetry.nvml, peers):
        return None
    run_dir = Path(config.run.dir)
    before_j = 0.0
    with contextlib.suppress(OSError):
        if env.is_leader:
            before_j = energy_before_j(run_dir / METRICS)
        else:
            telemetry.add(NodeLog(run_dir, env.rank))
    ranks = [Rank(number, peer.gpu, peer.pid) for number, peer in enumerate(peers)]
    required = config.telemetry.nvml is True
    sampler = GpuSampler(telemetry, ranks, required=required, energy_before_j=before_j)
    telemetry.add(sampler)
    return sampler


def _is_wanted(nvml: str | bool, peers: Sequence[Peer]) -> bool:
    return nvml is True or (nvml == "auto" and any(peer.gpu is not None for peer in peers))
