"""Handwritten digits with the engine alone: from the process group to the saved weights, in one file.

    python recipes/examples/flat_loop.py digits/                       # one process, on a GPU if there is one
    torchrun --standalone --nproc-per-node=2 recipes/examples/flat_loop.py digits/

The same command resumes from digits/state.pt, with any number of ranks; --epochs 9 trains for longer. (*)
marks what differs from a loop with DistributedDataParallel and GradScaler.
"""

from __future__ import annotations

import argparse
import os
from importlib.resources import files
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from launcher.engine import SGD, Policy, Stepper

BATCH, TRAINED = 50, 1500  # samples per rank and step; samples to train on, of 1,797


def digits() -> tuple[TensorDataset, TensorDataset]:
    """Images [n, 1, 8, 8] and labels [n], to train on and to evaluate."""
    with np.load(str(files("launcher") / "data" / "images" / "digits.npz")) as arrays:
        images = torch.from_numpy(arrays["images"].astype(np.float32)).view(-1, 1, 8, 8) / 16
        labels = torch.from_numpy(arrays["labels"].astype(np.int64))
    training = TensorDataset(images[:TRAINED], labels[:TRAINED])
    return training, TensorDataset(images[TRAINED:], labels[TRAINED:])


def network() -> nn.Module:
    """[n, 1, 8, 8] to logits [n, 10]; the same on all ranks."""
    torch.manual_seed(0)
    layers = [nn.Conv2d(1, 32, 3), nn.BatchNorm2d(32), nn.ReLU(), nn.Conv2d(32, 32, 3), nn.ReLU()]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(32 * 16, 10))


def rank_and_size() -> tuple[int, int]:
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def evaluate(stepper: Stepper, data: TensorDataset) -> float:
    """Accuracy over the samples of all ranks, each counted once."""
    rank, size = rank_and_size()
    stepper.average_buffers()  # (*) BatchNorm statistics of all ranks
    stepper.model.eval()
    counts = torch.zeros(2, device=stepper.device)
    with torch.no_grad(), stepper.forward():  # (*)
        for inputs, labels in DataLoader(torch.utils.data.Subset(data, range(rank, len(data), size)), BATCH):
            correct = stepper.model(inputs.to(stepper.device)).argmax(1) == labels.to(stepper.device)
            counts += torch.stack([correct.sum(), torch.ones_like(correct).sum()])
    if dist.is_initialized():
        dist.all_reduce(counts)
    stepper.model.train()
    return float(counts[0] / counts[1])


def train(folder: Path, epochs: int, policy: Policy, device: torch.device) -> list[float]:
    """Train to the end of `epochs`; returns the mean loss of each step of this call."""
    rank, size = rank_and_size()
    training, validation = digits()
    sampler = DistributedSampler(training, size, rank, seed=0)  # type: ignore[var-annotated]
    loader = DataLoader(training, BATCH, sampler=sampler)
    stepper = Stepper(network().to(device), SGD(lr=0.05, momentum=0.9), policy)  # (*) no DDP, no GradScaler
    schedule = torch.optim.lr_scheduler.StepLR(stepper.lr_optimizer, step_size=3, gamma=0.3)  # (*) by epochs
    first, losses = 0, []
    if (folder / "state.pt").exists():
        saved = torch.load(folder / "state.pt", map_location="cpu", weights_only=True)
        stepper.load_state_dict(saved["stepper"])
        schedule.load_state_dict(saved["schedule"])
        first, stepper.lr = saved["epoch"], saved["lr"]
    for epoch in range(first, epochs):
        sampler.set_epoch(epoch)
        results = []
        for inputs, labels in loader:
            with stepper.forward():  # (*) in place of torch.autocast
                logits = stepper.model(inputs.to(device)).float()
            loss_sum = F.cross_entropy(logits, labels.to(device), reduction="sum")  # (*) not the mean
            stepper.backward(loss_sum, len(labels))  # (*)
            results.append(stepper.step())  # (*) reduces, unscales, updates or skips
        reports = [result.read() for result in results]  # waits for the device, so not in each step
        losses += [report.loss for report in reports]
        schedule.step()
        accuracy = evaluate(stepper, validation)
        state = {"stepper": stepper.state_dict(rank=0), "schedule": schedule.state_dict()}
        masters = stepper.named_masters(rank=0)  # fp32 weights
        if rank == 0:
            skipped = sum(report.skipped for report in reports)
            print(f"epoch {epoch + 1}: loss {losses[-1]:.4f}, accuracy {accuracy:.4f}, {skipped} skipped")
            torch.save(masters | dict(stepper.model.named_buffers()), folder / "weights.pt")
            torch.save(state | {"epoch": epoch + 1, "lr": stepper.lr}, folder / "state.new")
            os.replace(folder / "state.new", folder / "state.pt")  # as a whole: never half of one
    return losses


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--policy", default="fp16", help="fp16, amp_fp16, bf16, amp_bf16, fp32")
    words = parser.parse_args()
    device = torch.device(f"cuda:{os.environ.get('LOCAL_RANK', 0)}" if torch.cuda.is_available() else "cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if "RANK" in os.environ:  # under torchrun
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    words.folder.mkdir(parents=True, exist_ok=True)
    train(words.folder, words.epochs, Policy.named(words.policy), device)
    if dist.is_initialized():
        dist.destroy_process_group()
