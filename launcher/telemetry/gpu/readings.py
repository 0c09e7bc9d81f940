"""What NVML can be asked about one GPU: values of the moment, and counters since the driver was loaded.

Owns names, units and NVML's calls. Each call may be unsupported, by the GPU or by this version of NVML: its
value is then absent, and it is not made again. Raises `GpuLostError` for a GPU that no longer answers.
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

MEMBERS = {
    "DOUBLE": "dVal",
    "UNSIGNED_INT": "uiVal",
    "UNSIGNED_LONG": "ulVal",
    "UNSIGNED_LONG_LONG": "ullVal",
    "SIGNED_LONG_LONG": "sllVal",
    "SIGNED_INT": "siVal",
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

    @property
    def tells_power(self) -> bool:
        """Whether the GPU supports it, be it that it does not answer now."""
        return "power_w" in self._momentary or "energy_j" in self._counters

    def rates(self) -> Values:
        """Bytes per second over PCIe, measured for 20 ms each, for GPUs without byte counters."""
        return self._read(self._rates)

    def processes(self) -> list[int] | None:
        """The ids of the processes that compute on the GPU; None if NVML does not say."""
        found = self._read({"processes": lambda gpu: self._nvml.nvmlDeviceGetComputeRunningProcesses(gpu)})
        return [process.pid for process in found["processes"]] if found else None

    def _read(self, calls: dict[str, Callable[[Any], Any]]) -> dict[str, Any]:
        found = {}
        for name, call in list(calls.items()):
            try:
                found[name] = call(self._handle)
            except AttributeError:  # this version of NVML lacks the call or a constant
                del calls[name]
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
        except AttributeError:
            self._fields.clear()
            return {}
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
        # NVML gives mW.
        "power_w": lambda gpu: nvml.nvmlDeviceGetPowerUsage(gpu) / 1e3,
        "temperature_c": lambda gpu: nvml.nvmlDeviceGetTemperature(gpu, nvml.NVML_TEMPERATURE_GPU),
        "sm_clock_mhz": lambda gpu: nvml.nvmlDeviceGetClockInfo(gpu, nvml.NVML_CLOCK_SM),
        "memory_clock_mhz": lambda gpu: nvml.nvmlDeviceGetClockInfo(gpu, nvml.NVML_CLOCK_MEM),
        "pcie_gen": lambda gpu: nvml.nvmlDeviceGetCurrPcieLinkGeneration(gpu),
        "pcie_width": lambda gpu: nvml.nvmlDeviceGetCurrPcieLinkWidth(gpu),
        "reasons": lambda gpu: nvml.nvmlDeviceGetCurrentClocksEventReasons(gpu),
    }


def _limits(nvml: ModuleType) -> dict[str, Callable[[Any], Any]]:
    return {
        "pcie_gen": lambda gpu: nvml.nvmlDeviceGetMaxPcieLinkGeneration(gpu),
        "pcie_width": lambda gpu: nvml.nvmlDeviceGetMaxPcieLinkWidth(gpu),
    }


def _counters(nvml: ModuleType) -> dict[str, Callable[[Any], Any]]:
    return {
        # NVML gives mJ.
        "energy_j": lambda gpu: nvml.nvmlDeviceGetTotalEnergyConsumption(gpu) / 1e3,
        "ecc_errors": lambda gpu: nvml.nvmlDeviceGetTotalEccErrors(
            gpu, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
        ),
        "remapped_rows": lambda gpu: sum(nvml.nvmlDeviceGetRemappedRows(gpu)[:2]),
    }


def _rates(nvml: ModuleType) -> dict[str, Callable[[Any], Any]]:
    return {
        # NVML gives KB per second.
        "pcie_tx_bytes_per_s": lambda gpu: (
            nvml.nvmlDeviceGetPcieThroughput(gpu, nvml.NVML_PCIE_UTIL_TX_BYTES) * 1e3
        ),
        "pcie_rx_bytes_per_s": lambda gpu: (
            nvml.nvmlDeviceGetPcieThroughput(gpu, nvml.NVML_PCIE_UTIL_RX_BYTES) * 1e3
        ),
    }


def _fields(nvml: ModuleType) -> dict[str, tuple[Any, float]]:
    """Name -> NVML's number (with a scope, where it has one), and the factor to the unit of the name."""
    of_reason = "CLOCKS_EVENT_REASON_{}"
    # Factors: times are counted in ns, NVLink's data in KiB, PCIe's in bytes.
    known = {
        "throttled_sw_power_cap_s": (of_reason.format("SW_POWER_CAP"), 1e-9),
        "throttled_sync_boost_s": (of_reason.format("SYNC_BOOST"), 1e-9),
        "throttled_sw_thermal_s": (of_reason.format("SW_THERM_SLOWDOWN"), 1e-9),
        "throttled_hw_thermal_s": (of_reason.format("HW_THERM_SLOWDOWN"), 1e-9),
        "throttled_hw_power_brake_s": (of_reason.format("HW_POWER_BRAKE_SLOWDOWN"), 1e-9),
        "pcie_tx_bytes": ("PCIE_COUNT_TX_BYTES", 1.0),
        "pcie_rx_bytes": ("PCIE_COUNT_RX_BYTES", 1.0),
        "nvlink_tx_bytes": ("NVLINK_THROUGHPUT_DATA_TX", 1024.0),
        "nvlink_rx_bytes": ("NVLINK_THROUGHPUT_DATA_RX", 1024.0),
    }
    numbers = {name: getattr(nvml, f"NVML_FI_DEV_{field}", None) for name, (field, _) in known.items()}
    return {
        name: ((number, ALL_LINKS) if name.startswith("nvlink") else number, known[name][1])
        for name, number in numbers.items()
        if number is not None
    }


def _number(nvml: ModuleType, field: Any) -> float:
    """The value of a field; its type says which member of the union holds it."""
    members: Mapping[int | None, str] = {
        getattr(nvml, f"NVML_VALUE_TYPE_{kind}", None): member for kind, member in MEMBERS.items()
    }
    return float(getattr(field.value, members.get(field.valueType, "ullVal")))
