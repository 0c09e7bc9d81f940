"""Ranks that were started differently leave before the first step, all with the same difference."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from launcher.distributed import preflight
from launcher.distributed.env import WorkerEnv
from launcher.errors import PreflightError
from tests.configs import composed
from tests.ranks.harness import run_ranks


def meet_with(env: WorkerEnv, folder: str, difference: str) -> str:
    """What the rank gets; rank 1 is the odd one."""
    store = dist.FileStore(f"{folder}/store", env.world_size)
    config = composed()
    if env.rank == 1 and difference == "config":
        config = replace(config, optim=replace(config.optim, lr=0.5))
    if env.rank == 1 and difference == "seed":
        config = replace(config, seed=7)
    if difference == "recipe":
        recipe = Path(folder) / f"recipe{env.rank}.py"
        recipe.write_text(f"# of rank {env.rank}")
        config = replace(config, recipes=replace(config.recipes, path=str(recipe)))
    if env.rank == 1 and difference == "torch":
        torch.__version__ = "2.99.0"
    try:
        return ", ".join(peer.device for peer in preflight.exchange_rank_info(config, env, store, "0"))
    except PreflightError as error:
        return str(error)


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize(
    ("difference", "told"),
    [
        ("config", "rank 1: the digest of the config is "),
        ("seed", "rank 1: the seed is 7, and 0 on rank 0"),
        ("recipe", "rank 1: the digest of the recipe file is "),
        ("torch", f"rank 1: torch is 2.99.0, and {torch.__version__} on rank 0"),
    ],
)
def test_ranks_that_were_started_differently_are_refused_on_all_ranks(difference, told) -> None:
    with tempfile.TemporaryDirectory() as folder:
        answers = run_ranks(2, meet_with, folder, difference)
    assert answers[0] == answers[1]
    assert told in answers[0]


def test_ranks_that_were_started_alike_learn_what_each_runs_on() -> None:
    with tempfile.TemporaryDirectory() as folder:
        answers = run_ranks(2, meet_with, folder, "")
    assert answers[0] == answers[1]
    assert answers[0].count("CPU") == 2
