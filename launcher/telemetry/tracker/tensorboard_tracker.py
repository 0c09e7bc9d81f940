"""Event files for TensorBoard, written by torch.utils.tensorboard."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import launcher.telemetry.tracker.protocol as protocol

FLUSH_S = 5  # until TensorBoard sees what was logged


class TensorboardTracker:
    """Implements `Tracker`: scalars, texts, pictures and histograms."""

    def __init__(self) -> None:
        self._writer: Any = None  # a SummaryWriter

    def start(self, run: protocol.RunInfo) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(run.directory, flush_secs=FLUSH_S)
        self.media(0, "config", protocol.Text(json.dumps(run.config, indent=2)))
        for name in ("notes", "group"):
            if text := getattr(run, name):
                self.media(0, name, protocol.Text(text))

    def log(self, step: int, values: Mapping[str, object]) -> None:
        """Numbers become scalars; strings are left to the tables of other trackers."""
        for name, value in values.items():
            if isinstance(value, int | float):
                self._writer.add_scalar(name, value, step)

    def media(self, step: int, name: str, item: protocol.Media) -> None:
        match item:
            case protocol.Text():
                self._writer.add_text(name, f"```\n{item.content}\n```", step)
            case protocol.Picture():
                self._write_picture(step, name, item.path)
            case protocol.Histogram():
                self._writer.add_histogram_raw(name, global_step=step, **_moments(item))

    def finish(self, exit_code: int) -> None:
        self.media(0, "exit_code", protocol.Text(str(exit_code)))
        self._writer.close()

    def _write_picture(self, step: int, name: str, path: str) -> None:
        import numpy
        from PIL import Image

        with Image.open(path) as picture:
            self._writer.add_image(name, numpy.asarray(picture.convert("RGB")), step, dataformats="HWC")


def _moments(item: protocol.Histogram) -> dict[str, object]:
    """The arguments of `add_histogram_raw`, as if each value lay in the middle of its bin."""
    middles = [(low + high) / 2 for low, high in zip(item.edges[:-1], item.edges[1:], strict=True)]
    pairs = list(zip(middles, item.counts, strict=True))
    return {
        "min": item.edges[0],
        "max": item.edges[-1],
        "num": sum(item.counts),
        "sum": sum(middle * count for middle, count in pairs),
        "sum_squares": sum(middle * middle * count for middle, count in pairs),
        "bucket_limits": list(item.edges[1:]),
        "bucket_counts": list(item.counts),
    }
