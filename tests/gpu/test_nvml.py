"""On a GPU: the sampler on the real driver, with the device that torch names by its UUID."""

from __future__ import annotations

import time

import pytest
import torch

from launcher.telemetry.gpu import GpuSampler
from launcher.telemetry.stream import Telemetry
from tests.telemetry.made import made
from tests.telemetry.test_stream import Kept

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(100)]


def test_the_gpu_of_a_rank_is_measured_while_it_works(gpu: torch.device, monkeypatch) -> None:
    monkeypatch.setattr("launcher.telemetry.gpu.sampler.SAMPLE_S", 0.1)
    monkeypatch.setattr("launcher.telemetry.gpu.sampler.WINDOW_S", 0.5)
    kept = Kept("kept")
    telemetry = Telemetry([kept])
    uuid = str(torch.cuda.get_device_properties(gpu).uuid)
    sampler = GpuSampler(telemetry, [uuid])
    telemetry.add(sampler)
    a = torch.randn(4096, 4096, device=gpu, dtype=torch.float16)
    began = time.monotonic()
    for step in range(1, 10_000):
        a = (a @ a).clamp(-1, 1)
        torch.cuda.synchronize()
        telemetry.emit(made("step", step, samples=1))
        if time.monotonic() - began > 3:
            break
    joules = sampler.finish()
    telemetry.close()
    records = [record for record in kept.records if record["event"] == "gpu"]
    assert len(records) >= 3
    assert joules is not None
    assert joules > 1
    for record in records:
        assert record["memory_bytes"] >= a.numel() * 2
        assert 0 < record["power_w"] < 2000
        assert 0 < record["temperature_c"] < 120
    assert max(record["utilisation_percent"] for record in records) > 0
