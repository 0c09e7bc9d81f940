"""Reinforcement learning with the engine alone: group-relative policy optimisation of a small language model.

    python recipes/examples/grpo.py                                    # one process, on a GPU if there is one
    torchrun --standalone --nproc-per-node=2 recipes/examples/grpo.py  # half a minute on two CPU cores

The task: after a digit, write that digit eight times. Completions end at END, so their lengths differ. Each
round samples groups of completions with the half weights that train, scores them, and makes two updates with
the clipped loss of Shao et al., 2024 (arXiv:2402.03300), averaged over the tokens of all ranks. The old
log-probabilities come from the sampler. Advantages divide by the unbiased standard deviation of their group.
"""

from __future__ import annotations

import argparse
import copy
import os
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from launcher.engine import AdamW, Policy, Scaling, Stepper, StepReport

DIGITS, END, VOCABULARY, LONGEST = 10, 10, 11, 8
PROMPTS, GROUP, UPDATES = 8, 8, 2  # prompts per rank and round; completions of each; updates from them
CLIP, KL_WEIGHT = 0.2, 0.02


class Block(nn.Module):
    """[n, length, width] to the same: causal attention and two linear layers, each added to its input."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.norm1, self.norm2 = heads, nn.LayerNorm(width), nn.LayerNorm(width)
        self.query_key_value, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.widen, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.query_key_value(self.norm1(x)).unflatten(-1, (3, self.heads, -1))
        query, key, value = parts.permute(2, 0, 3, 1, 4)  # each [n, heads, length, width / heads]
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.project(mixed.transpose(1, 2).flatten(2))
        return x + self.narrow(F.gelu(self.widen(self.norm2(x))))


class LanguageModel(nn.Module):
    """tokens [n, length] to logits [n, length, VOCABULARY]"""

    def __init__(self, width: int = 64, layers: int = 2, heads: int = 4) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(VOCABULARY, width), nn.Embedding(LONGEST + 1, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY)
        nn.init.normal_(self.head.weight, std=0.01)  # at first all tokens are about as likely

    def forward(self, tokens: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        return self.head(self.norm(self.blocks(self.token(tokens) + self.position(positions))))


@dataclass(frozen=True)
class Rollout:
    """Completions of this rank's prompts; n = PROMPTS * GROUP."""

    tokens: Tensor  # [n, 1 + LONGEST], the prompt first
    is_completion: Tensor  # [n, LONGEST]: up to END, which belongs to it
    log_probs: Tensor  # [n, LONGEST], of the model that has sampled them
    advantages: Tensor  # [n]
    reward: float  # mean of this rank


def token_log_probs(model: nn.Module, tokens: Tensor) -> Tensor:
    """The log-probability of each token after the first, given those before: fp32 [n, length - 1]."""
    logits = model(tokens[:, :-1]).float()
    return logits.log_softmax(-1).gather(-1, tokens[:, 1:, None]).squeeze(-1)


@torch.no_grad()
def sample(stepper: Stepper, generator: torch.Generator) -> Rollout:
    """Groups of completions, by the weights that train: there is no second copy of them."""
    device = stepper.device
    prompts = torch.randint(DIGITS, (PROMPTS,), generator=generator).repeat_interleave(GROUP)
    tokens, log_probs = prompts[:, None].to(device), []
    ended = torch.zeros(len(tokens), dtype=torch.bool, device=device)
    masks = []
    for _ in range(LONGEST):
        with stepper.forward():  # the arithmetic of training
            logits = stepper.model(tokens)[:, -1].float()
        chosen = torch.multinomial(logits.softmax(-1).cpu(), 1, generator=generator).to(device)
        log_probs.append(logits.log_softmax(-1).gather(-1, chosen).squeeze(-1))
        masks.append(~ended)
        ended = ended | (chosen.squeeze(-1) == END)
        tokens = torch.cat([tokens, chosen], dim=1)
    is_completion = torch.stack(masks, dim=1)
    right = (tokens[:, 1:] == tokens[:, :1]) & is_completion
    rewards = right.sum(1) / LONGEST  # [n]
    groups = rewards.view(PROMPTS, GROUP)
    advantages = (groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-4)
    return Rollout(
        tokens, is_completion, torch.stack(log_probs, dim=1), advantages.flatten(), float(rewards.mean())
    )


def policy_loss(log_probs: Tensor, reference: Tensor, rollout: Rollout) -> Tensor:
    """The sum over the tokens of this rank's completions. Both log-probabilities: [n, LONGEST]."""
    after_end = ~rollout.is_completion  # masked before exp(): 0 times an inf of theirs would be nan
    ratio = (log_probs - rollout.log_probs).masked_fill(after_end, 0.0).exp()
    to_reference = (reference - log_probs).masked_fill(after_end, 0.0)
    advantages = rollout.advantages[:, None]
    gain = torch.minimum(ratio * advantages, ratio.clamp(1 - CLIP, 1 + CLIP) * advantages)
    kl = to_reference.exp() - to_reference - 1  # never negative; Schulman, 2020
    return (rollout.is_completion * (KL_WEIGHT * kl - gain)).sum()


def train(
    rounds: int, policy: Policy, device: torch.device, scaling: Scaling | None = None
) -> tuple[list[float], list[StepReport], Stepper]:
    """The mean reward of each round over all ranks, and the report of each update."""
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    torch.manual_seed(0)  # the same model on all ranks
    stepper = Stepper(
        LanguageModel().to(device),
        AdamW(lr=2e-3),
        policy,
        clip_norm=1.0,
        scaling=scaling or Scaling.of(policy),
    )
    reference = copy.deepcopy(stepper.model).requires_grad_(False)  # the policy before training
    generator = torch.Generator().manual_seed(1 + rank)  # other prompts and completions on each rank
    rewards, reports = [], []
    for number in range(rounds):
        rollout = sample(stepper, generator)
        with torch.no_grad(), stepper.forward():
            of_reference = token_log_probs(reference, rollout.tokens)
        for update in range(UPDATES):
            with stepper.forward():
                log_probs = token_log_probs(stepper.model, rollout.tokens)
            if number == update == 0 and rank == 0:
                gap = ((log_probs.detach() - rollout.log_probs) * rollout.is_completion).abs()
                print(f"largest |log ratio| of sampler and trainer: {float(gap.max()):.2g}")
            loss_sum = policy_loss(log_probs, of_reference, rollout)
            # Of this rank's tokens: the step divides by those of all ranks, however many each has.
            stepper.backward(loss_sum, int(rollout.is_completion.sum()))
            # An overflow on any rank is skipped by all, which keep sampling with equal weights.
            reports.append(stepper.step().read())
        mean = torch.tensor([rollout.reward / size], device=device)
        if dist.is_initialized():
            dist.all_reduce(mean)
        rewards.append(float(mean))
        if rank == 0 and (number % 10 == 9 or number == rounds - 1):
            skipped = reports[-1].skipped_steps
            print(
                f"round {number + 1}: reward {rewards[-1]:.3f}, {skipped} of {len(reports)} updates skipped"
            )
    return rewards, reports, stepper


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=80)
    parser.add_argument("--policy", default="fp16", help="fp16, amp_fp16, bf16, amp_bf16, fp32")
    words = parser.parse_args()
    device = torch.device(f"cuda:{os.environ.get('LOCAL_RANK', 0)}" if torch.cuda.is_available() else "cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if "RANK" in os.environ:  # under torchrun
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    train(words.rounds, Policy.named(words.policy), device)
    if dist.is_initialized():
        dist.destroy_process_group()
