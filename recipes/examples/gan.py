"""A generative adversarial network: a training loop of one's own around two Steppers.

Goodfellow et al., 2014 (arXiv:1406.2661), with the generator's loss of section 3 that does not saturate. The
data are points on a circle. Each network has its own Stepper, so its own loss scale, and a step that
overflows in one does not hold up the other.

    torchrun --standalone --nproc-per-node=2 recipes/examples/gan.py --steps 500
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from launcher.engine import AdamW, Policy, Stepper

BATCH, NOISE = 64, 8  # samples per rank; numbers that the generator begins with


def network(inputs: int, outputs: int) -> nn.Module:
    return nn.Sequential(
        nn.Linear(inputs, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, outputs)
    )


def circle(generator: torch.Generator) -> Tensor:
    """[batch, 2], near the unit circle."""
    angle = 2 * torch.pi * torch.rand(BATCH, generator=generator)
    return torch.stack([angle.cos(), angle.sin()], dim=1) + 0.02 * torch.randn(BATCH, 2, generator=generator)


def judged(logits: Tensor, real: bool) -> Tensor:
    """The summed loss of calling all of them real, or all of them made."""
    return F.binary_cross_entropy_with_logits(logits, torch.full_like(logits, float(real)), reduction="sum")


def train(steps: int, device: torch.device) -> tuple[Stepper, Stepper]:
    torch.manual_seed(0)  # the same networks on all ranks
    maker, judge = network(NOISE, 2).to(device), network(2, 1).to(device)
    optimizer = AdamW(1e-3, betas=(0.5, 0.999), weight_decay=0.0)
    # Each in a group of its own, so that the messages of one overlap the passes of the other.
    make = Stepper(maker, optimizer, Policy.fp16(), dist.new_group())
    call = Stepper(judge, optimizer, Policy.fp16(), dist.new_group())
    own = torch.Generator().manual_seed(1 + dist.get_rank())  # other samples on each rank
    for step in range(1, steps + 1):
        real, noise = circle(own).to(device), torch.randn(BATCH, NOISE, generator=own).to(device)

        with torch.no_grad(), make.forward():
            made = maker(noise).float()
        with call.forward():
            logits = judge(torch.cat([real, made])).float()
        call.backward(judged(logits[:BATCH], True) + judged(logits[BATCH:], False), 2 * BATCH)
        of_judge = call.step()

        judge.requires_grad_(False)  # the generator's backward passes through it
        with make.forward():
            logits = judge(maker(noise)).float()
        make.backward(judged(logits, True), BATCH)
        of_maker = make.step()
        judge.requires_grad_(True)

        if step % 100 == 0 and dist.get_rank() == 0:
            generator_loss, discriminator_loss = of_maker.read().loss, of_judge.read().loss
            print(f"step {step}: generator {generator_loss:.3f}, discriminator {discriminator_loss:.3f}")
    return make, call


def refuse_unlike(networks: nn.Module) -> None:
    """Raise SystemExit unless all ranks have the same weights, bit for bit."""
    weights = nn.utils.parameters_to_vector(networks.parameters()).float()
    low, high = weights.clone(), weights.clone()
    dist.all_reduce(low, dist.ReduceOp.MIN)
    dist.all_reduce(high, dist.ReduceOp.MAX)
    if not torch.equal(low, high):
        raise SystemExit("the ranks' networks differ")


def main() -> None:
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--steps", type=int, default=2000)
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    dist.init_process_group("nccl" if cuda else "gloo")
    make, call = train(arguments.parse_args().steps, device)
    refuse_unlike(nn.ModuleList([make.model, call.model]))
    with torch.no_grad(), make.forward():
        points = make.model(torch.randn(1000, NOISE, device=device)).float()
    if dist.get_rank() == 0:
        print(f"made points lie at {points.norm(dim=1).mean():.3f} from the centre")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
