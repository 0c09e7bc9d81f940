"""What is wrong with a GPU: throttled, memory errors. Each is a warning once a run."""

from __future__ import annotations

from collections.abc import Callable

from launcher.errors import counted
from launcher.telemetry.events import GpuNumbers
from launcher.telemetry.gpu.devices import Gpu

# A GPU under full load is at its power cap (sw_power_cap) by design: recorded, no warning.
FAULTS = ("sw_thermal", "hw_thermal", "hw_power_brake")
LEAST_SHARE = 0.05  # of a window for which clocks are lowered: for less the step is hardly longer


class GpuHealth:
    """Calls `warn` for each condition of each GPU when it is first seen."""

    def __init__(self, warn: Callable[[str], None]) -> None:
        self._warn = warn
        self._throttled: set[str] = set()  # UUIDs
        self._ecc: dict[str, float] = {}  # errors that were reported, by UUID

    def after(self, gpu: Gpu, numbers: GpuNumbers, seconds: float) -> None:
        """Check the numbers of a window of so many seconds."""
        self._after_ecc(gpu, numbers.ecc_errors)
        slowed = {reason: (numbers.throttled_s or {}).get(reason, 0.0) for reason in FAULTS}
        worst = max(slowed, key=slowed.__getitem__)
        if slowed[worst] > LEAST_SHARE * seconds and gpu.uuid not in self._throttled:
            self._throttled.add(gpu.uuid)
            self._warn(
                f"{gpu} lowers its clocks ({worst}, {slowed[worst]:.1f} of {seconds:.1f} s). Check its "
                "cooling and power supply: it slows down all ranks."
            )

    def _after_ecc(self, gpu: Gpu, count: float | None) -> None:
        """Report errors that the GPU has had before, and those that are new."""
        if count is not None and count > self._ecc.get(gpu.uuid, 0.0):
            self._ecc[gpu.uuid] = count
            self._warn(
                f"{gpu} has {counted(round(count), 'uncorrected ECC error')} since the driver was "
                "loaded: values in its memory may be wrong. nvidia-smi -q -d ECC has details; reset or "
                "replace it."
            )
