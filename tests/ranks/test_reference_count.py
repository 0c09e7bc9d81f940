"""n0 of the loss boundary: from the counts of the first step, alike on all ranks, in the unit of the loss."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from launcher.distributed.env import WorkerEnv
from launcher.engine import SGD, AdamW, DDPOptions, Policy, Scaling, Stepper
from launcher.errors import ReplicaError
from launcher.trainer.replica_consistency import check_replicas
from tests.faults.launching import run
from tests.models import Planted
from tests.ranks.harness import run_ranks

WORDS, LENGTH, SEQUENCES = 64, 256, 8


class Language(nn.Module):
    """Next-token model: tokens int64 [n, length] to logits [n, length, WORDS]."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(WORDS, 32)
        self.mix = nn.Linear(32, 32)
        self.head = nn.Linear(32, WORDS)

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.head(torch.tanh(self.mix(self.embedding(tokens))))
        return logits


def tokens_of(step: int) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    start = torch.randint(WORDS, (SEQUENCES, 1), generator=generator)
    return (start + 3 * torch.arange(LENGTH + 1)) % WORDS


def train_language(stepper: Stepper, step: int) -> None:
    tokens = tokens_of(step)
    with stepper.forward():
        logits = stepper.model(tokens[:, :-1]).float()
    loss_sum = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum")
    stepper.backward(loss_sum, tokens[:, 1:].numel())


def skipped_of_language(reference_count: int | None) -> int:
    stepper = Stepper(Language(), AdamW(1e-3), Policy.fp16(), emulate=True, reference_count=reference_count)
    skipped = 0
    for step in range(6):
        train_language(stepper, step)
        skipped = stepper.step().read().skipped_steps
    return skipped


def test_a_language_model_does_not_skip_for_the_length_of_its_sequences() -> None:
    """n0 of samples, as it was, and of tokens, as the loss counts."""
    assert skipped_of_language(SEQUENCES) >= 2
    assert skipped_of_language(None) == 0


# by rank, the counts of its micro-batches; n0
SHARES: list[tuple[list[list[int]], int]] = [
    ([[8]], 8),
    ([[8], [8]], 8),
    ([[22], [21], [21]], 16),  # 64 / 3
    ([[4, 4], [4, 4]], 8),
    ([[4, 4], [4]], 8),
    ([[], [6]], 4),  # 6 / 2 = 3
    ([[], [256, 256]], 256),
]


def agreed(env: WorkerEnv, shares: list[list[int]]) -> tuple[int | None, list[int], int | None]:
    """n0; by step, the collectives more than with a given one; n0 of a stepper that loads the state."""
    calls = 0
    original = dist.all_reduce

    def counted(*args, **kwargs):
        nonlocal calls
        calls += 1
        return original(*args, **kwargs)

    dist.all_reduce = counted
    steppers = [
        Stepper(
            Planted(),
            SGD(0.1),
            group=env.group,
            scaling=Scaling(init=1),
            ddp=DDPOptions(overlap=False),  # the two Steppers share a group
            micro_batches=max(map(len, shares)),
            reference_count=reference_count,
        )
        for reference_count in (None, 1)
    ]
    counts: list[list[int]] = []
    for stepper in steppers:
        counts.append([])
        for _ in range(2):
            calls = 0
            for count in shares[env.rank]:
                stepper.backward(stepper.model(1.0, 1.0), count)
            stepper.step().read()
            counts[-1].append(calls)
    extra = [ours - given for ours, given in zip(*counts, strict=True)]
    fresh = Stepper(Planted(), SGD(0.1), group=env.group, micro_batches=max(map(len, shares)))
    fresh.load(steppers[0].state())
    return steppers[0].state().reference_count, extra, fresh.state().reference_count


@pytest.mark.sampled(every=6, first=5)
@pytest.mark.parametrize(("shares", "n0"), SHARES, ids=str)
def test_all_ranks_agree_in_the_first_step_alone(shares, n0) -> None:
    grouped = len(shares) > 1
    for found, extra, resumed in run_ranks(len(shares), agreed, shares):
        assert found == resumed == n0
        assert extra == [grouped, 0]


def given_differently(env: WorkerEnv) -> str:
    stepper = Stepper(Planted(), SGD(0.1), group=env.group, scaling=Scaling(init=1))
    stepper.backward(stepper.model(1.0, 1.0), 8)
    stepper.step()
    check_replicas(stepper)
    stepper._step.reference_count.agreed = 8 << env.rank
    try:
        check_replicas(stepper)
    except ReplicaError as error:
        return str(error)
    return ""


def test_another_reference_count_on_one_rank_is_caught_at_the_next_check() -> None:
    assert all("(reference count)" in text for text in run_ranks(2, given_differently))


TOKENS = """
import torch
from torch import nn
from torch.nn import functional as F
from launcher.recipe import Loss, Recipe, TensorData, recipe

def loss(network, batch):
    out = network(batch["x"]).float()  # [n, 16, 4]: 16 tokens a sample
    return Loss(F.cross_entropy(out.flatten(0, 1), batch["y"].flatten(), reduction="sum"), batch["y"].numel())

@recipe("tokens")
def tokens(config):
    data = TensorData({"x": torch.randn(64, 16, 3), "y": torch.randint(4, (64, 16))})
    return Recipe(lambda: nn.Linear(3, 4), data, data, loss)
"""


@pytest.mark.slow
@pytest.mark.timeout(90)
@pytest.mark.parametrize(("ranks", "mode", "n0"), [(1, "dynamic", 256), (2, "dynamic", 128)])
def test_the_launcher_counts_what_the_recipe_counts_and_a_resume_keeps_it(
    tmp_path: Path, ranks: int, mode: str, n0: int
) -> None:
    (tmp_path / "tokens.py").write_text(TOKENS)
    words = [
        f"recipes.path={tmp_path / 'tokens.py'}",
        "recipe.uses=tokens",
        f"precision.loss_scale.mode={mode}",
    ]
    for steps in (3, 5):
        ended = run(tmp_path / "run", *words, f"train.max_steps={steps}", ranks=ranks)
        assert ended.codes == [0] * ranks, ended
        state = json.loads((ended.checkpoints[steps] / "state.json").read_text())
        assert state["engine"]["reference_count"] == n0
    assert ended.events("restart")
