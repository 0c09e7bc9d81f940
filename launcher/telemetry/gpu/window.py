"""The readings of one GPU between two log lines, as one set of numbers.

Pure. Means are weighted by the time for which a reading stands: since the one before it.
"""

from __future__ import annotations

from typing import Any

from launcher.telemetry.events import GpuNumbers
from launcher.telemetry.gpu.readings import MOMENTARY, REASONS, Timed, Values, integral


class Window:
    """Begins with the counters of its first moment, in seconds of a monotonic clock."""

    def __init__(self, counters: Values, began_s: float) -> None:
        self._latest_s = began_s
        self._counters = counters
        self._readings: list[tuple[Values, float]] = []

    def add(self, reading: Values, now_s: float) -> None:
        self._readings.append((reading, now_s - self._latest_s))
        self._latest_s = now_s

    def closed(self, counters: Values) -> GpuNumbers:
        """The numbers of the window. What the GPU does not report is absent."""
        moved = self._moved(counters)
        timed = {key: [(r[key], s) for r, s in self._readings if key in r] for key in MOMENTARY}
        flags = timed.pop("reasons")
        numbers: dict[str, Any] = {
            key: MOMENTARY[key].over(readings) for key, readings in timed.items() if readings
        }
        if "ecc_errors" in counters:
            numbers["ecc_errors"] = counters["ecc_errors"]
        power = timed["power_w"]
        if "energy_j" in moved or power:
            numbers["energy_j"] = moved.get("energy_j", integral(power))
        if throttled_s := _throttled_s(moved, flags):
            numbers["throttled_s"] = throttled_s
        return GpuNumbers(**numbers)

    def _moved(self, counters: Values) -> Values:
        """How far each counter moved. One that was reset or has wrapped says nothing about this window."""
        moved = {key: value - self._counters[key] for key, value in counters.items() if key in self._counters}
        return {key: value for key, value in moved.items() if value >= 0}


def _throttled_s(moved: Values, flags: Timed) -> Values:
    """Seconds by reason: by NVML's counter, or where it has none, by the flag of each reading."""
    found: Values = {}
    for reason, bit in REASONS.items():
        if (key := f"throttled_{reason}_s") in moved:
            found[reason] = moved[key]
        elif flags:
            found[reason] = sum(seconds for flag, seconds in flags if int(flag) & bit)
    return found
