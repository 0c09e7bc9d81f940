"""The readings of one GPU between two log lines, as one set of numbers.

Pure. Means are weighted by the time for which a reading stands: since the one before it.
"""

from __future__ import annotations

from typing import Any

from launcher.telemetry.gpu.readings import REASONS, Values

MEANS = ("utilisation_percent", "power_w", "sm_clock_mhz", "memory_clock_mhz")
PEAKS = ("memory_bytes", "temperature_c")
LAST = ("pcie_gen", "pcie_width")
LINKS = ("pcie_tx_bytes", "pcie_rx_bytes", "nvlink_tx_bytes", "nvlink_rx_bytes")
COMPLETE = 0.95  # of a window in which the power was told
SINCE_DRIVER = ("ecc_errors", "remapped_rows")


class Window:
    """Begins with the counters of its first moment, in seconds of a monotonic clock."""

    def __init__(self, counters: Values, began_s: float) -> None:
        self._began_s = self._latest_s = began_s
        self._counters = counters
        self._readings: list[tuple[Values, float]] = []

    def add(self, reading: Values, now_s: float) -> None:
        self._readings.append((reading, now_s - self._latest_s))
        self._latest_s = now_s

    def closed(
        self, counters: Values, rates: Values, now_s: float, tells_power: bool = True
    ) -> dict[str, Any]:
        """The numbers of the window. What the GPU does not report is absent.

        `incomplete` where a GPU that tells its power did so for a part of the window only.
        """
        seconds = now_s - self._began_s
        moved = self._moved(counters)
        numbers: dict[str, Any] = {key: self._mean(key) for key in MEANS}
        numbers |= {key: max(self._all(key), default=None) for key in PEAKS}
        numbers |= {key: next(iter(reversed(self._all(key))), None) for key in LAST}
        numbers |= {key: counters.get(key) for key in SINCE_DRIVER}
        numbers["energy_j"] = moved.get("energy_j", self._integral("power_w"))
        told_s = sum(s for reading, s in self._readings if "power_w" in reading)
        if tells_power and told_s < COMPLETE * seconds and ("energy_j" not in moved or told_s):
            numbers["incomplete"] = True
        numbers["throttled_s"] = self._throttled_s(moved) or None
        numbers |= {f"{key}_per_s": moved[key] / seconds for key in LINKS if key in moved and seconds > 0}
        return {key: value for key, value in (rates | numbers).items() if value is not None}

    def _moved(self, counters: Values) -> Values:
        """How far each counter moved. One that was reset or has wrapped says nothing about this window."""
        moved = {key: value - self._counters[key] for key, value in counters.items() if key in self._counters}
        return {key: value for key, value in moved.items() if value >= 0}

    def _throttled_s(self, moved: Values) -> Values:
        """Seconds by reason: by NVML's counter, or where it has none, by the flag of each reading."""
        found: Values = {}
        for reason, bit in REASONS.items():
            if (key := f"throttled_{reason}_s") in moved:
                found[reason] = moved[key]
            elif flags := [
                (int(reading["reasons"]) & bit, s) for reading, s in self._readings if "reasons" in reading
            ]:
                found[reason] = sum(s for flag, s in flags if flag)
        return found

    def _all(self, key: str) -> list[float]:
        return [reading[key] for reading, _ in self._readings if key in reading]

    def _integral(self, key: str) -> float | None:
        known = [reading[key] * s for reading, s in self._readings if key in reading]
        return sum(known) if known else None

    def _mean(self, key: str) -> float | None:
        integral, weight = self._integral(key), sum(s for reading, s in self._readings if key in reading)
        if integral is None or not weight:
            return next(iter(self._all(key)), None)
        return integral / weight
