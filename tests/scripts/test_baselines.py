"""The peers of the benchmarks train as we do, and a side that does not is noticed."""

from __future__ import annotations

import copy
import random
from collections.abc import Sequence

import pytest
import torch
from torch import nn

from launcher.distributed.env import WorkerEnv
from scripts.bench.baselines import PEERS, Disagreement, Setup, installed, refuse_disagreement
from scripts.bench.interleaved import CANNOT_BE_SAID, Figure, interleave, median_interval, text_table
from scripts.bench.ours import ours
from tests.ranks.harness import run_ranks

STEPS = 8


def losses_of(names: Sequence[str], half: bool) -> dict[str, list[float]]:
    """The first losses of ours and of these peers, all from the same weights and with the same batch."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 10))
    batch = torch.randn(16, 32), torch.randint(10, (16,))
    setup = Setup(half=half)
    own = ours(copy.deepcopy(model), setup, "fp16" if half else "fp32", emulate=False if half else None)
    sides = {"ours": own} | {name: PEERS[name](copy.deepcopy(model), setup) for name in names}
    return {side: [float(step(batch)) for _ in range(STEPS)] for side, step in sides.items()}


@pytest.mark.parametrize("half", [False, True], ids=["fp32", "fp16"])
def test_the_raw_loop_trains_as_we_do(half) -> None:
    refuse_disagreement(losses_of(["raw"], half), 0.002)


@pytest.mark.slow
@pytest.mark.parametrize("half", [False, True], ids=["fp32", "fp16"])
@pytest.mark.parametrize("name", ["accelerate", "fabric", "lightning"])
def test_each_library_trains_as_we_do(name, half, monkeypatch) -> None:
    monkeypatch.setenv("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # Lightning sets it
    if not installed(name):
        pytest.skip(f"{name} is not installed: it is in the extra bench")
    refuse_disagreement(losses_of([name], half), 0.002)


def losses_of_rank(env: WorkerEnv) -> list[dict[str, list[float]]]:
    return [losses_of(["ddp", "ddp + hook", "replicate"], half) for half in (False, True)]


@pytest.mark.slow
def test_each_peer_on_two_ranks_trains_as_we_do() -> None:
    for rank in run_ranks(2, losses_of_rank):
        for losses in rank:
            refuse_disagreement(losses, 0.002)


@pytest.mark.parametrize(
    ("found", "said"),
    [
        ([2.0, 2.0, 2.0], "cheat does not train as ours does: its losses are 50.00% apart"),
        ([2.0, 1.5, float("nan")], "does not train as ours does"),
    ],
    ids=["no optimizer", "nan"],
)
def test_a_side_that_computes_something_else_is_refused(found, said) -> None:
    with pytest.raises(Disagreement, match=said):
        refuse_disagreement({"ours": [2.0, 1.5, 1.0], "cheat": found}, 0.01)


def test_a_comparison_that_could_notice_nothing_is_refused() -> None:
    with pytest.raises(Disagreement, match="too little for a comparison"):
        refuse_disagreement({"ours": [2.0, 1.99], "cheat": [2.0, 2.0]}, 0.01)


def test_the_sides_alternate_and_none_always_follows_the_same() -> None:
    calls: list[str] = []
    sides = {name: lambda name=name: calls.append(name) for name in "abc"}
    times = interleave(sides, 6, warm_up=0)
    rounds = ["".join(calls[start : start + 3]) for start in range(0, 18, 3)]
    assert all(sorted(each) == ["a", "b", "c"] for each in rounds)
    assert len(set(rounds)) > 3
    assert {name: len(values) for name, values in times.items()} == {"a": 6, "b": 6, "c": 6}


def test_a_ratio_is_of_the_medians_of_both_sides() -> None:
    times = {"ours": [2.0, 2.0, 9.0], "theirs": [1.0, 2.0, 2.0]}
    figure = Figure.ratio("what", times, "ours", "theirs", promised=0.9)
    assert (figure.value, figure.low, figure.high) == (1.0, 1.0, 4.5)
    assert figure.kept == "no"
    assert text_table([figure]).endswith("<= 0.9    no")


@pytest.mark.parametrize(
    ("ratios", "interval", "kept"),
    [
        ([0.7] * 8, (0.7, 0.7), "yes"),
        ([0.5, *[0.7] * 6, 9.0], (0.7, 0.7), "yes"),
        ([0.5, *[1.1] * 6, 9.0], (1.1, 1.1), "no"),
        ([0.5, 0.8, 0.8, 0.8, 1.1, 1.1, 1.1, 9.0], (0.8, 1.1), CANNOT_BE_SAID),
        ([0.8, 0.8, 0.8, 1.1], (0.8, 1.1), CANNOT_BE_SAID),
    ],
)
def test_a_promise_is_judged_if_the_interval_lies_on_one_side_of_it(ratios, interval, kept) -> None:
    times = {"ours": ratios, "theirs": [1.0] * len(ratios)}
    figure = Figure.ratio("what", times, "ours", "theirs", promised=0.9)
    assert (figure.low, figure.high) == interval
    assert figure.kept == kept


def test_the_interval_has_the_median_nine_times_in_ten() -> None:
    generator = random.Random(0)
    for n in (5, 8, 20):
        drawn = [median_interval([generator.gauss(0, 1) for _ in range(n)]) for _ in range(2000)]
        assert sum(low <= 0 <= high for low, high in drawn) >= 0.89 * len(drawn)
