"""What NVML can be asked about one GPU: values of the moment, and counters since the driver was loaded.

Owns names, units and NVML's calls. Each call may be unsupported: its value is then absent, and it is not made
again. Raises `GpuLostError` for a GPU that no longer answers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

Values = dict[str, float]
ALL_LINKS = 0xFFFFFFFF  # NVML's scope for the sum over all NVLinks of a GPU
NOT_HERE = ("NVMLError_NotSupported", "NVMLError_FunctionNotFound", "NVMLError_NoPermission")
GONE = ("NVMLError_GpuIsLost", "NVMLError_ResetRequired")

# Why clocks are lowered, with the bit of NVML's momentary flag.
REASONS = {
    "sw_power_cap": 0x4,
    "hw_slowdown": 0x8,
    "sync_boost": 0x10,
    "sw_thermal": 0x20,
    "hw_thermal": 0x40,
    "hw_power_brake": 0x80,
}


class GpuLostError(Exception):
    """The GPU has fallen off the bus, or must be reset."""


class Reader:
    """Reads one GPU. Not for use by several threads."""

    def __init__(self, nvml: ModuleType, handle: Any) -> None:
        self._nvml = nvml
        self._handle = handle
        self._momentary = _momentary(nvml)
        self._counters = _counters(nvml)
        self._rates = _rates(nvml)
        self._fields = _fields(nvml)
        self._limits = self._read(_limits(nvml))

    @property
    def limits(self) -> Values:
        """`pcie_gen` and `pcie_width`: the most that the GPU in this slot can have."""
        return self._limits

    def momentary(self) -> Values:
        """utilisation_percent, memory_bytes, power_w, temperature_c, clocks in MHz, the link, `reasons`."""
        return self._read(self._momentary)

    def counters(self) -> Values:
        """energy_j, ecc_errors, remapped_rows, seconds `throttled_<reason>_s`, bytes over the links."""
        return self._read(self._counters) | self._field_values()

    def rates(self) -> Values:
        """Bytes per second over PCIe, measured for 20 ms each, for GPUs without byte counters."""
        return self._read(self._rates)

    def processes(self) -> list[int] | None:
        """The ids of the processes that compute on the GPU; None if NVML does not say."""
        call = {"processes": self._nvml.nvmlDeviceGetComputeRunningProcesses}
        found = self._read(call)
        return [process.pid for process in found["processes"]] if found else None

    def _read(self, calls: dict[str, Callable[[Any], Any]]) -> dict[str, Any]:
        found = {}
        for name, call in list(calls.items()):
            try:
                found[name] = call(self._handle)
            except self._nvml.NVMLError as error:
                self._refuse_loss(error)
                if type(error).__name__ in NOT_HERE:
                    del calls[name]
        return found

    def _field_values(self) -> Values:
        """All counters that NVML knows by number, in one call."""
        if not self._fields:
            return {}
        names = list(self._fields)
        try:
            fields = [self._fields[name][0] for name in names]
            values = self._nvml.nvmlDeviceGetFieldValues(self._handle, fields)
        except self._nvml.NVMLError as error:
            self._refuse_loss(error)
            if type(error).__name__ in NOT_HERE:
                self._fields.clear()
            return {}
        found = {}
        for name, value in zip(names, values, strict=True):
            if value.nvmlReturn == self._nvml.NVML_SUCCESS:
                found[name] = _number(self._nvml, value) * self._fields[name][1]
            else:
                del self._fields[name]
        return found

    def _refuse_loss(self, error: Exception) -> None:
        if type(error).__name__ in GONE:
            raise GpuLostError(str(error)) from error


def _momentary(nvml: ModuleType) -> dict[str, Callable[[Any], Any]]:
    return {
        "utilisation_percent": lambda gpu: nvml.nvmlDeviceGetUtilizationRates(gpu).gpu,
        "memory_bytes": lambda gpu: nvml.nvmlDeviceGetMemoryInfo(gpu).used,
        "power_w": lambda gpu: nvml.nvmlDeviceGetPowerUsage(gpu) / 1e3,
        "temperature_c": lambda gpu: nvml.nvmlDeviceGetTemperature(gpu, nvml.NVML_TEMPERATURE_GPU),
        "sm_clock_mhz": lambda gpu: nvml.nvmlDeviceGetClockInfo(gpu, nvml.NVML_CLOCK_SM),
        "memory_clock_mhz": lambda gpu: nvml.nvmlDeviceGetClockInfo(gpu, nvml.NVML_CLOCK_MEM),
        "pcie_gen": nvml.nvmlDeviceGetCurrPcieLinkGeneration,
        "pcie_width": nvml.nvmlDeviceGetCurrPcieLinkWidth,
        "reasons": nvml.nvmlDeviceGetCurrentClocksEventReasons,
    }


def _limits(nvml: ModuleType) -> dict[str, Callable[[Any], Any]]:
    return {
        "pcie_gen": nvml.nvmlDeviceGetMaxPcieLinkGeneration,
        "pcie_width": nvml.nvmlDeviceGetMaxPcieLinkWidth,
    }


def _counters(nvml: ModuleType) -> dict[str, Callable[[Any], Any]]:
    uncorrected, volatile = nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
    return {
        "energy_j": lambda gpu: nvml.nvmlDeviceGetTotalEnergyConsumption(gpu) / 1e3,
        "ecc_errors": lambda gpu: nvml.nvmlDeviceGetTotalEccErrors(gpu, uncorrected, volatile),
        "remapped_rows": lambda gpu: sum(nvml.nvmlDeviceGetRemappedRows(gpu)[:2]),
    }


def _rates(nvml: ModuleType) -> dict[str, Callable[[Any], Any]]:
    sent, received = nvml.NVML_PCIE_UTIL_TX_BYTES, nvml.NVML_PCIE_UTIL_RX_BYTES
    return {
        "pcie_tx_bytes_per_s": lambda gpu: nvml.nvmlDeviceGetPcieThroughput(gpu, sent) * 1e3,
        "pcie_rx_bytes_per_s": lambda gpu: nvml.nvmlDeviceGetPcieThroughput(gpu, received) * 1e3,
    }


def _fields(nvml: ModuleType) -> dict[str, tuple[Any, float]]:
    """Name -> NVML's number (with a scope, where it has one), and the factor to the unit of the name."""
    return {
        "throttled_sw_power_cap_s": (nvml.NVML_FI_DEV_CLOCKS_EVENT_REASON_SW_POWER_CAP, 1e-9),
        "throttled_sync_boost_s": (nvml.NVML_FI_DEV_CLOCKS_EVENT_REASON_SYNC_BOOST, 1e-9),
        "throttled_sw_thermal_s": (nvml.NVML_FI_DEV_CLOCKS_EVENT_REASON_SW_THERM_SLOWDOWN, 1e-9),
        "throttled_hw_thermal_s": (nvml.NVML_FI_DEV_CLOCKS_EVENT_REASON_HW_THERM_SLOWDOWN, 1e-9),
        "throttled_hw_power_brake_s": (nvml.NVML_FI_DEV_CLOCKS_EVENT_REASON_HW_POWER_BRAKE_SLOWDOWN, 1e-9),
        "pcie_tx_bytes": (nvml.NVML_FI_DEV_PCIE_COUNT_TX_BYTES, 1.0),
        "pcie_rx_bytes": (nvml.NVML_FI_DEV_PCIE_COUNT_RX_BYTES, 1.0),
        "nvlink_tx_bytes": ((nvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX, ALL_LINKS), 1024.0),
        "nvlink_rx_bytes": ((nvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX, ALL_LINKS), 1024.0),
    }


def _number(nvml: ModuleType, field: Any) -> float:
    """The value of a field; its type says which member of the union holds it."""
    members: Mapping[int, str] = {
        nvml.NVML_VALUE_TYPE_DOUBLE: "dVal",
        nvml.NVML_VALUE_TYPE_UNSIGNED_INT: "uiVal",
        nvml.NVML_VALUE_TYPE_UNSIGNED_LONG: "ulVal",
        nvml.NVML_VALUE_TYPE_UNSIGNED_LONG_LONG: "ullVal",
        nvml.NVML_VALUE_TYPE_SIGNED_LONG_LONG: "sllVal",
        nvml.NVML_VALUE_TYPE_SIGNED_INT: "siVal",
    }
    return float(getattr(field.value, members.get(field.valueType, "ullVal")))
