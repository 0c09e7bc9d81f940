"""Time of a two-rank training step of a ResNet-18: ours under each precision, and DistributedDataParallel.

    torchrun --standalone --nproc-per-node=2 scripts/bench/precision_step.py [--quick] [--json FILE]

DistributedDataParallel runs with GradScaler as its users run it, in fp32, with its default buckets and with
smaller ones, sending fp32 and (by torch's own hook) fp16, and also without a scaler and without its broadcast
of buffers. Autocast to fp16 comes beside it where the processor has fp16 arithmetic, or with --native: other
processors take 50 times as long. All sides run in the same processes and alternate, start from the same
weights, and must have the same losses within the precision. The C library keeps freed memory, as it does in
the launcher's workers: for all sides.
Reports minimum and median of the repeats, and ratios. Also sums the live tensors after a step: the bytes of
persistent training state per parameter with AdamW.
"""

from __future__ import annotations

import argparse
import gc
import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from launcher.engine import AdamW, Policy, Stepper
from launcher.engine.precision.policy import choose_emulation
from launcher.os.allocator import tune_malloc
from launcher.recipe import registry_of
from scripts.bench.baselines import Batch, Setup, Step, ddp, ddp_with_hook, refuse_disagreement
from scripts.bench.interleaved import Figure, Times, interleave, row_of, text_table, write
from scripts.bench.ours import ours

POLICIES = ("fp32", "fp16", "amp_fp16", "bf16")
TUNED_MB = (1, 4)  # buckets of DistributedDataParallel besides its default of 25
DDP, PLAIN = "ddp + GradScaler, fp32", "ddp, fp32"
CHECKED_STEPS = 8
SCALE = 2**10  # of the first step: the hook overflows on small batches from 2^16
# Of the first loss; halves round in each layer.
TOLERANCES = {"fp32": 0.005, "half": 0.02}


def main() -> None:
    arguments = parse()
    tune_malloc()
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
    native = arguments.native or not choose_emulation(Policy.fp16(), device).used
    batch = batch_of(arguments.batch, device)
    sides = checked(contenders(device, native), batch)
    if device.type == "cuda":
        sides = {name: partial(synchronized, side) for name, side in sides.items()}
    repeats = 2 if arguments.quick else arguments.repeats
    times = interleave(sides, repeats, warm_up=1, before=dist.barrier)
    if dist.get_rank() == 0:
        report(times, sizes, arguments)


def contenders(device: torch.device, native: bool) -> dict[str, Step]:
    """Ours in fp32 first. Each with its own model, from the same weights."""
    setup = Setup("sgd", device, half=False, init_scale=SCALE)
    found = {
        f"ours, {policy}": ours(resnet18(device), replace(setup, scaled="fp16" in policy), policy)
        for policy in POLICIES
    }
    for name, build in ((DDP, ddp), (f"{DDP}, fp16 hook", ddp_with_hook)):
        found[name] = build(resnet18(device), setup)
        for bucket_mb in TUNED_MB:
            tuned = replace(setup, bucket_mb=bucket_mb)
            found[f"{name}, {bucket_mb} MB"] = build(resnet18(device), tuned)
    plain = replace(setup, scaled=False)
    found[PLAIN] = ddp(resnet18(device), plain)
    found[f"{PLAIN}, 4 MB"] = ddp(resnet18(device), replace(plain, bucket_mb=4))
    silent = replace(plain, bucket_mb=4, broadcasts=False)
    found[f"{PLAIN}, 4 MB, no broadcast"] = ddp(resnet18(device), silent)
    found[f"{DDP}, channels_last"] = ddp(resnet18(device), replace(setup, channels_last=True))
    if native:
        found["ddp + GradScaler, autocast fp16"] = ddp(resnet18(device), replace(setup, half=True))
    return found


def checked(sides: dict[str, Step], batch: Batch) -> dict[str, Callable[[], object]]:
    """The sides with their batch, after steps in which they must have had the same losses."""
    losses = {name: [float(step(batch)) for _ in range(CHECKED_STEPS)] for name, step in sides.items()}
    exact = {name: values for name, values in losses.items() if "fp32" in name}
    refuse_disagreement(exact, TOLERANCES["fp32"])
    halves = {name: values for name, values in losses.items() if name not in exact}
    refuse_disagreement({"ours, fp32": exact["ours, fp32"], **halves}, TOLERANCES["half"])
    return {name: partial(step, batch) for name, step in sides.items()}


def synchronized(step: Callable[[], object]) -> None:
    step()
    torch.cuda.synchronize()


def batch_of(samples: int, device: torch.device) -> Batch:
    """Of this rank."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    images = torch.randn(samples, 1, 8, 8, generator=generator)
    return images.to(device), torch.randint(10, (samples,), generator=generator).to(device)


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
    before = live_storages()  # kept: otherwise one that is freed meanwhile would be subtracted
    model = resnet18(device)
    stepper = Stepper(model, AdamW(1e-3), Policy.named(policy), dist.group.WORLD)
    images, labels = torch.zeros(2, 1, 8, 8, device=device), torch.zeros(2, dtype=torch.int64, device=device)
    train_step(stepper, model, images, labels)
    del images, labels
    new = live_storages()
    num_bytes = sum(storage.nbytes() for pointer, storage in new.items() if pointer not in before)
    return num_bytes / sum(p.numel() for p in model.parameters())


def live_storages() -> dict[int, torch.UntypedStorage]:
    """By address, of all tensors that Python holds."""
    gc.collect()
    return {
        item.untyped_storage().data_ptr(): item.untyped_storage()
        for item in gc.get_objects()
        if issubclass(type(item), torch.Tensor)  # isinstance would import torch's deprecated lazy names
    }


def report(times: Times, sizes: dict[str, float], arguments: argparse.Namespace) -> None:
    rows = {}
    for name, seconds in times.items():
        rows[name] = row_of(seconds)
        for other, key in (("ours, fp32", "our_fp32"), (DDP, "ddp")):
            rows[name][f"median_over_{key}"] = rows[name]["median_ms"] / row_of(times[other])["median_ms"]
            rows[name][f"min_over_{key}"] = min(seconds) / min(times[other])
        if name.startswith("ours, "):
            rows[name]["state_bytes_per_parameter"] = sizes[name.removeprefix("ours, ")]
    print(f"{'':38} {'min ms':>8} {'median':>8} {'/our fp32':>10} {'/DDP':>6} {'state B/param':>14}")
    for name, row in rows.items():
        state = f"{row['state_bytes_per_parameter']:.2f}" if name.startswith("ours, ") else ""
        print(
            f"{name:38} {row['min_ms']:8.1f} {row['median_ms']:8.1f} {row['median_over_our_fp32']:10.2f} "
            f"{row['median_over_ddp']:6.2f} {state:>14}"
        )
    figures = figures_of(times, sizes)
    print(text_table(figures))
    what = f"ResNet-18, 8 x 8 images, batch {arguments.batch} per rank, {dist.get_world_size()} ranks"
    write(arguments.json, what, len(times[DDP]), rows, figures)


def figures_of(times: Times, sizes: dict[str, float]) -> list[Figure]:
    """Over the fastest form of DDP too: nobody keeps a slow one."""
    forms = [name for name in times if name.startswith("ddp")]
    fastest = min(forms, key=lambda name: row_of(times[name])["median_ms"])
    figures = [Figure.ratio("step, emulated fp16", times, "ours, fp16", "ours, fp32", 1.3)]
    for other in dict.fromkeys([DDP, fastest]):
        promised = 1.1 if other == DDP else None
        figures.append(Figure.ratio("step of two ranks, emulated fp16", times, "ours, fp16", other, promised))
        figures.append(Figure.ratio("step of two ranks, fp32", times, "ours, fp32", other))
    size = sizes["fp16"]
    what, unit = "training state of AdamW, fp16", "B/parameter"
    return [*figures, Figure(what, size, unit, "", None, size, size, size, promised=16.5)]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--batch", type=int, default=64, help="samples per rank")
    parser.add_argument("--repeats", type=int, default=12)
    parser.add_argument("--native", action="store_true", help="autocast to fp16 too, however slow")
    parser.add_argument("--quick", action="store_true", help="two repeats, to test this file")
    parser.add_argument("--json", type=Path, help="where to write the numbers")
    return parser.parse_args()


if __name__ == "__main__":
    main()
