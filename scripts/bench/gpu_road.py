"""Whether the launcher runs on this GPU: one check of scripts/bench/gpu per call.

    python scripts/bench/gpu_road.py kernels|launcher|restart|wires|launches [--json FILE] [--dry-run]

kernels   versions of torch, Triton and cuDNN; the update of 32 elements against that on the CPU
launcher  a run with a checkpoint, and a run that resumes from it
restart   parent mode: a worker is killed, the next one resumes from the checkpoint
wires     a group of one, with overlap and without: the same bits as without a group
launches  kernels and synchronisations of a step, counted by the profiler
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from launcher.engine import SGD, AdamW, DDPOptions, Policy, Stepper
from launcher.engine.optim.update import StepScalars, Updater
from launcher.engine.params.flat_buffers import Shard
from launcher.recipe import registry_of
from scripts.bench.baselines import Setup, raw
from scripts.bench.gpu_session import SKIPPED
from scripts.bench.group_of_one import collectives_of_one

RUN = ("recipe=resnet18", "data=synthetic", "tracker=none", "train.epochs=1000")
RUN += ("train.eval_every_epochs=1000",)
PATIENCE_S = 100.0


def kernels(device: torch.device, dry_run: bool) -> dict[str, Any]:
    found: dict[str, Any] = {"torch": torch.__version__, "device": device.type}
    if device.type == "cuda":
        found |= {
            "gpu": torch.cuda.get_device_name(device),
            "compute_capability": torch.cuda.get_device_capability(device),
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),
            "nccl": torch.cuda.nccl.version(),
            "triton": importlib.util.find_spec("triton") is not None,
        }
    weights = [updated(place) for place in (device, torch.device("cpu"))]
    found["largest_difference"] = float((weights[0] - weights[1]).abs().max())
    if found["largest_difference"] > 1e-6:
        raise AssertionError(f"the update on the device differs from the one on the CPU: {found}")
    return found


def updated(device: torch.device) -> torch.Tensor:
    """32 masters after one AdamW update of fp16 weights; also checks w16 == RNE16(master)."""
    torch.manual_seed(0)
    master, grad = torch.randn(32).to(device), torch.randn(32).half().to(device)
    shard = Shard(master.half(), master, grad)
    scalars = StepScalars(
        torch.full((), 0.5, device=device),
        torch.full((), 0.01, dtype=torch.float64, device=device),
        torch.ones((), dtype=torch.float64, device=device),
        torch.zeros((), dtype=torch.bool, device=device),
    )
    Updater([shard], AdamW(0.01)).step(scalars)
    assert torch.equal(shard.weight, master.half()), "the half weights are not the rounded masters"
    return master.cpu()


def launcher(device: torch.device, dry_run: bool) -> dict[str, Any]:
    steps = 2 if dry_run else 30
    with tempfile.TemporaryDirectory() as name:
        words = [*words_of(Path(name), dry_run), f"checkpoint.every_steps={steps}"]
        first = launch(*words, f"train.max_steps={steps}")
        second = launch(*words, f"train.max_steps={2 * steps}")
        result = json.loads((Path(name) / "run" / "result.json").read_text())
    if "resume after step" not in second and "resume" not in second:
        raise AssertionError(f"the second run did not resume:\n{second}")
    kept = ("applied_steps", "skipped_steps", "samples_per_s", "peak_memory_bytes", "state_bytes")
    decisions = [line for line in first.splitlines() if line.startswith(("precision", "update", "workers"))]
    return {key: result.get(key) for key in kept} | {"decisions": decisions}


def words_of(folder: Path, dry_run: bool) -> list[str]:
    tiny = ["data.batch_size=16", "data.num_samples=64", "data.image_size=8"]
    return [*RUN, *(tiny if dry_run else []), f"run.dir={folder / 'run'}"]


def launch(*words: str) -> str:
    """What `python -m launcher` prints; AssertionError with all of it where that fails."""
    done = subprocess.run(
        [sys.executable, "-m", "launcher", *words], capture_output=True, text=True, timeout=PATIENCE_S
    )
    if done.returncode:
        printed = done.stdout[-1000:] + done.stderr[-3000:]
        raise AssertionError(f"{words}: exit code {done.returncode}\n{printed}")
    return done.stdout


def restart(device: torch.device, dry_run: bool) -> dict[str, Any]:
    """Parent mode on a GPU: the parent must never initialise CUDA."""
    steps = 6 if dry_run else 400
    with tempfile.TemporaryDirectory() as name:
        words = words_of(Path(name), dry_run)
        words += [f"train.max_steps={steps}", "checkpoint.every_steps=1", "launch.nproc=1"]
        process = subprocess.Popen(
            [sys.executable, "-m", "launcher", *words, "launch.max_restarts=2"], start_new_session=True
        )
        try:
            killed = kill_the_worker(process, Path(name) / "run")
            process.wait(PATIENCE_S)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        events = (Path(name) / "run" / "metrics.jsonl").read_text().splitlines()
        result = json.loads((Path(name) / "run" / "result.json").read_text())
    restarts = [event for event in map(json.loads, events) if "restart" in event.values()]
    if process.returncode or not restarts:
        raise AssertionError(f"exit code {process.returncode}, restarts {restarts}, result {result}")
    return {"killed_after_s": killed, "restarts": len(restarts), "applied_steps": result["applied_steps"]}


def kill_the_worker(process: subprocess.Popen[bytes], run_dir: Path) -> float:
    """SIGKILL to the parent's child once there is a checkpoint; returns the seconds until then."""
    began = time.monotonic()
    while not list(run_dir.glob("checkpoints/step-*")):
        if process.poll() is not None or time.monotonic() - began > PATIENCE_S:
            raise AssertionError(f"no checkpoint after {time.monotonic() - began:.0f} s")
        time.sleep(0.02)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    if not children:
        raise AssertionError("the parent has no worker")
    os.kill(int(children[0]), signal.SIGKILL)
    return time.monotonic() - began


def wires(device: torch.device, dry_run: bool) -> dict[str, Any]:
    """Masters after a few steps, for one micro-batch and two."""
    build = tiny_net if dry_run else resnet18
    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = True, False
    alone = {k: masters(device, None, None, k, build) for k in (1, 2)}
    with collectives_of_one(device) as group:
        found = {}
        for name, ddp in (
            # Not a sharded optimizer: its fp32 sums lie in the memory of the fp16 gradients, in which those
            # of a single rank have no room.
            ("overlap", DDPOptions()),
            ("no overlap", DDPOptions(overlap=False)),
        ):
            for k in (1, 2):
                same = torch.equal(masters(device, group, ddp, k, build), alone[k])
                found[f"{name}, {k} micro-batch(es)"] = same
    if not all(found.values()):
        raise AssertionError(f"other bits than without a group: {found}")
    return found


def masters(
    device: torch.device,
    group: dist.ProcessGroup | None,
    ddp: DDPOptions | None,
    micro_batches: int,
    build: Callable[[], nn.Module],
) -> torch.Tensor:
    stepper, step = resnet_steps(device, group, ddp, micro_batches, build=build)
    for _ in range(3):
        step()
    return torch.cat([master.flatten() for master in stepper.named_masters().values()]).cpu()


def resnet18() -> nn.Module:
    return registry_of(None).models["resnet18"](num_classes=10, in_channels=1, image_size=8)


def tiny_net(in_channels: int = 1, num_classes: int = 10) -> nn.Module:
    """Replaces a ResNet in a dry run: fp16 arithmetic on a CPU is a hundred times slower than on a GPU."""
    return nn.Sequential(
        nn.Conv2d(in_channels, 8, 3, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, num_classes),
    )


def resnet_steps(
    device: torch.device,
    group: dist.ProcessGroup | None = None,
    ddp: DDPOptions | None = None,
    micro_batches: int = 1,
    build: Callable[[], nn.Module] = resnet18,
) -> tuple[Stepper, Callable[[], None]]:
    """A ResNet-18, or what `build` makes, on 8 x 8 images of one channel, and one training step of it."""
    torch.manual_seed(0)
    stepper = Stepper(
        build().to(device).to(memory_format=torch.channels_last),
        SGD(0.05, 0.9, True, 5e-4),
        Policy.fp16(),
        group,
        ddp=ddp,
        micro_batches=micro_batches,
        reference_count=8,
    )
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(8, 1, 8, 8, generator=generator).to(device)
    labels = torch.randint(10, (8,), generator=generator).to(device)

    def step() -> None:
        for _ in range(micro_batches):
            with stepper.forward():
                loss = F.cross_entropy(stepper.model(images).float(), labels, reduction="sum")
            stepper.backward(loss, len(labels))
        stepper.step()

    return stepper, step


def launches(device: torch.device, dry_run: bool) -> dict[str, Any]:
    """Of the same ResNet-18 by the engine, and by autocast + GradScaler + fused SGD."""
    build = tiny_net if dry_run else resnet18
    setup = Setup(device=device, channels_last=True)
    theirs = raw(build(), setup)
    batch = setup.laid_out(torch.randn(8, 1, 8, 8, device=device)), torch.randint(10, (8,), device=device)
    sides = {"ours": resnet_steps(device, build=build)[1], "autocast": lambda: theirs(batch)}
    found = {name: profiled(step, device) for name, step in sides.items()}
    if found["ours"]["synchronisations"]:
        raise AssertionError(f"a step waits for the device: {found}")
    return found


def profiled(step: Callable[[], object], device: torch.device, steps: int = 3) -> dict[str, float]:
    """Per step: operations, kernel launches, copies, synchronisations, by the runtime's own calls."""
    for _ in range(5):
        step()
    if device.type == "cuda":
        torch.cuda.synchronize()
    own, calls = runtime_calls(step, device, 0), runtime_calls(step, device, steps)
    kinds: dict[str, Callable[[str], bool]] = {
        "operations": lambda name: name.startswith("aten::"),
        "launches": lambda name: name.startswith(("cudaLaunchKernel", "cuLaunchKernel", "cudaGraphLaunch")),
        "copies": lambda name: name.startswith("cudaMemcpy"),
        "synchronisations": lambda name: name.startswith("cuda") and "Synchronize" in name,
    }
    return {
        kind: sum(number - own[name] for name, number in calls.items() if fits(name)) / steps
        for kind, fits in kinds.items()
    }


def runtime_calls(step: Callable[[], None], device: torch.device, steps: int) -> Counter[str]:
    """Counts by name over some steps. Without steps: those of the profiler, which synchronizes at its end."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as profile:
        for _ in range(steps):
            step()
    return Counter({event.key: event.count for event in profile.key_averages()})


CHECKS = {check.__name__: check for check in (kernels, launcher, restart, wires, launches)}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("check", choices=CHECKS)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--dry-run", action="store_true")
    arguments = parser.parse_args()
    if not arguments.dry_run and not torch.cuda.is_available():
        print("no CUDA device: --dry-run runs all of it on a CPU")
        return SKIPPED
    device = torch.device("cpu") if arguments.dry_run else torch.device("cuda", 0)
    found = CHECKS[arguments.check](device, arguments.dry_run)
    if arguments.json:
        arguments.json.write_text(json.dumps(found))
    print(", ".join(f"{key} {value}" for key, value in found.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
