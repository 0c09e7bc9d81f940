"""Telemetry of a run: events in, files, console and tracker out. Torch-free, never on the hot path."""

from launcher.telemetry.setup import open_telemetry
from launcher.telemetry.stream import Record, Sink, Telemetry

__all__ = ["Record", "Sink", "Telemetry", "open_telemetry"]
