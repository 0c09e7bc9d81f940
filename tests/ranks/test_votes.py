"""What ranks ask of each other with the counts of a step, without a collective of its own."""

from __future__ import annotations

import torch

from launcher.distributed.env import WorkerEnv
from launcher.engine import SGD, Stepper
from tests.models import features, loss_sum, mlp
from tests.ranks.harness import run_ranks


def votes_of_three_steps(env: WorkerEnv) -> list[tuple[int, ...]]:
    stepper = Stepper(mlp(), SGD(lr=0.1), group=env.group, reference_count=4)
    seen = []
    for step in range(3):
        if step == 1:
            stepper.vote(0)
            if env.rank == 1:
                stepper.vote(2)
                stepper.vote(2)  # once more is still one vote
                stepper.vote(3, votes=5)
        if env.rank == 0 or step != 1:  # in one step rank 1 votes without a sample
            inputs, classes = features(4, step)
            with stepper.forward():
                logits = stepper.model(inputs)
            stepper.backward(loss_sum(logits, classes), 4)
        if step == 1 and env.rank == 0:
            stepper.vote(1)  # a request to stop that arrives within the step
        seen.append(stepper.step().read().votes[:4])
    return seen


def test_all_ranks_read_the_same_votes_and_they_count_for_one_step() -> None:
    torch.manual_seed(0)
    expected = [(0, 0, 0, 0), (2, 1, 1, 5), (0, 0, 0, 0)]
    assert run_ranks(2, votes_of_three_steps) == [expected, expected]


def test_a_single_process_reads_its_own_vote() -> None:
    assert run_ranks(1, votes_of_three_steps)[0][1] == (1, 1, 0, 0)
