"""What NVML says about one GPU, and what several readings between two log lines come to.

Owns NVML's calls, with names and units. Each may be unsupported, by the GPU or by this version of NVML, and a
GPU that has fallen off the bus answers none: its value is then absent.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from statistics import fmean
from types import ModuleType
from typing import Any

from launcher.telemetry.events import GpuNumbers
from launcher.telemetry.gpu.devices import Gpu

Values = dict[str, float]
# Why clocks are lowered, with NVML's counter of ns: NVML_FI_DEV_CLOCKS_EVENT_REASON_<field>.
THROTTLED = {
    "sw_power_cap": "SW_POWER_CAP",
    "sync_boost": "SYNC_BOOST",
    "sw_thermal": "SW_THERM_SLOWDOWN",
    "hw_thermal": "HW_THERM_SLOWDOWN",
    "hw_power_brake": "HW_POWER_BRAKE_SLOWDOWN",
}
# What the readings of a window come to.
OVER_TIME: dict[str, Callable[[list[float]], float]] = {
    "utilisation_percent": fmean,
    "memory_bytes": max,
    "power_w": fmean,
    "temperature_c": max,
}


class NvmlReader:
    """Reads one GPU. Not for use by several threads."""

    def __init__(self, nvml: ModuleType, handle: object) -> None:
        self._nvml: Any = nvml
        self._handle = handle

    def momentary(self) -> Values:
        """The values of the moment, by the names of `OVER_TIME`."""
        nvml, gpu = self._nvml, self._handle
        return self._known(
            {
                "utilisation_percent": lambda: nvml.nvmlDeviceGetUtilizationRates(gpu).gpu,
                "memory_bytes": lambda: nvml.nvmlDeviceGetMemoryInfo(gpu).used,
                "power_w": lambda: nvml.nvmlDeviceGetPowerUsage(gpu) / 1e3,
                "temperature_c": lambda: nvml.nvmlDeviceGetTemperature(gpu, nvml.NVML_TEMPERATURE_GPU),
            }
        )

    def counters(self) -> Values:
        """Counters since the driver was loaded; of `THROTTLED` in seconds."""
        nvml, gpu = self._nvml, self._handle
        return self._known(
            {
                "energy_j": lambda: nvml.nvmlDeviceGetTotalEnergyConsumption(gpu) / 1e3,
                "ecc_errors": lambda: nvml.nvmlDeviceGetTotalEccErrors(
                    gpu, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
                ),
                **{reason: partial(self._seconds, field) for reason, field in THROTTLED.items()},
            }
        )

    def _seconds(self, field: str) -> float:
        number = getattr(self._nvml, f"NVML_FI_DEV_CLOCKS_EVENT_REASON_{field}")
        (answer,) = self._nvml.nvmlDeviceGetFieldValues(self._handle, [number])
        if answer.nvmlReturn != self._nvml.NVML_SUCCESS:
            raise self._nvml.NVMLError(answer.nvmlReturn)
        return float(answer.value.ullVal) * 1e-9

    def _known(self, calls: Mapping[str, Callable[[], float]]) -> Values:
        """The answers that there are."""
        found: Values = {}
        for name, call in calls.items():
            with suppress(AttributeError, self._nvml.NVMLError):  # this version of NVML lacks the call
                found[name] = call()
        return found


class GpuWindow:
    """One GPU between two log lines."""

    def __init__(self, nvml: ModuleType, gpu: Gpu) -> None:
        self.gpu = gpu
        self._reader = NvmlReader(nvml, gpu.handle)
        self._readings: list[Values] = []
        self._counters = self._reader.counters()  # at its beginning

    def sample(self) -> None:
        self._readings.append(self._reader.momentary())

    def close(self, seconds: float) -> GpuNumbers:
        """The numbers of the window, which ends here after so many seconds; the next one begins."""
        self.sample()
        before, self._counters = self._counters, self._reader.counters()
        readings, self._readings = self._readings, []
        moved = {name: now - before[name] for name, now in self._counters.items() if name in before}
        moved = {name: value for name, value in moved.items() if value >= 0}  # less: it was reset
        numbers: dict[str, Any] = {}
        for name, over_time in OVER_TIME.items():
            if values := [each[name] for each in readings if name in each]:
                numbers[name] = over_time(values)
        if "ecc_errors" in self._counters:
            numbers["ecc_errors"] = self._counters["ecc_errors"]
        if "energy_j" in moved or "power_w" in numbers:
            numbers["energy_j"] = moved.get("energy_j", numbers.get("power_w", 0.0) * seconds)
        if throttled_s := {reason: moved[reason] for reason in THROTTLED if reason in moved}:
            numbers["throttled_s"] = throttled_s
        return GpuNumbers(**numbers, index=self.gpu.index, uuid=self.gpu.uuid)
