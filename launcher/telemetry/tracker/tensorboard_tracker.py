"""Event files for TensorBoard, written by the `tensorboard` package without TensorFlow or torch."""

from __future__ import annotations

import itertools
import json
import os
import socket
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from launcher.telemetry.formatting import markdown_row
from launcher.telemetry.tracker.protocol import (
    ConfusionMatrix,
    Histogram,
    Media,
    Picture,
    Table,
    Text,
    TrackedRun,
)

if TYPE_CHECKING:
    from tensorboard.summary.writer.record_writer import RecordWriter

FLUSH_S = 5.0  # until TensorBoard sees what was logged
_NUMBERS = itertools.count()


class TensorboardTracker:
    """Implements `Tracker`: scalars, texts, pictures and histograms."""

    def __init__(self) -> None:
        self._writer: RecordWriter | None = None
        self._flushed_s = 0.0

    def start(self, run: TrackedRun) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.summary.writer.record_writer import RecordWriter

        # Without tensorboard's EventFileWriter, whose own thread would take processor time unseen.
        name = (
            f"events.out.tfevents.{time.time():010.0f}.{socket.gethostname()}.{os.getpid()}.{next(_NUMBERS)}"
        )
        self._writer = RecordWriter(open(run.directory / name, "wb"))  # noqa: SIM115
        self._writer.write(Event(wall_time=time.time(), file_version="brain.Event:2").SerializeToString())
        self.media(0, "config", Text(json.dumps(run.config, indent=2)))
        for name in ("notes", "group"):
            if text := getattr(run, name):
                self.media(0, name, Text(text))

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        """Numbers become scalars; strings are left to the tables of other trackers."""
        from tensorboard.compat.proto.summary_pb2 import Summary

        numbers = {name: value for name, value in values.items() if isinstance(value, int | float)}
        scalars = [Summary.Value(tag=name, simple_value=float(value)) for name, value in numbers.items()]
        self._write(step, Summary(value=scalars))

    def media(self, step: int, name: str, item: Media) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary

        self._write(step, Summary(value=[_value(name, item)]))

    def finish(self, exit_code: int) -> None:
        if self._writer is not None:
            self.media(0, "exit_code", Text(str(exit_code)))
            self._writer.close()

    def _write(self, step: int, summary: Any) -> None:
        from tensorboard.compat.proto.event_pb2 import Event

        assert self._writer is not None, "start comes first"
        now_s = time.time()
        self._writer.write(Event(wall_time=now_s, step=step, summary=summary).SerializeToString())
        if now_s - self._flushed_s > FLUSH_S:
            self._writer.flush()
            self._flushed_s = now_s


def _value(name: str, item: Media) -> Any:
    from tensorboard.compat.proto.summary_pb2 import Summary

    match item:
        case Text():
            return _text(name, f"```\n{item.content}\n```")
        case Picture():
            return _picture(name, item.path)
        case Histogram():
            return Summary.Value(tag=name, histo=_histogram(item))
        case Table():
            return _text(name, _markdown(item.columns, item.rows))
        case ConfusionMatrix():
            rows = [[name, *counts] for name, counts in zip(item.classes, item.counts, strict=True)]
            return _text(name, _markdown(["true \\ predicted", *item.classes], rows))


def _text(name: str, content: str) -> Any:
    from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
    from tensorboard.compat.proto.tensor_pb2 import TensorProto
    from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto
    from tensorboard.compat.proto.types_pb2 import DT_STRING

    shape = TensorShapeProto(dim=[TensorShapeProto.Dim(size=1)])
    tensor = TensorProto(dtype=DT_STRING, tensor_shape=shape, string_val=[content.encode()])
    plugin = SummaryMetadata.PluginData(plugin_name="text")
    return Summary.Value(tag=name, metadata=SummaryMetadata(plugin_data=plugin), tensor=tensor)


def _picture(name: str, path: str) -> Any:
    from PIL import Image
    from tensorboard.compat.proto.summary_pb2 import Summary

    with Image.open(path) as picture:
        width, height = picture.size
    with open(path, "rb") as file:
        content = Summary.Image(height=height, width=width, colorspace=3, encoded_image_string=file.read())
    return Summary.Value(tag=name, image=content)


def _histogram(item: Histogram) -> Any:
    from tensorboard.compat.proto.summary_pb2 import HistogramProto

    middles = [(low + high) / 2 for low, high in zip(item.edges[:-1], item.edges[1:], strict=True)]
    pairs = list(zip(middles, item.counts, strict=True))
    return HistogramProto(
        min=item.edges[0],
        max=item.edges[-1],
        num=sum(item.counts),
        sum=sum(middle * count for middle, count in pairs),
        sum_squares=sum(middle * middle * count for middle, count in pairs),
        bucket_limit=list(item.edges[1:]),
        bucket=list(item.counts),
    )


def _markdown(columns: Any, rows: Any) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(markdown_row([str(cell) for cell in line]) for line in lines)
