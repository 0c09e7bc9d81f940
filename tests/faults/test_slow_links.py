"""Where links between hosts are slow all ranks wait alike: no rank is named but one with a slow loader."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from scripts.bench.network import lacking, network
from tests.faults.hosts import limit_link, run_on_hosts
from tests.faults.launching import Ended

pytestmark = [pytest.mark.timeout(180), pytest.mark.slow]
RECIPES = Path(__file__).with_name("bounds.py")
WORDS = (
    *(f"recipes.path={RECIPES}", "recipe.uses=half_a_megabyte", "data.batch_size=24"),
    *("checkpoint.every_steps=null", "train.epochs=100", "train.log_every_steps=10"),
)


def train(directory: Path, mbits: Sequence[int], *words: str) -> Ended:
    if reason := lacking():
        pytest.skip(reason)
    with network(len(mbits)) as hosts:
        for host, mbit in enumerate(mbits):
            limit_link(hosts, host, mbit)
        ended = run_on_hosts(hosts, directory / "run", *WORDS, *words)
    assert ended.codes == [0] * len(mbits), ended
    return ended


@pytest.mark.parametrize("mbits", [(1000, 20), (30, 30), (1000, 1000, 20)])
def test_no_rank_is_named_for_a_slow_link(tmp_path: Path, mbits: Sequence[int]) -> None:
    assert train(tmp_path, mbits, "train.max_steps=110").events("straggler") == []


def test_a_slow_loader_is_named(tmp_path: Path) -> None:
    words = ("train.max_steps=350", "recipe.uses=slow_set_of_rank_1", "data.num_workers=0")
    found = train(tmp_path, (1000, 1000), *words).events("straggler")
    assert {(event["rank"], event["cause"]) for event in found} == {(1, "data")}
