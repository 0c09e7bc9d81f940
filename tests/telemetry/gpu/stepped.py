"""The sampler on a clock that only the training moves: its thread and the stand-in's counters follow it.

No time passes while the thread works, so what it measures is exact on a machine of any load.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from launcher.telemetry.events import Event, record_of
from launcher.telemetry.gpu import GpuSampler
from launcher.telemetry.gpu import sampler as sampler_module
from launcher.telemetry.stream import Sink, Telemetry
from tests.telemetry.made import made

LIMIT_S = 60.0


class Clock:
    """Stands still until `advance`, which returns when the sampler's thread waits again or has ended."""

    def __init__(self, of_standin: ctypes.c_double) -> None:
        self._now_s = of_standin
        self._now_s.value = 1000.0
        self._changed = threading.Condition()
        self._due_s: float | None = None  # until when the thread waits; None while it works

    def now_s(self) -> float:
        return self._now_s.value

    def advance(self, seconds: float) -> None:
        self._settle()
        with self._changed:
            self._now_s.value += seconds
            if self._due_s is not None and self._due_s <= self._now_s.value:
                self.wake()
        self._settle()

    def sleep(self, seconds: float, is_set: threading.Event) -> None:
        """Wait as the thread does: until the clock has moved by `seconds`, or the event is set."""
        with self._changed:
            if not is_set.is_set():
                self._due_s = self._now_s.value + seconds
                self._changed.notify_all()
                assert self._changed.wait_for(lambda: self._due_s is None, LIMIT_S), "nobody moves the clock"

    def wake(self) -> None:
        with self._changed:
            self._due_s = None
            self._changed.notify_all()

    def _settle(self) -> None:
        with self._changed:
            while self._due_s is None and self._thread_lives():
                self._changed.wait(0.01)  # nothing tells that the thread has ended

    @staticmethod
    def _thread_lives() -> bool:
        return any(thread.name == "gpu-sampler" for thread in threading.enumerate())


class Kept(Sink):
    name = "kept"

    def __init__(self) -> None:
        self.records: list[Mapping[str, Any]] = []

    def write(self, event: Event) -> None:
        self.records.append(record_of(event))


def sampled(
    library: Path | None,
    words: Path,
    visible: str | None,
    uuids: Sequence[str | None],
    *,
    steps: int = 30,
    at: int | None = None,
    then: str = "",
    without: Sequence[str] = (),
) -> tuple[list[Mapping[str, Any]], float | None]:
    """The events of a training of `steps` steps of 10 ms and 4 samples, and the joules of the run.

    `visible` is CUDA_VISIBLE_DEVICES.
    The file `words` says how the stand-in in `library` behaves; its text is `then` from the step `at` on.
    Changes the process that it runs in: `without` names what nvidia-ml-py lacks.
    """
    import pynvml

    os.environ.pop("CUDA_VISIBLE_DEVICES", None)
    if visible is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = visible
    os.environ["NVML_STANDIN"] = str(words)
    for missing in without:
        delattr(pynvml, missing)
    now_s = ctypes.c_double()
    if library is not None:  # once loaded it is found by its name
        now_s = ctypes.c_double.in_dll(ctypes.CDLL(str(library)), "standin_now_s")
    clock = Clock(now_s)

    class Event(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            assert timeout is not None
            clock.sleep(timeout, self)
            return self.is_set()

        def set(self) -> None:
            super().set()
            clock.wake()

    sampler_module.time = SimpleNamespace(monotonic=clock.now_s)  # type: ignore[assignment]
    sampler_module.threading = SimpleNamespace(Event=Event, Thread=threading.Thread)  # type: ignore[assignment]
    sampler_module.SAMPLE_S, sampler_module.WINDOW_S, sampler_module.PATIENCE_S = 0.01, 0.06, LIMIT_S
    kept = Kept()
    telemetry = Telemetry([kept])
    sampler = GpuSampler(telemetry, uuids, energy_before_j=1000.0)
    telemetry.add(sampler)
    for step in range(1, steps + 1):
        clock.advance(0.01)
        if step == at:
            words.write_text(then)
        telemetry.emit(made("step", step, samples=4))
    joules = sampler.finish()
    telemetry.close()
    return kept.records, joules
