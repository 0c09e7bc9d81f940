"""The energy that the GPUs of this node have used."""

from __future__ import annotations

from dataclasses import replace

from launcher.run_dir.result import Result
from launcher.telemetry.gpu import GpuSampler
from launcher.trainer.callback import Callback


class Energy(Callback):
    """Adds it to the result, where it is measured."""

    name = "energy"

    def __init__(self, gpus: GpuSampler | None) -> None:
        self._gpus = gpus

    def add_to_result(self, result: Result) -> Result:
        if self._gpus is None or (joules := self._gpus.finish()) is None:
            return result
        # 1 kWh is 3.6e6 J.
        return replace(result, energy_kwh=joules / 3.6e6)
