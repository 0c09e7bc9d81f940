"""Measures the GPUs of the first node in a thread of its own, and emits one `gpu` event per logging interval.

Owns the thread, the alignment of windows to logged steps, and the energy of the run. The training thread only
assigns a step number. Never raises into the run.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from launcher.config.schema import Config
from launcher.run_dir.records import METRICS
from launcher.telemetry.event_log import recorded
from launcher.telemetry.events import Event, GpuEvent, GpuNumbers, StepEvent
from launcher.telemetry.gpu.devices import gpus_of
from launcher.telemetry.gpu.health import GpuHealth
from launcher.telemetry.gpu.readings import GpuWindow
from launcher.telemetry.stream import Sink, Telemetry

if TYPE_CHECKING:
    from launcher.distributed.env import WorkerEnv
    from launcher.distributed.preflight import RankInfo

SAMPLE_S = 0.5  # two readings in the shortest window; more often than NVML averages would tell nothing more
WINDOW_S = 1.0  # shorter logging intervals share a window: NVML's own averages are about as long
OVER_GPUS: dict[str, Callable[[list[float]], float]] = {
    "power_w": sum,
    "energy_j": sum,
    "memory_bytes": max,
    "temperature_c": max,
    "utilisation_percent": lambda values: sum(values) / len(values),
}
PATIENCE_S = 2.0  # for the thread's end: a driver may hang, and the run must not


class GpuSampler(Sink):
    """A sink: `step` events end windows. `uuids` are those of all ranks of the job, as in `gpus_of`."""

    name = "NVML"

    def __init__(
        self,
        telemetry: Telemetry,
        uuids: Sequence[str | None],
        *,
        energy_before_j: float = 0.0,
    ) -> None:
        self._telemetry = telemetry
        self._uuids = uuids
        self._before_j = energy_before_j
        self._step = self._emitted = 0  # the latest that was logged, and the latest that ended a window
        self._due_s = time.monotonic() + WINDOW_S
        self._wake = threading.Event()
        self._ending = False
        self._energy_j: float | None = None  # of this process
        self._health = GpuHealth(telemetry.warn)
        self._thread = threading.Thread(target=self._work, name="gpu-sampler", daemon=True)
        self._thread.start()

    def write(self, event: Event) -> None:
        """Costs an assignment. The thread is only woken if a window is due."""
        if not isinstance(event, StepEvent):
            return
        self._step = event.step
        if time.monotonic() >= self._due_s:
            self._wake.set()

    def finish(self) -> float | None:
        """Emit the last window and stop. Returns the joules of the run so far; None if nothing was measured.

        Of this node's GPUs, over all attempts of the run. Waits for at most `PATIENCE_S`.
        """
        self._telemetry.flush()  # the last steps may still wait
        self._ending = True
        self._wake.set()
        self._thread.join(PATIENCE_S)
        return None if self._energy_j is None else self._before_j + self._energy_j

    def close(self) -> None:
        self.finish()

    def _work(self) -> None:
        try:
            with _library() as nvml:
                self._sample(nvml)
        except Exception as error:  # a measurement never ends the training
            self._telemetry.warn(
                f"NVML cannot be used, so the GPUs are not measured: {type(error).__name__}: {error}. "
                "telemetry.gpu_stats=false leaves it out."
            )

    def _sample(self, nvml: ModuleType) -> None:
        gpus = gpus_of(nvml, self._uuids)
        if not gpus:
            raise RuntimeError("it shows none of the GPUs of this run")  # as in some containers
        windows = [GpuWindow(nvml, gpu) for gpu in gpus]
        self._telemetry.decision("gpu", f"measured through NVML: {', '.join(map(str, gpus))}")
        began_s = time.monotonic()
        while not self._ending:
            self._wake.wait(SAMPLE_S)
            self._wake.clear()
            for window in windows:
                window.sample()
            if self._step > self._emitted and time.monotonic() - began_s >= WINDOW_S:
                began_s = self._close(windows, began_s)
        if self._step > self._emitted:
            self._close(windows, began_s)

    def _close(self, windows: Sequence[GpuWindow], began_s: float) -> float:
        """End the window at the latest step and emit it. Returns when the next one begins."""
        self._emitted, now_s = self._step, time.monotonic()
        self._due_s = now_s + WINDOW_S
        seconds = now_s - began_s
        numbers = [window.close(seconds) for window in windows]
        self._emit(seconds, numbers)
        for window, each in zip(windows, numbers, strict=True):
            self._health.after(window.gpu, each, seconds)
        return now_s

    def _emit(self, seconds: float, gpus: Sequence[GpuNumbers]) -> None:
        total: dict[str, Any] = {"seconds": seconds}
        for key, over_gpus in OVER_GPUS.items():
            if values := [value for numbers in gpus if (value := getattr(numbers, key)) is not None]:
                total[key] = over_gpus(values)
        if "energy_j" in total:
            self._energy_j = (self._energy_j or 0.0) + total["energy_j"]
            total["run_energy_j"] = self._before_j + self._energy_j
        self._telemetry.emit(GpuEvent(self._emitted, **total, gpus=gpus))


@contextlib.contextmanager
def _library() -> Iterator[ModuleType]:
    import pynvml

    pynvml.nvmlInit()
    try:
        yield pynvml
    finally:
        with contextlib.suppress(pynvml.NVMLError):
            pynvml.nvmlShutdown()


def energy_before_j(metrics: Path) -> float:
    """The energy that earlier processes of a run have recorded, steps that are repeated included.

    Raises OSError.
    """
    joules = (event.get("run_energy_j") for event in recorded(metrics, "gpu"))
    return max((float(value) for value in joules if isinstance(value, int | float)), default=0.0)


def measure_gpus(
    config: Config, env: WorkerEnv, peers: Sequence[RankInfo], telemetry: Telemetry
) -> GpuSampler | None:
    """A sampler of the GPUs of the first node, at rank 0; it is closed with the telemetry. None elsewhere."""
    nvml = config.telemetry.gpu_stats
    is_wanted = nvml is True or (nvml == "auto" and any(peer.gpu is not None for peer in peers))
    if not env.is_rank0 or not is_wanted:
        return None
    before_j = 0.0
    with contextlib.suppress(OSError):
        before_j = energy_before_j(Path(config.run.dir) / METRICS)
    sampler = GpuSampler(telemetry, [peer.gpu for peer in peers], energy_before_j=before_j)
    telemetry.add(sampler)
    return sampler
