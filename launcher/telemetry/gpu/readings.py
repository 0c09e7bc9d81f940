"""What NVML can be asked about one GPU: values of the moment, and counters since the driver was loaded.

Owns the tables of NVML's calls, with names, units, and what several readings come to. Each call may be
unsupported, by the GPU or by this version of NVML: its value is then absent, and it is not made again. Raises
`GpuLostError` for a GPU that no longer answers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from types import ModuleType
from typing import Any

Values = dict[str, float]
Timed = Sequence[tuple[float, float]]  # readings of one quantity, each with the seconds for which it stands
NOT_HERE = ("NVMLError_NotSupported", "NVMLError_FunctionNotFound", "NVMLError_NoPermission")
GONE = ("NVMLError_GpuIsLost", "NVMLError_ResetRequired")


def integral(timed: Timed) -> float:
    return sum(value * seconds for value, seconds in timed)


def mean(timed: Timed) -> float:
    weight = sum(seconds for _, seconds in timed)
    return integral(timed) / weight if weight else timed[0][0]


def largest(timed: Timed) -> float:
    return max(value for value, _ in timed)


def last(timed: Timed) -> float:
    return timed[-1][0]


@dataclass(frozen=True)
class NvmlCall:
    """A call of NVML: `nvmlDeviceGet<function>(gpu, NVML_<constant>...)`."""

    function: str
    constants: tuple[str, ...] = ()
    value: Callable[[Any], Any] = lambda answer: answer  # in the unit of the name
    over: Callable[[Timed], float] = last  # of the readings in a window


MOMENTARY = {
    "utilisation_percent": NvmlCall("UtilizationRates", value=attrgetter("gpu"), over=mean),
    "memory_bytes": NvmlCall("MemoryInfo", value=attrgetter("used"), over=largest),
    "power_w": NvmlCall("PowerUsage", value=lambda mw: mw / 1e3, over=mean),
    "temperature_c": NvmlCall("Temperature", ("TEMPERATURE_GPU",), over=largest),
    "reasons": NvmlCall("CurrentClocksEventReasons"),
}
COUNTERS = {
    "energy_j": NvmlCall("TotalEnergyConsumption", value=lambda mj: mj / 1e3),
    "ecc_errors": NvmlCall("TotalEccErrors", ("MEMORY_ERROR_TYPE_UNCORRECTED", "VOLATILE_ECC")),
}
PROCESSES = NvmlCall("ComputeRunningProcesses")
FIELD_VALUES = NvmlCall("FieldValues")
# Counters of ns that FIELD_VALUES reads together: NVML_FI_DEV_<field>.
FIELDS = {
    "throttled_sw_power_cap_s": "CLOCKS_EVENT_REASON_SW_POWER_CAP",
    "throttled_sync_boost_s": "CLOCKS_EVENT_REASON_SYNC_BOOST",
    "throttled_sw_thermal_s": "CLOCKS_EVENT_REASON_SW_THERM_SLOWDOWN",
    "throttled_hw_thermal_s": "CLOCKS_EVENT_REASON_HW_THERM_SLOWDOWN",
    "throttled_hw_power_brake_s": "CLOCKS_EVENT_REASON_HW_POWER_BRAKE_SLOWDOWN",
}
MEMBERS = {0: "dVal", 1: "uiVal", 2: "ulVal", 3: "ullVal", 4: "sllVal", 5: "siVal"}  # by nvmlValueType_t
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


class NvmlReader:
    """Reads one GPU. Not for use by several threads."""

    def __init__(self, nvml: ModuleType, handle: object) -> None:
        self._nvml = nvml
        self._handle = handle
        self._unsupported: set[NvmlCall] = set()
        numbers = {name: getattr(nvml, f"NVML_FI_DEV_{field}", None) for name, field in FIELDS.items()}
        self._fields = {name: number for name, number in numbers.items() if number is not None}

    def momentary(self) -> Values:
        """The values of `MOMENTARY`."""
        return self.read(MOMENTARY)

    def counters(self) -> Values:
        """The values of `COUNTERS` and `FIELDS`."""
        return self.read(COUNTERS) | self._field_values()

    def processes(self) -> list[int] | None:
        """The ids of the processes that compute on the GPU; None if NVML does not say."""
        found = self._ask(PROCESSES)
        return None if found is None else [process.pid for process in found]

    def read(self, calls: Mapping[str, NvmlCall]) -> Values:
        """The values of one of the tables."""
        answers = {name: self._ask(call) for name, call in calls.items()}
        return {name: calls[name].value(answer) for name, answer in answers.items() if answer is not None}

    def _field_values(self) -> Values:
        if not self._fields:
            return {}
        found = {}
        answers = self._ask(FIELD_VALUES, list(self._fields.values())) or []
        for name, answer in zip(list(self._fields), answers, strict=False):  # no answers: not supported
            if answer.nvmlReturn == self._nvml.NVML_SUCCESS:
                member = MEMBERS.get(answer.valueType, "ullVal")
                found[name] = float(getattr(answer.value, member)) * 1e-9
            else:
                del self._fields[name]
        return found

    def _ask(self, call: NvmlCall, *arguments: object) -> Any:
        """NVML's answer; None where it has none. Raises GpuLostError."""
        if call in self._unsupported:
            return None
        try:
            constants = [getattr(self._nvml, f"NVML_{constant}") for constant in call.constants]
            return getattr(self._nvml, f"nvmlDeviceGet{call.function}")(self._handle, *constants, *arguments)
        except AttributeError:  # this version of NVML lacks the call or a constant
            self._unsupported.add(call)
        except self._nvml.NVMLError as error:
            if type(error).__name__ in GONE:
                raise GpuLostError(str(error)) from error
            if type(error).__name__ in NOT_HERE:
                self._unsupported.add(call)
        return None
