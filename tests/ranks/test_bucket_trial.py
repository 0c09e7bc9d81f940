"""wire.bucket_mb=auto: ranks that measure different times choose one size, and train with it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from launcher.distributed.env import WorkerEnv
from launcher.engine import Policy, Wire
from launcher.telemetry import Telemetry
from launcher.training.parts.bucket_trial import PAYS, ROUNDS, WARM_UP, BucketTrial
from launcher.training.progress import Position
from tests.engine.observe import train
from tests.ranks.harness import run_ranks
from tests.ranks.test_bucket_sizes import stepper_of
from tests.training.parts.test_log import Recorder

START = 40  # steps before the run was resumed
SIZES = 3
LENGTH = WARM_UP + SIZES * ROUNDS
LAG = 3  # steps until the last time has arrived: read one step late, sent in the next, read one step late


def chosen(env: WorkerEnv, times: dict[int, list[list[float]]], steps_left: int) -> dict[str, object]:
    """What a rank has after a trial in which steps take `times` by number of buckets, rank and turn."""
    recorder = Recorder()
    stepper = stepper_of(env, Policy.fp16(), Wire())
    decide = Telemetry([recorder]).decision
    trial = BucketTrial(stepper, env.world_size, START + steps_left, False, decide)
    trial.begin(START)
    waiting, sent = None, []
    for step in range(START + 1, START + 1 + LENGTH + LAG + 2):
        position = Position(0, step - 1, step)
        trial.vote(position)
        num_buckets = len(stepper.reducer.buckets)
        sent.append(num_buckets)
        report = train(stepper, torch.ones(4, 16), torch.zeros(4, dtype=torch.int64))
        if waiting is not None:
            trial.after_step(*waiting)
        of_rank = times[num_buckets][env.rank % len(times[num_buckets])] if times else [0.0]
        own_ms = of_rank[sent.count(num_buckets) % len(of_rank)]
        waiting = position, replace(report, spans_ms={"data": 1e6, "compute": own_ms, "wire": 0.25})
    return {"decisions": recorder.of("decision"), "sent": sent}


CASES = [  # milliseconds by number of buckets and rank, the best number, what is said
    # Each rank alone would choose another size than both together.
    ({9: [[5.0], [9.0]], 5: [[9.0], [5.0]], 3: [[6.0], [6.0]]}, 3, "1 MB, measured: a step takes "),
    ({9: [[5.0], [6.0]], 5: [[7.0], [7.0]], 3: [[7.0], [7.0]]}, 9, "0.25 MB, measured: a step takes "),
    ({9: [[5.0], [5.9]], 5: [[7.0], [7.0]], 3: [[5.0], [6.0]]}, 3, "no other is faster in nearly all rounds"),
    # A better median, but not in all rounds: other processes take time.
    ({9: [[9.0, 4.0]], 5: [[7.0]], 3: [[5.0]]}, 3, "no other is faster in nearly all rounds"),
]


def all_chosen(env: WorkerEnv) -> list[dict[str, object]]:
    """By case; the last is of a run that is too short."""
    return [
        *(chosen(env, times, PAYS * SIZES * ROUNDS) for times, _, _ in CASES),
        chosen(env, {}, PAYS * SIZES * ROUNDS - 1),
    ]


def test_all_ranks_choose_the_size_whose_steps_take_least() -> None:
    for *measured, short in run_ranks(2, all_chosen):
        for found, (times, best, said) in zip(measured, CASES, strict=True):
            (decision,) = found["decisions"]
            assert decision["topic"] == "buckets"
            assert said in decision["text"]
            means = [sum(each[-1] for each in ranks) / len(ranks) + 0.25 for ranks in times.values()]
            assert sorted(decision["step_ms"].values()) == pytest.approx(sorted(means))
            sent = found["sent"]
            trial = sent[WARM_UP:LENGTH]
            assert {number: trial.count(number) for number in times} == dict.fromkeys(times, ROUNDS)
            assert set(sent[:WARM_UP] + sent[LENGTH : LENGTH + LAG]) == {3}
            assert set(sent[LENGTH + LAG :]) == {best}
        (decision,) = short["decisions"]
        assert decision["text"] == "1 MB, from the model's size: 209 steps are too few to measure other sizes"
        assert set(short["sent"]) == {3}
