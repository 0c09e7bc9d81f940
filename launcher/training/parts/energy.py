"""The energy that the GPUs of this node have used."""

from __future__ import annotations

from typing import Any

from launcher.telemetry.gpu import GpuSampler


class Energy:
    """Adds it to the result, where it is measured."""

    def __init__(self, gpus: GpuSampler | None) -> None:
        self._gpus = gpus

    def result(self) -> dict[str, Any]:
        if self._gpus is None or (joules := self._gpus.finish()) is None:
            return {}
        # 1 kWh is 3.6e6 J.
        return {"energy_kwh": joules / 3.6e6} | ({"energy_incomplete": True} if self._gpus.incomplete else {})
