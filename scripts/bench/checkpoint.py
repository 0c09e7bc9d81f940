"""Time of a step that publishes a checkpoint relative to a normal step, and the host memory it needs.

    python scripts/bench/checkpoint.py [--quick] [--json FILE]

ResNet-50 with AdamW, one process with all cores. A normal step alternates with a step at whose end the state
is copied to host memory and passed to the writer thread. Steps during the writing are reported separately.
Directory: --directory, by default a temporary one.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import statistics
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from launcher import checkpoint
from launcher.checkpoint import Identity, Origin, Progress, Snapshot, Writer
from launcher.distributed.process_group import WorkerEnv
from launcher.engine import AdamW, Policy, Stepper
from launcher.recipe import registry_of
from scripts.bench.machine import machine

MODEL = {False: ("resnet50", 64, 16), True: ("resnet18", 8, 2)}  # by --quick: name, pixels, batch


class Job:
    """A model in training, and its checkpoint writer."""

    def __init__(self, name: str, pixels: int, batch: int, device: torch.device) -> None:
        torch.manual_seed(0)
        build = registry_of(None).models[name]
        self.model = build(num_classes=10, in_channels=3, image_size=pixels).to(device)
        self.stepper = Stepper(self.model, AdamW(1e-3), Policy.fp16(), reference_count=batch)
        self.images = torch.randn(batch, 3, pixels, pixels, device=device)
        self.labels = torch.randint(10, (batch,), device=device)
        self.env = WorkerEnv(0, 1, 0, 1, device, None)
        tensors = [*self.model.named_parameters(), *self.model.named_buffers()]
        shapes = {key: list(tensor.shape) for key, tensor in tensors}
        self.identity = Identity("bench", name, "adamw", "fp16", "random", 0, batch, batch, False, shapes)
        self.steps = 0

    def step(self) -> float:
        """Seconds of one step."""
        began = time.perf_counter()
        with self.stepper.forward():
            logits = self.model(self.images).float()
            loss = nn.functional.cross_entropy(logits, self.labels, reduction="sum")
        self.stepper.backward(loss, len(self.labels))
        self.stepper.step().read()
        self.steps += 1
        return time.perf_counter() - began

    def take(self) -> Snapshot | None:
        origin, progress = Origin(1, "fp16"), Progress(0, self.steps, self.steps)
        return checkpoint.take(self.stepper, self.env, self.identity, origin, progress)


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


def measure(job: Job, directory: Path, repeats: int) -> dict[str, list[float]]:
    """Seconds of normal steps, of steps that publish, of their copies, and of steps during the writing."""
    found: dict[str, list[float]] = {key: [] for key in ("normal", "publishing", "copy", "beside", "written")}
    job.step(), job.step()  # touch the memory for the first time
    with Writer(directory, keep=1) as writer:
        for _ in range(repeats + 1):
            found["normal"] += [job.step(), job.step()]
            began = time.perf_counter()
            job.step()
            copied = time.perf_counter()
            writer.publish(job.take)
            found["publishing"].append(time.perf_counter() - began)
            found["copy"].append(time.perf_counter() - copied)
            while (report := writer.poll()) is None:
                found["beside"].append(job.step())
            if report.error is not None:
                raise report.error
            found["written"].append(report.seconds)
            size_bytes = report.size_bytes
        with Peak() as peak:  # without concurrent steps, which allocate memory too
            writer.publish(job.take)
            writer.wait()
    for key in ("publishing", "copy", "written"):
        found[key] = found[key][1:]  # the first one allocates the memory of the copy
    return {**found, "size_mb": [size_bytes / 1e6], "copies": [peak.bytes / size_bytes]}


def summary(found: dict[str, list[float]]) -> dict[str, Any]:
    """Milliseconds and ratios; the goal is (publishing - copy) / normal <= 1.1."""
    normal = statistics.median(found["normal"])
    behind = [step - copy for step, copy in zip(found["publishing"], found["copy"], strict=True)]
    return {
        "normal_ms": 1e3 * normal,
        "publishing_ms": 1e3 * statistics.median(found["publishing"]),
        "copy_ms": 1e3 * statistics.median(found["copy"]),
        "publishing_without_copy_over_normal": statistics.median(behind) / normal,
        "beside_the_writing_over_normal": statistics.median(found["beside"]) / normal,
        "written_behind_s": statistics.median(found["written"]),
        "size_mb": found["size_mb"][0],
        "host_memory_over_size": found["copies"][0],
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=8)
    parser.add_argument("--directory", type=Path, help="where to write; the disk matters")
    parser.add_argument("--quick", action="store_true", help="two repeats, a small model, to test this file")
    parser.add_argument("--json", type=Path, help="where to write the numbers")
    arguments = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    job, repeats = Job(*MODEL[arguments.quick], device), 2 if arguments.quick else arguments.repeats
    with tempfile.TemporaryDirectory(dir=arguments.directory) as directory:
        rows = summary(measure(job, Path(directory), repeats))
    for key, value in rows.items():
        print(f"{key:40} {value:10.2f}")
    if arguments.json:
        content = {
            "what": "a step that publishes a checkpoint, relative to a normal one",
            "model": MODEL[arguments.quick],
            "machine": machine(),
            "n": repeats,
            "rows": rows,
        }
        arguments.json.write_text(json.dumps(content, indent=2) + "\n")


if __name__ == "__main__":
    main()
