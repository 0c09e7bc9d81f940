"""The recipe of `checkpoint.py`: its run notes when each step began and what was written by then.

Rank 0 writes the times when the run is over. Once in each window, before the step that saves, it also copies
as many bytes as a checkpoint has, while the other rank waits: the least that a checkpoint can cost.
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from launcher.recipe import Config, Recipe, TensorData, cross_entropy, recipe, registry_of
from scripts.bench.real_run import call_before_each_step

SETTINGS = "LAUNCHER_BENCH_CHECKPOINT"  # the environment variable with those of a run, as JSON
BYTES_PER_PARAMETER = 12  # of a checkpoint with AdamW: a master and two states
CLASSES = 10


@dataclass(frozen=True)
class Settings:
    """A checkpoint is saved after every `window` steps, `windows` times."""

    window: int
    windows: int
    pixels: int
    model: str  # of the registry; "linear" is one layer, to test this file
    file: str  # for the times
    checkpoints: str  # the directory in which they appear

    @property
    def total_steps(self) -> int:
        return self.window * (self.windows + 1) + 1


class Times:
    """Called before each step of a run. Seconds since an arbitrary point; step 0 is the first."""

    def __init__(self, settings: Settings, model_bytes: int) -> None:
        self._settings = settings
        self._source, self._target = torch.ones(model_bytes), torch.ones(model_bytes)
        self.began: list[float] = []
        self.written: list[int] = []  # checkpoints that have appeared before each step
        self.copies: list[float] = []

    def __call__(self) -> None:
        step = len(self.began)
        if step % self._settings.window == self._settings.window - 2:
            began = time.perf_counter()
            self._target.copy_(self._source)
            self.copies.append(time.perf_counter() - began)
        folder = Path(self._settings.checkpoints)
        names = os.listdir(folder) if folder.is_dir() else []
        self.written.append(max((int(name.split("-")[1]) for name in names if _is_whole(name)), default=0))
        self.began.append(time.perf_counter())
        if step == self._settings.total_steps - 1:
            found = {"began": self.began, "written": self.written, "copies": self.copies}
            Path(self._settings.file).write_text(json.dumps(found))


def _is_whole(name: str) -> bool:
    first, _, number = name.partition("-")
    return first == "step" and number.isdigit()


@recipe("bench_checkpoint")
def bench_checkpoint(config: Config) -> Recipe:
    settings = Settings(**json.loads(os.environ[SETTINGS]))
    model = nn.Sequential(nn.Flatten(), nn.Linear(3 * settings.pixels**2, CLASSES))
    if settings.model != "linear":
        make = registry_of(None).models[settings.model]
        model = make(num_classes=CLASSES, in_channels=3, image_size=settings.pixels)
    if os.environ.get("RANK", "0") == "0":
        parameters = sum(p.numel() for p in model.parameters())
        call_before_each_step(Times(settings, parameters * BYTES_PER_PARAMETER // 4))
    generator = torch.Generator().manual_seed(1)
    samples = 8 * config.data.batch_size
    images = torch.randn(samples, 3, settings.pixels, settings.pixels, generator=generator)
    data = {"image": images, "label": torch.randint(CLASSES, (samples,), generator=generator)}
    held_out = TensorData({name: column[:CLASSES] for name, column in data.items()})

    def build_model() -> nn.Module:
        return model

    return Recipe(
        build_model=build_model,
        train=TensorData(data),
        validation=held_out,
        loss=cross_entropy,
        classes=tuple(map(str, range(CLASSES))),
    )
