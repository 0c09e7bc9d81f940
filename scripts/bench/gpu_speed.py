"""Training speed on a GPU compared with standard implementations: one measurement per call.

    python scripts/bench/gpu_speed.py H1|H2|H3|H4|H5|H6|H8|H9|H10 [--json FILE] [--dry-run] [--cifar10 D]

Both sides of a ratio run in one process and alternate, A B A B. Reports minimum and median, of several steps
with one synchronization at their end, as in a training loop.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from launcher.engine import Policy, Stepper, StepResult
from launcher.recipe import registry_of
from scripts.bench.baselines import OPTIONS, PEERS, Setup, installed
from scripts.bench.gpu_road import tiny_net
from scripts.bench.gpu_session import SKIPPED
from scripts.bench.gpu_update import Copy, FusedAlone, Ours
from scripts.bench.ours import OPTIMIZERS
from scripts.bench.shapes import bert_shapes, tiny_shapes
from scripts.bench.transformers_in_torch import bert_base, gpt_small, tiny_transformer

Step = Callable[[], object]
BYTES_PER_PHOTOGRAPH = 90e6  # what ResNet-50 keeps of one in fp32 for its backward pass; a test counts it


@dataclass(frozen=True)
class Bench:
    """Device and sizes; tiny in a dry run."""

    device: torch.device
    dry_run: bool
    cifar10: Path | None = None
    memory_bytes: int = 80 * 2**30

    @property
    def photographs(self) -> int:
        """The batch of ResNet-50 at 224 pixels: 256, or what a smaller GPU has room for in fp32.

        The same for both sides of a ratio and for all rows, so that they can be compared.
        """
        room = 0.65 * self.memory_bytes  # the rest: weights, cuDNN's workspaces, CUDA itself
        return next(
            batch for batch in (256, 128, 64, 32) if batch * BYTES_PER_PHOTOGRAPH <= room or batch == 32
        )

    @property
    def is_small(self) -> bool:
        """Less than 24 GB, such as V100 and T4."""
        return self.memory_bytes < 22 * 2**30

    @property
    def repeats(self) -> int:
        return 2 if self.dry_run else 10

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def times(self, sides: Mapping[str, Step], steps: int = 10) -> dict[str, dict[str, float]]:
        """Milliseconds of a step by side, without the first rounds, which compile and select algorithms."""
        steps = 1 if self.dry_run else steps
        seconds: dict[str, list[float]] = {name: [] for name in sides}
        for repeat in range(-2, self.repeats):
            for name, step in sides.items():
                self.synchronize()
                began = time.perf_counter()
                for _ in range(steps):
                    step()
                self.synchronize()
                if repeat >= 0:
                    seconds[name].append((time.perf_counter() - began) / steps)
        return {
            name: {"min_ms": 1e3 * min(values), "median_ms": 1e3 * statistics.median(values)}
            for name, values in seconds.items()
        }

    def resnet(self, name: str, pixels: int, batch: int) -> Task:
        """Random images of ten classes, or of a thousand at 224 pixels. A dry run has a tiny model."""
        if self.dry_run:
            return Task(lambda: tiny_net(3), torch.randn(2, 3, 8, 8), torch.randint(10, (2,)))
        classes = 1000 if pixels > 64 else 10
        build = registry_of(None).models[name]

        def model() -> nn.Module:
            torch.manual_seed(0)
            return build(num_classes=classes, in_channels=3, image_size=pixels)

        return Task(model, torch.randn(batch, 3, pixels, pixels), torch.randint(classes, (batch,)))

    def text(self, causal: bool) -> Task:
        """BERT-base, 32 sequences of 128, two classes; or GPT, 8 or 4 of 1024, the next token as class."""
        vocabulary, length, batch = (50257, 1024, 4 if self.is_small else 8) if causal else (30522, 128, 32)
        build = gpt_small if causal else bert_base
        if self.dry_run:
            vocabulary, length, batch, build = 100, 8, 2, tiny_transformer(causal)
        tokens = torch.randint(vocabulary, (batch, length))
        labels = torch.randint(vocabulary, (batch * length,)) if causal else torch.randint(2, (batch,))
        return Task(build, tokens, labels)


@dataclass(frozen=True)
class Task:
    """The batch for both sides."""

    model: Callable[[], nn.Module]
    inputs: Tensor
    labels: Tensor

    def stock(self, bench: Bench, optimizer: str = "sgd", half: bool = True) -> Step:
        return self.peer(bench, "raw", optimizer, half)

    def peer(self, bench: Bench, name: str, optimizer: str = "sgd", half: bool = True) -> Step:
        setup = Setup(optimizer, bench.device, half, scaled=half, channels_last=True)
        step = PEERS[name](self.model(), setup)
        batch = setup.laid_out(self.inputs.to(bench.device)), self.labels.to(bench.device)
        return lambda: step(batch)

    def ours(self, bench: Bench, policy: str = "fp16", optimizer: str = "sgd") -> Step:
        stepper, passes = self.ours_in_parts(bench, policy, optimizer)

        def step() -> StepResult:
            passes()
            return stepper.step()

        return reading_late(step)

    def ours_in_parts(self, bench: Bench, policy: str, optimizer: str) -> tuple[Stepper, Callable[[], None]]:
        """A Stepper, and the forward and backward pass of a step."""
        setup = Setup(device=bench.device, channels_last=True)
        model = setup.laid_out(self.model().to(bench.device))
        samples = len(self.labels)
        stepper = Stepper(model, OPTIMIZERS[optimizer], Policy.named(policy), reference_count=samples)
        inputs, labels = setup.laid_out(self.inputs.to(bench.device)), self.labels.to(bench.device)

        def passes() -> None:
            with stepper.forward():
                loss = F.cross_entropy(model(inputs).float(), labels, reduction="sum")
            stepper.backward(loss, samples)

        return stepper, passes


def reading_late(step: Callable[[], StepResult]) -> Step:
    """The launcher reads each report one step late, and so does this."""
    waiting: list[StepResult] = []

    def and_read() -> None:
        waiting.append(step())
        if len(waiting) > 1:
            waiting.pop(0).read()

    return and_read


def h1(bench: Bench) -> dict[str, Any]:
    """ResNet-50: fp16 over the engine's own TF32 and strict fp32."""
    task = bench.resnet("resnet50", 224, bench.photographs)
    allow_tf32(True)
    rows = bench.times({"fp16": task.ours(bench), "tf32": task.ours(bench, "fp32")}, steps=5)
    allow_tf32(False)
    rows |= bench.times({"fp32": task.ours(bench, "fp32")}, steps=2)
    rows["batch"] = len(task.labels)
    images = 1e3 * len(task.labels) / rows["fp16"]["median_ms"]
    return rows | {
        "images_per_s": images,
        "tf32 / fp16 (goal 1.6)": ratio(rows, "tf32", "fp16"),
        "fp32 / fp16 (goal 3.0)": ratio(rows, "fp32", "fp16"),
    }


def h2(bench: Bench) -> dict[str, Any]:
    task = bench.resnet("resnet50", 224, bench.photographs)
    rows = bench.times({"ours": task.ours(bench), "autocast": task.stock(bench)}, steps=5)
    return rows | {"autocast / ours (goal 1.05)": ratio(rows, "autocast", "ours"), "batch": len(task.labels)}


def h3(bench: Bench) -> dict[str, Any]:
    task = bench.resnet("resnet18", 32, 128)
    rows = bench.times({"ours": task.ours(bench), "autocast": task.stock(bench)}, steps=50)
    return rows | {"autocast / ours (goal 1.0)": ratio(rows, "autocast", "ours")}


def h4(bench: Bench) -> dict[str, Any]:
    """BERT-base: over autocast with fused AdamW, and over its own TF32."""
    task = bench.text(causal=False)
    allow_tf32(True)
    sides = {
        "ours": task.ours(bench, "fp16", "adamw"),
        "autocast": task.stock(bench, "adamw"),
        "ours tf32": task.ours(bench, "fp32", "adamw"),
    }
    rows = bench.times(sides)
    return rows | {
        "autocast / ours (goal 1.1)": ratio(rows, "autocast", "ours"),
        "tf32 / fp16 (goal 1.6)": ratio(rows, "ours tf32", "ours"),
    }


def h5(bench: Bench) -> dict[str, Any]:
    """The AdamW update on BERT-large shapes: share of copy bandwidth, ratio to torch's fused AdamW.

    All sides together take 40 bytes per parameter, 13 GB: a small GPU gets half of the layers.
    """
    shapes = tiny_shapes() if bench.dry_run else bert_shapes(12 if bench.is_small else 24, 1024)
    numel = sum(shape.numel() for shape in shapes.values())
    with torch.device(bench.device):  # the contenders create their tensors on this device
        sides = {
            "copy": Copy(numel).step,
            "ours": Ours(shapes, OPTIMIZERS["adamw"]).step,
            "fused alone": FusedAlone(list(shapes.values()), "adamw", OPTIONS["adamw"]).step,
        }
        rows: dict[str, Any] = dict(bench.times(sides)) | {"parameters": numel}
    bandwidth = 8 * numel / rows["copy"]["min_ms"]
    rows["share of copy bandwidth at 30 bytes (goal 0.8)"] = (
        30 * numel / rows["ours"]["median_ms"] / bandwidth
    )
    rows["ours / fused alone (goal 1.1)"] = ratio(rows, "ours", "fused alone")
    return rows


def h6(bench: Bench) -> dict[str, Any]:
    """Over Accelerate and Lightning Fabric, where they are installed: a small model and a large one."""
    others = [name for name in ("accelerate", "fabric") if installed(name)]
    if not others:
        raise Skipped("neither Accelerate nor Lightning is installed")
    found: dict[str, Any] = {}
    for model, pixels, batch, goal in (("resnet18", 32, 128, 1.25), ("resnet50", 224, 128, 1.0)):
        task = bench.resnet(model, pixels, batch)
        sides = {"ours": task.ours(bench)} | {name: task.peer(bench, name) for name in others}
        rows = bench.times(sides)
        found |= {f"{model}: {name} / ours (goal {goal})": ratio(rows, name, "ours") for name in others}
        found[model] = rows
    return found


def h8(bench: Bench) -> dict[str, Any]:
    """Peak memory of ResNet-50, one side after the other, each with all other memory freed."""
    task = bench.resnet("resnet50", 224, 64)
    found: dict[str, Any] = {}
    for name, build in (("autocast", task.stock), ("ours", task.ours)):
        step = build(bench)
        if bench.device.type == "cuda":
            step()  # in the first one, cuDNN tries algorithms that allocate memory
            torch.cuda.reset_peak_memory_stats(bench.device)
        for _ in range(3):
            step()
        bench.synchronize()
        found[name] = torch.cuda.max_memory_allocated(bench.device) if bench.device.type == "cuda" else 1
        del step
        if bench.device.type == "cuda":
            torch.cuda.empty_cache()
    return found | {"ours / autocast (goal 1.0)": found["ours"] / found["autocast"]}


def h9(bench: Bench) -> dict[str, Any]:
    """The model's floating-point operations per second, relative to a large matrix product."""
    size = 64 if bench.dry_run else 8192
    half = torch.randn(size, size, device=bench.device).half()
    rate = 2 * size**3 / bench.times({"product": lambda: torch.mm(half, half)})["product"]["min_ms"]
    found: dict[str, Any] = {"fp16_tflops": rate / 1e9}
    tasks = {
        "resnet50 (goal 0.2)": (bench.resnet("resnet50", 224, bench.photographs), "sgd"),
        "gpt 124M (goal 0.4)": (bench.text(causal=True), "adamw"),
    }
    for name, (task, optimizer) in tasks.items():
        rows = bench.times({"ours": task.ours(bench, "fp16", optimizer)}, steps=5)
        found[name] = flops_of(task) / rows["ours"]["median_ms"] / rate
    return found


def flops_of(task: Task) -> float:
    """Floating-point operations of a forward and backward pass of one batch, counted without memory."""
    model, meta = task.model().to("meta"), torch.device("meta")
    with FlopCounterMode(display=False) as counter:
        F.cross_entropy(model(task.inputs.to(meta)).float(), task.labels.to(meta)).backward()
    return float(counter.get_total_flops())


def h10(bench: Bench) -> dict[str, Any]:
    """CIFAR-10 with the launcher, fp16 against fp32 with the same seed: accuracy and time."""
    if bench.cifar10 is None and not bench.dry_run:
        raise Skipped("H10 needs --cifar10 DIR")
    length = [] if bench.dry_run else ["train.epochs=15"]
    found: dict[str, Any] = {
        policy: accuracy_of_run(bench, ["recipe=resnet18", *length, f"precision={policy}"])
        for policy in ("fp16", "fp32")
    }
    found["difference (goal 0.003)"] = found["fp16"]["accuracy"] - found["fp32"]["accuracy"]
    found["time (goal 0.5)"] = found["fp16"]["seconds"] / found["fp32"]["seconds"]
    return found


def accuracy_of_run(bench: Bench, words: list[str]) -> dict[str, float]:
    """Accuracy and seconds (training and evaluation, without the start) of a run on CIFAR-10."""
    tiny = ["data=synthetic", "data.num_samples=64", "data.image_size=12", "train.max_steps=2"]
    data = [*tiny, "data.batch_size=8"] if bench.dry_run else ["data=cifar10", f"data.path={bench.cifar10}"]
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "launcher", *words, *data, f"run.dir={folder}/run", "tracker=none"]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        result = json.loads(Path(folder, "run", "result.json").read_text())
    return {"accuracy": result["metric"], "seconds": result["seconds"]}


class Skipped(Exception):
    """This measurement is skipped; the message says why."""


def ratio(rows: Mapping[str, Mapping[str, float]], above: str, below: str) -> float:
    """Ratios of the medians."""
    return rows[above]["median_ms"] / rows[below]["median_ms"]


def allow_tf32(allowed: bool) -> None:
    torch.set_float32_matmul_precision("high" if allowed else "highest")
    torch.backends.cudnn.allow_tf32 = allowed


ROWS = {row.__name__.upper(): row for row in (h1, h2, h3, h4, h5, h6, h8, h9, h10)}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("row", choices=ROWS)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--cifar10", type=Path)
    parser.add_argument("--dry-run", action="store_true")
    arguments = parser.parse_args()
    if not arguments.dry_run and not torch.cuda.is_available():
        print("no CUDA device: --dry-run runs all of it on a CPU")
        return SKIPPED
    torch.backends.cudnn.benchmark = True
    device = torch.device("cpu") if arguments.dry_run else torch.device("cuda", 0)
    memory = (
        {} if arguments.dry_run else {"memory_bytes": torch.cuda.get_device_properties(device).total_memory}
    )
    try:
        found = ROWS[arguments.row](Bench(device, arguments.dry_run, arguments.cifar10, **memory))
    except Skipped as reason:
        print(reason)
        return SKIPPED
    if arguments.json:
        arguments.json.write_text(json.dumps(found))
    numbers = {key: value for key, value in found.items() if isinstance(value, float)}
    print(", ".join(f"{key} {value:.3f}" for key, value in numbers.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
