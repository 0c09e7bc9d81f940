"""Where this rank's steps spend their time."""

from __future__ import annotations

import json

import pytest
import torch

from launcher.distributed.env import WorkerEnv
from launcher.trainer.step_times import StepTimeTotals, phase_ms, slowest_rank_times
from tests.ranks.harness import run_ranks

CPU = torch.device("cpu")
ALONE = WorkerEnv(0, 1, 0, 1, CPU, None)
SPANS = {"data": 1.0, "compute": 5.0, "communication": 2.0, "update": 3.0}


def test_without_other_ranks_the_reading_of_the_gradient_is_update() -> None:
    assert phase_ms(SPANS, 2) == {
        "data_ms": 1.0,
        "compute_ms": 5.0,
        "communication_ms": 2.0,
        "update_ms": 3.0,
    }
    assert phase_ms(SPANS, 1) == {
        "data_ms": 1.0,
        "compute_ms": 5.0,
        "communication_ms": 0.0,
        "update_ms": 5.0,
    }


@pytest.mark.parametrize(
    ("seconds", "steps", "step_ms"), [([9.0], 1, 9e3), ([9.0, 1.0], 1, 1e3), ([9, 1, 3], 2, 2e3)]
)
def test_the_first_step_counts_only_while_it_is_the_only_one(seconds, steps, step_ms) -> None:
    times = StepTimeTotals(1, skip_first=True)
    assert slowest_rank_times(ALONE, times) is None
    for each in seconds:
        times.add(each, SPANS)
    found = slowest_rank_times(ALONE, times)
    assert found is not None
    assert (found["steps"], found["step_ms"], found["data_ms"]) == (steps, step_ms, 1.0)
    assert (found["rank"], found["waited_ms"]) == (0, 0.0)


def slowest_of(env: WorkerEnv, waits_ms: list[float]) -> str:
    times = StepTimeTotals(env.world_size)
    times.add(0.01, SPANS | {"communication": waits_ms[env.rank], "data": float(env.rank)})
    return json.dumps(slowest_rank_times(env, times))


def test_the_slowest_rank_is_the_one_that_waits_least() -> None:
    texts = run_ranks(2, slowest_of, [7.0, 0.5])
    assert texts[0] == texts[1]
    found = json.loads(texts[0])
    assert (found["rank"], found["waited_ms"], found["data_ms"], found["communication_ms"]) == (
        1,
        6.5,
        1.0,
        0.5,
    )
    assert found["auto_share_gain"] == 1.0, "both compute as long"


def gain_of(env: WorkerEnv) -> float:
    times = StepTimeTotals(env.world_size)
    times.add(0.040, SPANS | {"compute": [10.0, 30.0][env.rank]})
    found = slowest_rank_times(env, times)
    assert found is not None
    return found["auto_share_gain"]


def test_the_gain_of_shares_by_speed_is_that_of_the_whole_step() -> None:
    """Of 40 ms, 30 are computed by the slower rank, and with shares of 3 to 1 both compute for 15."""
    assert run_ranks(2, gain_of) == pytest.approx([40 / 25] * 2)
