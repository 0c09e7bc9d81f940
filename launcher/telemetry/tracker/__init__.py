"""Experiment trackers: wandb, TensorBoard, MLflow, and those of one's own."""

from launcher.telemetry.tracker.protocol import (
    ConfusionMatrix,
    Histogram,
    Media,
    Picture,
    RunInfo,
    Table,
    Text,
    Tracker,
)
from launcher.telemetry.tracker.registry import tracker

__all__ = [
    "ConfusionMatrix",
    "Histogram",
    "Media",
    "Picture",
    "RunInfo",
    "Table",
    "Text",
    "Tracker",
    "tracker",
]
