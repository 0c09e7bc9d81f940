"""Snapshots and checkpoints for tests: small, deterministic, different at every step."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from launcher.checkpoint.manifest import MANIFEST, manifest_text
from launcher.checkpoint.run_state import (
    MonitoredMetric,
    RunExtras,
    Snapshot,
    TrainProgress,
)
from launcher.checkpoint.storage import publish
from launcher.checkpoint.tensors import write_bytes
from launcher.engine import AverageState
from launcher.engine.state import EngineState

IDENTITY = {
    "seed": "0",
    "recipe.name": "cnn",
    "model.name": "small",
    "optim.name": "adamw",
    "precision.name": "fp16",
    "data.name": "digits",
    "num_samples": "100",
    "tensor fc.weight": "[3, 4]",
    "tensor fc.bias": "[3]",
    "tensor norm.count": "[]",
}


def snapshot(
    step: int = 100,
    metric: float | None = None,
    lower_is_better: bool = False,
    num_values: int = 4,
    **changes: Any,
) -> Snapshot:
    """A state whose every value depends on `step`; `num_values` sets the width of its one matrix."""
    generator = torch.Generator().manual_seed(step)
    weights = {
        "fc.weight": torch.randn(3, num_values, generator=generator),
        "fc.bias": torch.full((3,), step / 7),
    }
    made = Snapshot(
        engine=EngineState(
            weights=weights,
            optimizer={f"exp_avg/{name}": tensor * 2 for name, tensor in weights.items()},
            buffers={"norm.count": torch.tensor(step)},
            counters={
                "exponent": 16,
                "growth_tracker": step,
                "hysteresis_tracker": 1,
                "applied_steps": step,
                "skipped_steps": 2,
            },
            reference_count=4,
            scale_mode="dynamic",
            outliers={"loss": [0.5, step / 3]},
        ),
        progress=TrainProgress(epoch=step // 10, step=step, samples=step * 10),
        identity=IDENTITY,
        world_size=2,
        names={"fc.weight": "fc.weight", "fc.bias": "fc.bias", "norm.count": "norm.count"},
        rank_buffers={"norm.count": torch.tensor([step, step + 1])},
        metric=None if metric is None else MonitoredMetric("accuracy", metric, lower_is_better),
        average=AverageState(
            weights={name: tensor * 3 for name, tensor in weights.items()},
            buffers={"norm.running_mean": torch.full((2,), step + 0.5)},
            counters={"applied": step},
        ),
        average_buffers={"norm.running_mean": torch.tensor([[step], [step + 1.0]]).expand(2, 2)},
        extra=RunExtras({"evaluation": {"best": float("inf")}}, evaluated=True, settings={"seed": "0"}),
    )
    return replace(made, **changes)


def publish_steps(directory: Path, *steps: int) -> list[Path]:
    return [publish(directory, snapshot(step)) for step in steps]


def same(one: Snapshot, other: Snapshot) -> bool:
    """Equal in every field, tensors bit by bit with dtype and shape."""
    return comparable(one) == comparable(other)


def comparable(value: Any) -> Any:
    if isinstance(value, Tensor):
        data = value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        return (str(value.dtype), tuple(value.shape), data)
    if isinstance(value, Mapping):
        return {key: comparable(value[key]) for key in sorted(value)}  # the order of a file is no matter
    if hasattr(value, "__dataclass_fields__"):
        return {name: comparable(getattr(value, name)) for name in value.__dataclass_fields__}
    return value


def forge(checkpoint: Path, name: str, content: bytes) -> None:
    """Replace a file and its entry in the manifest, as someone would who means harm."""
    os.unlink(checkpoint / name)
    written = write_bytes(checkpoint / name, content)
    manifest = json.loads((checkpoint / MANIFEST).read_bytes())["content"]
    manifest["files"][name] = {"size_bytes": written.size_bytes, "sha256": written.sha256}
    (checkpoint / MANIFEST).write_bytes(manifest_text(manifest))
