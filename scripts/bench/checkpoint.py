"""Time that a checkpoint costs training: of the step that publishes it, and of each of the ten after it.

    python scripts/bench/checkpoint.py [--quick] [--json FILE] [--directory DIR]

Real runs of the launcher, on one and on two ranks: a ResNet-18 on pictures of 8 x 8, AdamW, batches of 16 and
of 64. The time of a step is that from its beginning to the beginning of the next one, so it has all that the
launcher does between them: the step that publishes compares the replicas, copies the state and passes it to
the writer. The first figure subtracts the time of a plain copy of as many bytes, made in the same process. A
step counts as normal from the time at which the checkpoint has been written. The slowest of ten medians is
above 1 by noise alone; the same row is given for ten normal steps.

Then a state of 1 GB: writing it against `cp` and `sha256sum` of such a file on the same disk, and resuming
from it against reading and hashing it, both from a warm page cache. Directory: --directory, by default a
temporary one; the disk matters.
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import itertools
import json
import os
import shutil
import statistics
import subprocess
import tempfile
import threading
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import nn

from launcher.checkpoint import run_state, storage
from launcher.checkpoint.async_writer import write_checkpoint
from launcher.checkpoint.catalog import newest_intact
from launcher.checkpoint.run_state import Snapshot, TrainProgress
from launcher.distributed.env import WorkerEnv
from launcher.engine import AdamW, Policy, Stepper
from launcher.os.allocator import tune_malloc
from scripts.bench.checkpoint_recipe import SETTINGS, Settings
from scripts.bench.interleaved import Figure, interleave, median_interval, text_table, write
from scripts.bench.real_run import times_of

LIMIT_S = 3600
AFTER = 10  # steps after the one that publishes


@dataclass(frozen=True)
class Case:
    """One run. A window is long enough that its checkpoint is written within it, on two cores."""

    ranks: int
    batch: int
    window: int
    model: str = "resnet18"

    @property
    def name(self) -> str:
        return f"{self.ranks} rank{'s' * (self.ranks > 1)}, batch {self.batch}"


CASES = (Case(1, 16, 160), Case(1, 64, 60), Case(2, 16, 160), Case(2, 64, 60))
QUICK = (Case(1, 16, 30, "linear"), Case(2, 16, 30, "linear"))


class Job:
    """A model in training, and what the launcher copies of it for a checkpoint."""

    def __init__(self, model: nn.Module, name: str, inputs: torch.Tensor) -> None:
        self.model, self.inputs = model, inputs
        batch = len(inputs)
        self.labels = torch.randint(10, (batch,))
        self.stepper = Stepper(model, AdamW(1e-3), Policy.fp16(), reference_count=batch)
        self.env = WorkerEnv(0, 1, 0, 1, torch.device("cpu"), None)
        self.identity = {"model.name": name, "num_samples": str(batch)}
        self.steps = 0

    def step(self) -> None:
        with self.stepper.forward():
            logits = self.model(self.inputs).float()
            loss = nn.functional.cross_entropy(logits, self.labels, reduction="sum")
        self.stepper.backward(loss, len(self.labels))
        self.stepper.step().read()
        self.steps += 1

    def snapshot(self) -> Snapshot:
        progress = TrainProgress(0, self.steps, self.steps)
        taken = run_state.take_snapshot(self.stepper, self.env, self.identity, progress)
        assert taken is not None
        return taken


@dataclass(frozen=True)
class Windows:
    """Seconds of each step, [windows][steps], and of the copies. The first window is not counted."""

    saving: list[list[float]]  # the step that publishes and the AFTER following ones
    normal: list[list[float]]  # the steps after the checkpoint was written
    beside: list[list[float]]  # the steps until it was written
    copies: list[float]

    @classmethod
    def of(cls, times: Mapping[str, list[float]], window: int, windows: int) -> Windows:
        """`times` has for each step when it began and the latest checkpoint that was written by then."""
        seconds = [after - before for before, after in itertools.pairwise(times["began"])]
        found = cls([], [], [], times["copies"][1 : 1 + windows])
        for number in range(1, 1 + windows):
            first = number * window - 1  # counted from 0: the checkpoint follows step `number * window`
            steps = range(first + 1, first + window - 2)  # without the one that copies
            written = next((i for i in steps if times["written"][i] >= number * window), None)
            if written is None or written + AFTER > steps.stop:
                raise RuntimeError(f"the checkpoint of step {number * window} was not written in its window")
            found.saving.append(seconds[first : first + 1 + AFTER])
            found.beside.append(seconds[first + 1 : written])
            found.normal.append(seconds[written : steps.stop])
        return found


def measure(case: Case, windows: int, directory: Path | None) -> Windows:
    """Run the launcher. Raises RuntimeError where the run fails."""
    with tempfile.TemporaryDirectory(dir=directory) as folder:
        file, run = Path(folder) / "times.json", Path(folder) / "run"
        settings = Settings(case.window, windows, 8, case.model, str(file), str(run / "checkpoints"))
        words = [
            "recipe=resnet18",
            "recipe.uses=bench_checkpoint",
            f"recipes.path={Path(__file__).with_name('checkpoint_recipe.py')}",
            f"launch.nproc={case.ranks}",
            f"data.batch_size={case.batch * case.ranks}",
            "optim=adamw",
            "schedule=constant",
            "tracker=none",
            "train.epochs=100000",
            "train.eval_every_epochs=100000",
            f"train.max_steps={settings.total_steps}",
            f"checkpoint.every_steps={case.window}",
            "checkpoint.every_s=null",
            "checkpoint.keep=1",
            f"run.dir={run}",
        ]
        variables = {SETTINGS: json.dumps(asdict(settings))}
        times = times_of(case.name, words, variables, Path(folder), LIMIT_S)
        return Windows.of(times, case.window, windows)


def summary(found: Windows) -> dict[str, float]:
    """Milliseconds, and ratios to the median of the normal steps."""
    normal = statistics.median(step for window in found.normal for step in window)
    publishing = statistics.median(window[0] for window in found.saving)
    copy = statistics.median(found.copies)
    return {
        "normal_ms": 1e3 * normal,
        "publishing_ms": 1e3 * publishing,
        "copy_of_as_many_bytes_ms": 1e3 * copy,
        "publishing_over_normal": publishing / normal,
        "publishing_without_copy_over_normal": (publishing - copy) / normal,
        "after_over_normal": statistics.median(s for w in found.saving for s in w[1:]) / normal,
        "worst_of_ten_after_over_normal": _worst([window[1:] for window in found.saving]) / normal,
        "worst_of_ten_normal_over_normal": _worst([window[:AFTER] for window in found.normal]) / normal,
        "mean_until_written_over_normal": statistics.median(map(statistics.mean, found.beside)) / normal,
        "slowest_until_written_over_normal": statistics.median(map(max, found.beside)) / normal,
        "written_s": statistics.median(map(sum, found.beside)),
    }


def _worst(windows: Sequence[Sequence[float]]) -> float:
    """The largest of the medians over the windows of each step in them."""
    return max(map(statistics.median, zip(*windows, strict=True)))


def figures_of_windows(name: str, found: Windows) -> list[Figure]:
    rows, normal = summary(found), statistics.median(s for w in found.normal for s in w)
    first = [window[0] / normal - rows["copy_of_as_many_bytes_ms"] / 1e3 / normal for window in found.saving]
    beside = [statistics.mean(window) / normal for window in found.beside]
    slowest = max(zip(*(window[1:] for window in found.saving), strict=True), key=statistics.median)
    parts: list[tuple[str, list[float], float | None]] = [
        ("the step that copies the state, less the time of a plain copy", first, None),
        ("the slowest of the ten steps after it, by medians", [step / normal for step in slowest], None),
        ("steps while a checkpoint is written, their mean", beside, 1.1 if "64" in name else None),
    ]
    return [
        Figure(
            *(f"{what}, {name}", 1e3 * statistics.median(values) * normal, "ms", "step without a checkpoint"),
            *(1e3 * normal, statistics.median(values), *median_interval(values), promised),
        )
        for what, values, promised in parts
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
        self.snapshot = self.job.snapshot()
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
        storage.publish(self.directory, self.snapshot)

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
        run_state.restore(self.job.stepper, storage.snapshot_of(*storage.read_files(path)), self.job.env)

    def read_and_hash(self) -> None:
        """In one pass over the file, in memory that is touched."""
        buffer, digest = bytearray(1 << 20), hashlib.sha256()
        with self.source.open("rb", buffering=0) as file:
            while read := file.readinto(buffer):
                digest.update(memoryview(buffer)[:read])


def measure_files(files: Files, repeats: int) -> tuple[dict[str, float], list[Figure]]:
    """Seconds, and the figures."""
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
    figures = [
        Figure.ratio(f"checkpoint, {what} {size}", times, what, other, None if "sync" in other else 1.3)
        for what, other in pairs
    ]
    return {f"{name}_s": statistics.median(seconds) for name, seconds in times.items()}, figures


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


def small_job() -> Job:
    model = nn.Sequential(nn.Linear(2048, 2048), nn.ReLU(), nn.Linear(2048, 10))
    return Job(model, "small", torch.randn(64, 2048))


def host_memory_over_size(job: Job, directory: Path) -> float:
    """Of the first checkpoint of a run, without concurrent steps, which allocate memory too."""
    job.step()
    with Peak() as peak:
        report = write_checkpoint(directory, 1, job.snapshot(), threading.Event())
    return peak.bytes / report.size_bytes


def main() -> None:
    arguments = parse()
    tune_malloc()
    cycles = 2 if arguments.quick else arguments.repeats
    rows: dict[str, dict[str, float]] = {}
    figures: list[Figure] = []
    for case in QUICK if arguments.quick else CASES:
        found = measure(case, cycles, arguments.directory)
        rows[case.name] = summary(found)
        figures += figures_of_windows(case.name, found)
    with tempfile.TemporaryDirectory(dir=arguments.directory) as name:
        memory = host_memory_over_size(small_job(), Path(name) / "small")
        rows["memory"] = {"host_memory_over_size": memory}
        files = Files(Path(name), 25_000_000 if arguments.quick else 1_000_000_000)
        rows["files"], more = measure_files(files, cycles)
        figures += more
    for size, values in rows.items():
        print(size)
        for key, value in values.items():
            print(f"  {key:40} {value:10.2f}")
    print(text_table(figures))
    write(arguments.json, "what a checkpoint costs the steps around it", cycles, rows, figures)


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
