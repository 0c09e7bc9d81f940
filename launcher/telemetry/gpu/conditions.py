"""What is wrong with a GPU: throttled, memory errors, shared, gone.

Owns the conditions, their texts and how often they are reported: at the first window, and at the end with the
number of windows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from launcher.errors import counted
from launcher.telemetry.events import GpuNumbers
from launcher.telemetry.gpu.devices import Gpu

# A GPU under full load is at its power cap (sw_power_cap) by design: recorded, no warning.
FAULTS = ("hw_slowdown", "sw_thermal", "hw_thermal", "hw_power_brake")
LEAST_SHARE = 0.05  # of a window for which clocks are lowered: for less the step is hardly longer


class Conditions:
    """Counts conditions of all GPUs, and calls `warn` for each once. `finish` warns with the counts."""

    def __init__(self, warn: Callable[[str], None]) -> None:
        self._warn = warn
        self._first: dict[tuple[str, str], str] = {}  # by GPU and kind: the text of its first window
        self._counts: Counter[tuple[str, str]] = Counter()  # windows
        self._windows = 0
        self._ecc: dict[str, tuple[float, float]] = {}  # by GPU: errors at its first window, and as reported

    def after(self, windows: Sequence[tuple[Gpu, GpuNumbers]], seconds: float) -> None:
        """Check a window: `windows` has each GPU with its numbers."""
        self._windows += 1
        for gpu, numbers in windows:
            self._after_ecc(gpu, numbers.ecc_errors)
            for kind, short, advice in _conditions(numbers, seconds):
                key = gpu.uuid, kind
                self._counts[key] += 1
                if key not in self._first:
                    self._first[key] = f"{name(gpu)} {short}"
                    self._warn(f"{self._first[key]}. {advice} Further intervals are counted.")

    def _after_ecc(self, gpu: Gpu, count: float | None) -> None:
        """Report errors that the GPU has had before, and those that are new."""
        if count is None:
            return
        before, reported = self._ecc.setdefault(gpu.uuid, (count, 0.0))
        if count > reported:
            self._ecc[gpu.uuid] = before, count
            new = f", {count - before:.0f} of them in this run" if count > before else ""
            self._warn(
                f"{name(gpu)} has {counted(round(count), 'uncorrected ECC error')} since the driver was "
                f"loaded{new}: values in its memory may be wrong. nvidia-smi -q -d ECC has details; reset "
                "or replace it."
            )

    def lost(self, gpu: Gpu, error: Exception) -> None:
        self._warn(
            f"{name(gpu)} no longer answers NVML ({error}): it is not measured any more. "
            "The kernel's log (dmesg, Xid) has the cause; if training stops too, reset or replace it."
        )

    def finish(self) -> None:
        for key, text in self._first.items():
            if self._counts[key] > 1:
                self._warn(f"{text}: in {self._counts[key]} of {self._windows} intervals.")


def name(gpu: Gpu) -> str:
    ranks = f", rank {', '.join(str(rank.number) for rank in gpu.ranks)}" if gpu.ranks else ""
    return f"GPU {gpu.index} ({gpu.uuid}{ranks})"


def other_processes(gpu: Gpu, pids: list[int]) -> int:
    """Processes on the GPU besides the run's ranks.

    In a container NVML gives ids of the host, which are not those of the ranks: then processes are counted.
    """
    own = {rank.pid for rank in gpu.ranks}
    if own & set(pids):
        return len(set(pids) - own)
    return max(0, len(set(pids)) - len(own))


def _conditions(numbers: GpuNumbers, seconds: float) -> Iterator[tuple[str, str, str]]:
    """Kind, text and advice of each condition."""
    throttled_s = numbers.throttled_s or {}
    slowed = {reason: throttled_s.get(reason, 0.0) for reason in FAULTS}
    worst = max(slowed, key=lambda reason: slowed[reason])
    if slowed[worst] > LEAST_SHARE * seconds:
        yield (
            "throttled",
            f"lowers its clocks ({worst}, {slowed[worst]:.1f} of {seconds:.1f} s)",
            "Check its cooling and power supply: it slows down all ranks.",
        )
    if numbers.incomplete:
        yield (
            "incomplete",
            "does not always tell its power",
            "Its power and energy, and those of the run, are incomplete.",
        )
    if others := numbers.other_processes:
        yield (
            "shared",
            f"is shared with {counted(others, 'process', 'es')} not of this run",
            "nvidia-smi lists them; they take time and memory of this run.",
        )
