"""Time that a checkpoint costs training: of the step that publishes it, and of each of the ten after it.

    python scripts/bench/checkpoint.py [--quick] [--json FILE] [--directory DIR]

One process with all cores, AdamW, a small and a large model. A window of eleven steps without a checkpoint
alternates with one of eleven steps whose first publishes, as the launcher does: it compares replicas, copies
the state to host memory and passes it to the writer. Goal P14 subtracts the time of a plain copy of as many
bytes from the step that publishes. The slowest of ten medians is above 1 by noise alone; the same row is
given for windows without a checkpoint. Steps continue until the writer reports the end of the write: a writer
that only works while training waits for it would otherwise seem free. The row of all these steps is a mean,
because a median hides one or two slow steps.

Then a state of 1 GB: writing it against `cp` and `sha256sum` of such a file on the same disk, and resuming
from it against reading and hashing it, both from a warm page cache. Directory: --directory, by default a
temporary one; the disk matters.
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import os
import shutil
import statistics
import subprocess
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from launcher import checkpoint
from launcher.checkpoint import HostMemory, Identity, Origin, Progress, Report, Staged, Surroundings, Writer
from launcher.checkpoint import format as checkpoint_format
from launcher.checkpoint.catalog import newest_intact
from launcher.distributed.env import WorkerEnv
from launcher.engine import AdamW, Policy, Stepper
from launcher.process.allocator import keep_freed_memory
from launcher.recipe import registry_of
from launcher.training.replicas import check_replicas
from scripts.bench.interleaved import Goal, goal_table, interleave, write

PATIENCE_S = 15.0  # for which steps continue beside a write
DEFERRED = 0.95  # of that time: later, the write has waited for the steps to end
AFTER = 10  # steps after the one that publishes
MODELS = {"small": ("resnet18", 8, 64), "large": ("resnet50", 64, 16)}  # name, pixels, batch


class Job:
    """A model in training, and what the launcher copies of it for a checkpoint."""

    def __init__(self, model: nn.Module, name: str, inputs: torch.Tensor) -> None:
        self.model, self.inputs = model, inputs
        batch = len(inputs)
        self.labels = torch.randint(10, (batch,))
        self.stepper = Stepper(model, AdamW(1e-3), Policy.fp16(), reference_count=batch)
        self.env = WorkerEnv(0, 1, 0, 1, torch.device("cpu"), None)
        tensors = [*model.named_parameters(), *model.named_buffers()]
        shapes = {key: list(tensor.shape) for key, tensor in tensors}
        self.identity = Identity("bench", name, "adamw", "fp16", "random", 0, batch, batch, False, shapes)
        self.memory = HostMemory()
        self.steps = 0

    @classmethod
    def of(cls, name: str, pixels: int, batch: int) -> Job:
        torch.manual_seed(0)
        model = registry_of(None).models[name](num_classes=10, in_channels=3, image_size=pixels)
        return cls(model, name, torch.randn(batch, 3, pixels, pixels))

    def step(self) -> None:
        with self.stepper.forward():
            logits = self.model(self.inputs).float()
            loss = nn.functional.cross_entropy(logits, self.labels, reduction="sum")
        self.stepper.backward(loss, len(self.labels))
        self.stepper.step().read()
        self.steps += 1

    def stage(self) -> Staged | None:
        origin, progress = Origin(1, "fp16"), Progress(0, self.steps, self.steps)
        return checkpoint.stage(
            self.stepper, self.env, self.identity, origin, progress, None, Surroundings(), self.memory
        )


def quick_job() -> Job:
    model = nn.Sequential(nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))
    return Job(model, "quick", torch.randn(64, 512))


@dataclass
class Windows:
    """Seconds of each step: [cycles][steps of a window]; and of what belongs to each window that saves."""

    without: list[list[float]] = field(default_factory=list)
    saving: list[list[float]] = field(default_factory=list)  # the first of each publishes
    beside: list[list[float]] = field(default_factory=list)  # [cycles][steps until it is written]
    copies: list[float] = field(default_factory=list)
    written: list[float] = field(default_factory=list)  # from publishing until the writer reports it
    alone: list[float] = field(default_factory=list)  # the same without steps beside it
    size_bytes: int = 0


def measure_windows(job: Job, directory: Path, cycles: int) -> Windows:
    """Alternate windows without and with a checkpoint. The first cycle is not counted: it touches memory."""
    found = Windows()
    with Writer(directory, keep=1) as writer:
        for cycle in range(-1, cycles):
            without = [_seconds(job.step) for _ in range(1 + AFTER)]
            saving, beside, written, report = _saving_window(job, writer)
            job.step()  # a checkpoint of its own
            alone = _seconds(lambda: _checked(writer.publish(job.stage) or writer.wait()))
            if cycle >= 0:
                found.without.append(without)
                found.saving.append(saving)
                found.beside.append(beside)
                found.copies.append(_seconds_of_copy(report.size_bytes))
                found.written.append(written)
                found.alone.append(alone)
                found.size_bytes = report.size_bytes
    return found


def _saving_window(job: Job, writer: Writer) -> tuple[list[float], list[float], float, Report]:
    """Seconds of each step of a window, of those beside the write, and until the write is reported.

    The launcher polls in each step.
    """
    report, written, beside = None, 0.0, 0
    steps = [_seconds(lambda: _publishing_step(job, writer))]
    began = time.perf_counter()
    while len(steps) <= AFTER or (report is None and time.perf_counter() - began < PATIENCE_S):
        steps.append(_seconds(job.step))
        if report is None:
            beside, written, report = len(steps), time.perf_counter() - began, writer.poll()
    if report is None:
        report = writer.wait()
        written = time.perf_counter() - began
    return steps[: 1 + AFTER], steps[1:beside], written, _checked(report)


def _checked(report: Report | None) -> Report:
    """The report of a write that has succeeded."""
    assert report is not None
    if report.error is not None:
        raise report.error
    return report


def _publishing_step(job: Job, writer: Writer) -> None:
    job.step()
    check_replicas(job.stepper)
    writer.publish(job.stage)


def _seconds(call: Any) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def _seconds_of_copy(size_bytes: int) -> float:
    """Of a plain copy of as many bytes, between tensors whose memory was touched before."""
    source, target = torch.ones(size_bytes // 4), torch.ones(size_bytes // 4)
    target.copy_(source)
    return _seconds(lambda: target.copy_(source))


def summary(found: Windows) -> dict[str, float]:
    """Milliseconds, and ratios to the median step of the windows without a checkpoint."""
    normal = statistics.median(step for window in found.without for step in window)
    publishing = statistics.median(window[0] for window in found.saving)
    copy = statistics.median(found.copies)
    after = [statistics.median(window[i] for window in found.saving) for i in range(1, 1 + AFTER)]
    same = [statistics.median(window[i] for window in found.without) for i in range(1, 1 + AFTER)]
    extra = statistics.median(sum(window) for window in found.saving)
    extra -= statistics.median(sum(window) for window in found.without)
    return {
        "normal_ms": 1e3 * normal,
        "publishing_ms": 1e3 * publishing,
        "copy_of_as_many_bytes_ms": 1e3 * copy,
        "publishing_over_normal": publishing / normal,
        "publishing_without_copy_over_normal": (publishing - copy) / normal,
        **{f"step_{i}_after_over_normal": step / normal for i, step in enumerate(after, 1)},
        "after_over_normal": statistics.median(s for w in found.saving for s in w[1:]) / normal,
        "worst_of_ten_after_over_normal": max(after) / normal,
        "worst_of_ten_without_over_normal": max(same) / normal,
        "mean_until_written_over_normal": statistics.median(map(statistics.mean, found.beside)) / normal,
        "slowest_until_written_over_normal": statistics.median(map(max, found.beside)) / normal,
        "extra_of_all_eleven_steps_ms": 1e3 * extra,
        "written_s": statistics.median(found.written),
        "written_without_steps_s": statistics.median(found.alone),
        "size_mb": found.size_bytes / 1e6,
    }


def goals_of_windows(name: str, found: Windows) -> list[Goal]:
    rows, normal = summary(found), statistics.median(s for w in found.without for s in w)
    copy = statistics.median(found.copies)
    first = sorted((window[0] - copy) / normal for window in found.saving)
    rest = sorted(step / normal for window in found.saving for step in window[1:])
    common: dict[str, Any] = {"row": "P14", "unit": "ms", "theirs": 1e3 * normal, "limit": 1.0}
    beside = sorted(statistics.mean(window) / normal for window in found.beside)
    written = sorted(seconds / PATIENCE_S for seconds in found.written)
    edges = [
        (values[len(values) // 10], values[-1 - len(values) // 10])
        for values in (first, rest, beside, written)
    ]
    return [
        Goal(
            what=f"{name}: step that publishes, less a copy of as many bytes",
            ours=rows["publishing_ms"] - rows["copy_of_as_many_bytes_ms"],
            baseline="step without a checkpoint",
            value=rows["publishing_without_copy_over_normal"],
            low=edges[0][0],
            high=edges[0][1],
            goal=1.1,
            **common,
        ),
        Goal(
            what=f"{name}: the slowest of the ten steps after it, by medians",
            ours=rows["worst_of_ten_after_over_normal"] * 1e3 * normal,
            baseline="step without a checkpoint",
            value=rows["worst_of_ten_after_over_normal"],
            low=edges[1][0],
            high=edges[1][1],
            goal=1.05,
            **common,
        ),
        Goal(
            what=f"{name}: all steps until it is written, their mean",
            ours=rows["mean_until_written_over_normal"] * 1e3 * normal,
            baseline="step without a checkpoint",
            value=rows["mean_until_written_over_normal"],
            low=edges[2][0],
            high=edges[2][1],
            goal=1.05,
            **common,
        ),
        Goal(
            what=f"{name}: until it is written",
            ours=1e3 * rows["written_s"],
            baseline="the longest that steps continue",
            value=statistics.median(written),
            low=edges[3][0],
            high=edges[3][1],
            goal=DEFERRED,
            **common | {"theirs": 1e3 * PATIENCE_S, "limit": None},
        ),
    ]


class Files:
    """A state of so many bytes, written and read by the launcher and by plain tools."""

    def __init__(self, directory: Path, size_bytes: int) -> None:
        side = 1024
        rows = max(1, size_bytes // (12 * side * side))  # fp32 weights and two states of AdamW
        model = nn.Sequential(*[nn.Linear(side, side, bias=False) for _ in range(rows)])
        self.job = Job(model, "state", torch.randn(1, side))
        self.job.labels = torch.zeros(1, dtype=torch.int64)
        self.job.step()
        staged = self.job.stage()
        assert staged is not None
        self.snapshot = staged.finished()
        self.directory, self.source, self.target = directory / "own", directory / "source", directory / "copy"
        self.write()
        (self.path,) = self.directory.iterdir()
        largest = [path for path in self.path.iterdir() if path.stat().st_size > 1e5]
        with self.source.open("wb") as out:  # as many bytes in one file
            for path in largest:
                with path.open("rb") as part:
                    shutil.copyfileobj(part, out, 1 << 20)
        self.size_bytes = self.source.stat().st_size

    def write(self) -> None:
        shutil.rmtree(self.directory, ignore_errors=True)
        self.directory.mkdir()
        checkpoint.publish(self.directory, self.snapshot)

    def copy_and_hash(self) -> None:
        self.target.unlink(missing_ok=True)
        subprocess.run(["cp", self.source, self.target], check=True)
        subprocess.run(["sha256sum", self.target], check=True, stdout=subprocess.DEVNULL)

    def copy_sync_and_hash(self) -> None:
        self.target.unlink(missing_ok=True)
        subprocess.run(["cp", self.source, self.target], check=True)
        subprocess.run(["sync", self.target], check=True)
        subprocess.run(["sha256sum", self.target], check=True, stdout=subprocess.DEVNULL)

    def resume(self) -> None:
        path = newest_intact(self.directory).path
        assert path is not None
        checkpoint.restore(self.job.stepper, checkpoint_format.read(path), self.job.env)

    def read_and_hash(self) -> None:
        """In one pass over the file, in memory that is touched."""
        buffer, digest = bytearray(1 << 20), hashlib.sha256()
        with self.source.open("rb", buffering=0) as file:
            while read := file.readinto(buffer):
                digest.update(memoryview(buffer)[:read])


def measure_files(files: Files, repeats: int) -> tuple[dict[str, float], list[Goal]]:
    """Seconds, and the goals."""
    sides = {
        "write": files.write,
        "cp, sha256sum": files.copy_and_hash,
        "cp, sync, sha256sum": files.copy_sync_and_hash,
        "resume": files.resume,
        "read, hash": files.read_and_hash,
    }
    times = interleave(sides, repeats, warm_up=1)
    size = f"{files.size_bytes / 1e9:.2f} GB"
    pairs = [("write", "cp, sha256sum"), ("write", "cp, sync, sha256sum"), ("resume", "read, hash")]
    goals = [Goal.of("P14", f"{what} {size}", times, what, other, 1.3) for what, other in pairs]
    return {f"{name}_s": statistics.median(seconds) for name, seconds in times.items()}, goals


class Peak:
    """Peak growth of the process's memory within the context."""

    def __enter__(self) -> Peak:
        ctypes.CDLL(None).malloc_trim(0)  # otherwise the copy would reuse freed memory
        self._before = self.bytes = resident_bytes()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._sample)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join()
        self.bytes -= self._before

    def _sample(self) -> None:
        while not self._over.wait(0.005):
            self.bytes = max(self.bytes, resident_bytes())


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def host_memory_over_size(job: Job, directory: Path) -> float:
    """Of the first checkpoint of a run, without concurrent steps, which allocate memory too."""
    job.step()
    with Writer(directory, keep=1) as writer, Peak() as peak:
        writer.publish(job.stage)
        report = writer.wait()
    assert report is not None
    return peak.bytes / report.size_bytes


def main() -> None:
    arguments = parse()
    keep_freed_memory()
    cycles = 2 if arguments.quick else arguments.repeats
    rows: dict[str, dict[str, float]] = {}
    goals: list[Goal] = []
    with tempfile.TemporaryDirectory(dir=arguments.directory) as name:
        for size in ["quick"] if arguments.quick else MODELS:
            directory = Path(name) / size
            job = quick_job() if arguments.quick else Job.of(*MODELS[size])
            memory = host_memory_over_size(job, directory)
            found = measure_windows(job, directory, cycles)
            rows[size] = summary(found) | {"host_memory_over_size": memory}
            goals += goals_of_windows(size, found)
            shutil.rmtree(directory)
            del job
        files = Files(Path(name), 25_000_000 if arguments.quick else 1_000_000_000)
        rows["files"], more = measure_files(files, cycles)
        goals += more
    for size, values in rows.items():
        print(size)
        for key, value in values.items():
            print(f"  {key:40} {value:10.2f}")
    print(goal_table(goals))
    write(arguments.json, "what a checkpoint costs the steps around it", cycles, rows, goals)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=8)
    parser.add_argument("--directory", type=Path, help="where to write; the disk matters")
    parser.add_argument("--quick", action="store_true", help="two repeats, a small model, to test this file")
    parser.add_argument("--json", type=Path, help="where to write the numbers")
    return parser.parse_args()


if __name__ == "__main__":
    main()
