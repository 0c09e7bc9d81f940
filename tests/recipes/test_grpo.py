"""The reinforcement-learning example: 20 updates on two ranks, with an overflow that none of them applies."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from launcher.distributed.env import WorkerEnv
from launcher.engine import Policy
from tests.ranks.harness import run_ranks

FILE = Path(__file__).parents[2] / "recipes/examples/grpo.py"
CPU = torch.device("cpu")
ROUNDS, PLANTED = 10, 11  # two updates each; the update whose gradient becomes infinite on one rank


def grpo() -> ModuleType:
    spec = importlib.util.spec_from_file_location("grpo", FILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look there
    spec.loader.exec_module(module)
    return module


def trained(env: WorkerEnv, rounds: int, plants: bool) -> tuple[list[float], list[Any], dict[str, Tensor]]:
    loop, calls = grpo(), iter(range(1000))
    plain = loop.policy_loss

    def policy_loss(log_probs: Tensor, reference: Tensor, rollout: Any) -> Tensor:
        if next(calls) == PLANTED and plants and env.rank == 1:
            log_probs.register_hook(lambda gradient: gradient * float("inf"))
        loss_sum: Tensor = plain(log_probs, reference, rollout)
        return loss_sum

    loop.policy_loss = policy_loss
    rewards, reports, stepper = loop.train(rounds, Policy.fp16(), CPU)
    return rewards, reports, {name: value.clone() for name, value in stepper.replicas().items()}


def test_20_updates_on_two_ranks_with_an_overflow_that_none_applies() -> None:
    (rewards, reports, mine), (others, _, theirs) = run_ranks(2, trained, ROUNDS, True)
    assert rewards == others
    skipped = [number for number, report in enumerate(reports) if report.skipped]
    assert skipped == [PLANTED]
    assert reports[PLANTED].culprit_ranks == (1,)
    assert reports[-1].applied_steps == 2 * ROUNDS - 1
    assert all(torch.equal(value, theirs[name]) for name, value in mine.items())
    counts = {report.count for report in reports}
    assert len(counts) > 1  # completions are of unequal lengths, and each token counts once


def test_an_overflow_after_the_end_of_a_completion_is_masked() -> None:
    loop, log_probs = grpo(), torch.tensor([[-1.0, 0.0]], requires_grad=True)
    old, is_completion = torch.tensor([[-1.0, -500.0]]), torch.tensor([[True, False]])
    rollout = loop.Rollout(torch.zeros(1, 3), is_completion, old, -torch.ones(1), 0.0)
    loop.policy_loss(log_probs, old, rollout).backward()
    assert log_probs.grad is not None
    assert log_probs.grad.tolist() == [[1.0, 0.0]]


@pytest.mark.slow
def test_the_reward_rises() -> None:
    rewards, reports, _ = run_ranks(2, trained, 60, False)[0]
    assert rewards[0] < 0.2
    assert rewards[-1] > 0.9
    assert sum(report.skipped for report in reports) < 10
