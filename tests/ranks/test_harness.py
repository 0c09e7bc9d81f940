"""The harness itself: results by rank, failures with their traceback, deadlines, no process left."""

import multiprocessing
import os
import time

import pytest
import torch
import torch.distributed as dist

from launcher.distributed.env import WorkerEnv
from tests.ranks.harness import RankFailure, run_ranks


def sum_of_ranks(env: WorkerEnv, offset: int) -> float:
    value = torch.tensor(float(env.rank + offset))
    if env.group is not None:
        dist.all_reduce(value, group=env.group)
    return value.item()


def fail_on_rank_1(env: WorkerEnv) -> None:
    if env.rank == 1:
        raise ValueError("a fault on purpose")
    dist.barrier()


def die_on_rank_1(env: WorkerEnv) -> None:
    if env.rank == 1:
        os._exit(3)
    time.sleep(30)


def sleep(env: WorkerEnv) -> None:
    time.sleep(30)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_every_rank_takes_part(world_size: int) -> None:
    total = world_size * 10 + sum(range(world_size))
    assert run_ranks(world_size, sum_of_ranks, 10) == [total] * world_size


@pytest.mark.parametrize(
    ("work", "message"),
    [
        (fail_on_rank_1, "(?s)rank 1 raised.*a fault on purpose"),
        (die_on_rank_1, "rank 1 died"),
        (sleep, r"ranks \[0, 1\] did not finish"),
    ],
)
def test_failures_name_the_rank_and_leave_no_process(work, message) -> None:
    with pytest.raises(RankFailure, match=message):
        run_ranks(2, work, timeout_s=2 if work is sleep else 20)
    assert not multiprocessing.active_children()
