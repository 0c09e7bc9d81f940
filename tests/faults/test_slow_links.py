"""A slow link between hosts is named while the run goes on; equal links and a slow loader are not."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from pathlib import Path

import pytest

from launcher.report.page import write_report
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


@pytest.mark.parametrize("mbits", [(1000, 20), (20, 1000), (1000, 1000, 20)])
def test_the_slow_link_is_named_with_rank_host_and_rate(tmp_path: Path, mbits: Sequence[int]) -> None:
    ended = train(tmp_path, mbits, "train.max_steps=110")
    slow, ranks = mbits.index(20), len(mbits)
    found = ended.events("straggler")
    assert found, ended
    host = socket.gethostname()
    assert {(event["rank"], event["host"], event["cause"]) for event in found} == {(slow, host, "link")}
    assert {event["receiver"] for event in found} <= {(slow + 1) % ranks, (slow - 1) % ranks}
    assert all(12 < event["mbit_per_s"] < 28 for event in found), found
    (text,) = (text for text in ended.warnings if "the link of rank" in text)
    assert f"the link of rank {slow} on {host}, which sends to rank" in text
    assert "Ranks that the others waited for" in write_report(tmp_path / "run").read_text()


@pytest.mark.parametrize(
    ("mbits", "words"),
    [
        ((30, 30), ("train.max_steps=110",)),
        ((30, 30, 30), ("train.max_steps=110",)),
        ((1000, 1000), ("train.max_steps=800",)),
    ],
)
def test_where_all_links_are_alike_none_is_named(tmp_path: Path, mbits: Sequence[int], words: str) -> None:
    ended = train(tmp_path, mbits, *words)
    assert not [event for event in ended.events("straggler") if event["cause"] == "link"], ended


def test_a_slow_loader_is_no_slow_link(tmp_path: Path) -> None:
    words = ("train.max_steps=350", "recipe.uses=slow_set_of_rank_1", "data.workers=0")
    found = train(tmp_path, (1000, 1000), *words).events("straggler")
    assert {(event["rank"], event["cause"]) for event in found} == {(1, "data")}
