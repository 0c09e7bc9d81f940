"""Each part of a step is made its bound on purpose, and the end of the run says so."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from launcher.config.codec import decoded
from launcher.telemetry.events import EndEvent
from launcher.telemetry.step_time import PARTS, TimeShares, time_at_end
from scripts.bench.network import Network, lacking, network
from tests.faults.bounds import SAMPLE_S
from tests.faults.hosts import limit_link, run_on_hosts
from tests.faults.launching import Ended, run

pytestmark = [pytest.mark.timeout(120), pytest.mark.slow]
RECIPES = Path(__file__).with_name("bounds.py")
FIXED = (f"recipes.path={RECIPES}", "checkpoint.every_steps=null", "train.max_steps=40", "train.epochs=100")


def split_of(ended: Ended) -> TimeShares:
    assert ended.codes == [0] * len(ended.codes), ended
    (end,) = ended.events("end")
    shares = time_at_end(decoded(EndEvent, end))
    assert shares is not None
    assert shares.verdict in ended.outputs[0]
    assert ended.result["step_time"] == end["step_time"]
    # The sum of the parts is the step: what is in no part is what the loop does between two steps.
    assert sum(shares.parts_ms.values()) <= 1.02 * shares.step_ms
    for event in ended.events("step"):
        parts = sum(event[part] for part in (*PARTS, "other_ms"))
        assert parts == pytest.approx(event["step_ms"], rel=0.02, abs=0.1)
    return shares


BOUNDS = {
    "slow_set": (1, ("data.num_workers=0",), "input-bound"),
    "large": (1, ("data.batch_size=512", "precision=fp32"), "compute-bound"),
    "table": (1, ("data.batch_size=4", "optim=adamw", "precision=fp32"), "update-bound"),
    "tiny": (1, (), "overhead-bound"),
}


def busy_host() -> None:
    """The host works between two steps for longer than they take, as one with many callbacks does."""
    from launcher.trainer.callbacks.step_logger import StepLogger

    log = StepLogger.on_step_metrics

    def log_slowly(self: StepLogger, *step: Any) -> None:
        time.sleep(0.03)
        log(self, *step)

    StepLogger.on_step_metrics = log_slowly  # type: ignore[method-assign]


@pytest.mark.parametrize("name", BOUNDS)
def test_what_bounds_the_step_is_named(tmp_path: Path, name) -> None:
    ranks, words, verdict = BOUNDS[name]
    prepare = busy_host if name == "tiny" else None
    words = (*FIXED, *words, f"recipe.uses={name}")
    shares = split_of(run(tmp_path / "run", *words, ranks=ranks, prepare=prepare))
    assert shares.verdict.startswith(f"{verdict}:"), shares
    if name == "slow_set":
        assert 16 * SAMPLE_S < shares.parts_ms["data_ms"] / 1e3 < 32 * SAMPLE_S
    assert shares.parts_ms["communication_ms"] == 0.0, "there is none"


def test_where_one_rank_waits_for_another_the_slow_one_is_named_with_its_bound(tmp_path: Path) -> None:
    """Rank 0, which writes the events, waits in the exchange of gradients."""
    words = ("data.num_workers=0", "recipe.uses=slow_set_of_rank_1")
    ended = run(tmp_path / "run", *FIXED, *words, ranks=2)
    shares = split_of(ended)
    assert shares.verdict.startswith("input-bound: "), shares
    assert "of the step of rank 1, for which the others wait, waits for data" in shares.verdict
    assert ended.events("step")[-1]["communication_ms"] > ended.events("step")[-1]["data_ms"]


@pytest.fixture
def slow_link() -> Iterator[Network]:
    """Two hosts on a link of 100 Mbit/s."""
    if reason := lacking():
        pytest.skip(reason)
    with network(2) as made:
        for host in range(2):
            limit_link(made, host, 100)
        yield made


def test_a_slow_link_is_named(tmp_path: Path, slow_link: Network) -> None:
    """1 M parameters at 100 Mbit/s: 2 MB each way take 168 ms, the rest a tenth of that."""
    words = [*FIXED, "recipe.uses=wide", "data.batch_size=8", "train.max_steps=8"]
    shares = split_of(run_on_hosts(slow_link, tmp_path / "run", *words))
    assert shares.verdict.startswith("communication-bound: "), shares
    assert 120 < shares.parts_ms["communication_ms"] < 300
