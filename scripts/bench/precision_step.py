"""Time of a two-rank training step under fp16, amp_fp16 and bf16 over the same step in fp32.

    torchrun --standalone --nproc-per-node=2 scripts/bench/precision_step.py [--quick] [--json FILE]

All policies run in the same processes and alternate, A B C D A B C D, under the same load. Reports minimum
and median of the repeats, and ratios to fp32. Also sums the live tensors after a step: the bytes of
persistent training state per parameter with AdamW.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from launcher.engine import SGD, AdamW, Policy, Stepper
from launcher.recipe import registry_of
from scripts.bench.machine import machine

POLICIES = ("fp32", "fp16", "amp_fp16", "bf16")


def main() -> None:
    arguments = parse()
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    try:
        measure(arguments)
    finally:
        dist.destroy_process_group()


def measure(arguments: argparse.Namespace) -> None:
    device = (
        torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        if torch.cuda.is_available()
        else torch.device("cpu")
    )
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // dist.get_world_size()))
    sizes = {name: state_bytes_per_parameter(name, device) for name in POLICIES}
    contenders = {name: Contender(name, device, arguments.batch) for name in POLICIES}
    times: dict[str, list[float]] = {name: [] for name in POLICIES}
    repeats = 2 if arguments.quick else arguments.repeats
    for repeat in range(repeats + 2):
        for name, contender in contenders.items():
            seconds = contender.step()
            if repeat >= 2:  # the first two touch memory for the first time and are not counted
                times[name].append(seconds)
    if dist.get_rank() == 0:
        tell(times, sizes, arguments)


class Contender:
    """One policy with its model, optimizer and batch."""

    def __init__(self, policy: str, device: torch.device, batch: int) -> None:
        self.model = resnet18(device)
        self.stepper = Stepper(self.model, SGD(0.1, 0.9, True, 5e-4), Policy.named(policy), dist.group.WORLD)
        generator = torch.Generator().manual_seed(dist.get_rank())
        self.images = torch.randn(batch, 1, 8, 8, generator=generator).to(device)
        self.labels = torch.randint(10, (batch,), generator=generator).to(device)

    def step(self) -> float:
        dist.barrier()
        began = time.perf_counter()
        train_step(self.stepper, self.model, self.images, self.labels)
        return time.perf_counter() - began


def train_step(stepper: Stepper, model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> None:
    with stepper.forward():
        logits = model(images).float()
        loss = nn.functional.cross_entropy(logits, labels, reduction="sum")
    stepper.backward(loss, len(labels))
    stepper.step().read()  # synchronizes on CUDA, so that the whole step is timed


def resnet18(device: torch.device) -> nn.Module:
    torch.manual_seed(0)
    return registry_of(None).models["resnet18"](num_classes=10, in_channels=1, image_size=8).to(device)


def state_bytes_per_parameter(policy: str, device: torch.device) -> float:
    """Bytes per parameter of all tensors created since before the model and alive after a step."""
    before = live_bytes()
    model = resnet18(device)
    stepper = Stepper(model, AdamW(1e-3), Policy.named(policy), dist.group.WORLD)
    images, labels = torch.zeros(2, 1, 8, 8, device=device), torch.zeros(2, dtype=torch.int64, device=device)
    train_step(stepper, model, images, labels)
    del images, labels
    return (live_bytes() - before) / sum(p.numel() for p in model.parameters())


def live_bytes() -> int:
    gc.collect()
    storages = {
        item.untyped_storage().data_ptr(): item.untyped_storage().nbytes()
        for item in gc.get_objects()
        if issubclass(type(item), torch.Tensor)  # isinstance would import torch's deprecated lazy names
    }
    return sum(storages.values())


def tell(times: dict[str, list[float]], sizes: dict[str, float], arguments: argparse.Namespace) -> None:
    rows = {
        name: {
            "min_ms": 1e3 * min(values),
            "median_ms": 1e3 * statistics.median(values),
            "median_over_fp32": statistics.median(values) / statistics.median(times["fp32"]),
            "min_over_fp32": min(values) / min(times["fp32"]),
            "state_bytes_per_parameter": sizes[name],
        }
        for name, values in times.items()
    }
    print(
        f"{'policy':10} {'min ms':>8} {'median ms':>10} {'median/fp32':>12} {'min/fp32':>9} "
        f"{'state B/param':>14}"
    )
    for name, row in rows.items():
        print(
            f"{name:10} {row['min_ms']:8.1f} {row['median_ms']:10.1f} {row['median_over_fp32']:12.2f} "
            f"{row['min_over_fp32']:9.2f} {row['state_bytes_per_parameter']:14.2f}"
        )
    content = {
        "what": f"ResNet-18, 8 x 8 images, batch {arguments.batch} per rank, {dist.get_world_size()} ranks",
        "machine": machine(),
        "repeats": len(times["fp32"]),
        "rows": rows,
    }
    if arguments.json:
        arguments.json.write_text(json.dumps(content, indent=2) + "\n")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--batch", type=int, default=64, help="samples per rank")
    parser.add_argument("--repeats", type=int, default=12)
    parser.add_argument("--quick", action="store_true", help="two repeats, to test this file")
    parser.add_argument("--json", type=Path, help="where to write the numbers")
    return parser.parse_args()


if __name__ == "__main__":
    main()
