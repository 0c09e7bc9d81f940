"""The benchmarks of links and of many ranks: how their goals follow from what is measured."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.bench import bookkeeping, links, network
from scripts.bench.links_rank import BARE_HOOK, OURS, TUNED_MB
from tests.scripts.test_bench import ROOT, run

NETWORKS = pytest.mark.skipif(bool(os.geteuid()), reason="network namespaces need root")


def test_a_step_takes_at_least_the_longer_of_backward_and_wire() -> None:
    """1 M parameters are 16 Mbit, with headers 4.4 % more. A burst of 2.1 or 1.05 Mbit takes no time."""
    wire_s = (16 / 0.956 - 8 * 0.262144) / 1000
    slow_s = (16 / 0.956 - 8 * 0.131072) / 100
    alone = [[0.1, 0.2, 0.3], [0.1, 0.001, 0.3]]
    assert links.limits_of(alone, 1000, 1_000_000) == pytest.approx([0.6, 0.4 + wire_s])
    assert links.limits_of(alone, 100, 1_000_000) == pytest.approx([0.6, 0.4 + slow_s])


def test_sharded_ranks_send_half_of_the_bytes_beside_their_half_of_the_update() -> None:
    half_s = (8 / 0.956 - 8 * 0.262144) / 1000
    found = links.limits_of_shards([[0.1, 0.2, 0.3], [0.1, 0.001, 0.002]], 1000, 1_000_000)
    assert found == pytest.approx([0.1 + 0.2 + 0.15, 0.1 + half_s + half_s])


SENDING = {
    "num_buckets": 4,
    "unlimited": {
        **{"ours": [0.9, 0.21, 0.1], "alone, fp16": [0.2, 0.1, 0.2]},
        **{"ours, fp32 arithmetic": [0.3], "alone, fp32": [0.2]},
    },
}


def times_of(own: float) -> dict[str, list[float]]:
    peers = {"ddp": 4.0, "ddp, 1 MB": 3.0, "ddp + hook": 2.5, "ddp + hook, 1 MB": 2.0, BARE_HOOK: 2.4}
    return {name: [seconds] * 3 for name, seconds in (peers | dict.fromkeys(OURS, own)).items()}


def test_goals_are_over_the_best_buckets_of_the_hook_and_over_the_default_ones() -> None:
    alone = dict.fromkeys(("torch", "fp32", "fp16"), [[0.5, 0.5, 0.5]] * 3)
    goals = links.goals_of_times(300, {"times": times_of(2.1), "alone": alone} | SENDING, 1)
    found = {(goal.row, goal.baseline): goal for goal in goals if "fp32 arithmetic" in goal.what}
    assert found["P5", "ddp + hook"].value == pytest.approx(0.84)
    assert found["P5", "ddp + hook"].reached
    assert found["P5", "ddp + hook, 1 MB"].value == pytest.approx(1.05)
    assert not found["P5", "ddp + hook, 1 MB"].reached
    assert found["P3", "limit"].value == pytest.approx(1.4)
    speed_up = found["P4", "ddp"]
    assert (speed_up.value, speed_up.reached) == (pytest.approx(4 / 2.1), True)
    assert not links.goals_of_times(300, {"times": times_of(2.2), "alone": alone} | SENDING, 1)[1].reached
    assert {goal.what for goal in goals if goal.row == "wire"} == {"300 Mbit, ours, shard"}


def test_the_forecast_of_a_step_is_compared_with_what_it_took() -> None:
    """1 M parameters are 16 Mbit, 16 / 95.6 s over 100 Mbit; the first of 4 buckets waits for 0.1 / 4 s.

    Over 1 Gbit the step computes for longer than it sends, and sending takes 0.01 s of it.
    """
    found = {"times": {"ours": [0.6] * 3}, "alone": {"fp16": [[0.1, 0.1, 0.3]] * 3}} | SENDING
    goal = links.goal_of_forecast(100, found, 1_000_000, "ours")
    assert goal.value == pytest.approx(abs((0.4 + 0.1 / 4 + 16 / 95.6) / 0.6 - 1))
    assert goal.reached
    goal = links.goal_of_forecast(1000, found, 1_000_000, "ours")
    assert goal.value == pytest.approx(abs((0.5 + 0.01 + 16 / 956 / 4) / 0.6 - 1))


def test_the_chosen_size_is_compared_with_the_best_of_the_given_ones() -> None:
    goal = links.goal_of_buckets(100, {"1 MB": [4.0] * 3, "2 MB": [3.0] * 3, links.AUTO: [3.3] * 3})
    assert (goal.baseline, goal.value, goal.reached) == ("2 MB", pytest.approx(1.1), False)
    goal = links.goal_of_buckets(100, {"1 MB": [4.0] * 3, "2 MB": [5.0] * 3, links.AUTO: [3.9] * 3})
    assert (goal.baseline, goal.reached) == ("1 MB", True)


def test_bytes_are_in_units_of_what_a_ring_sends() -> None:
    """Four ranks that send 3 bytes per parameter each: 2 in units of 2 x 3/4."""
    rank = {
        "bytes_per_parameter": dict.fromkeys(OURS, 3.0) | {"ddp": 6.0},
        "collectives_beyond": dict.fromkeys(OURS, 1) | {"ours, shard": 2},
    }
    goals = links.goals_of_bytes([rank] * 4)
    assert [goal.value for goal in goals if goal.row == "P1"] == [2.0, 0.5] * len(OURS)
    assert [goal.reached for goal in goals if goal.row == "P2"] == [True, True, False]


def test_bookkeeping_is_flat_if_its_slowest_number_of_ranks_is() -> None:
    goal = bookkeeping.goal_of("shard", {"8": [1.0, 1.2], "64": [1.2, 1.3], "512": [1.0, 5.0]})
    assert (goal.value, goal.reached) == (1.2, False)
    assert "64 ranks" in goal.what
    assert bookkeeping.goal_of("shard", {"8": [1.0], "64": [0.5], "512": [1.05]}).reached


LEAVES = "from scripts.bench.network import Network; Network(2).connect(); print('made', flush=True); input()"


@NETWORKS
def test_a_network_of_a_killed_process_is_removed_by_the_next() -> None:
    if reason := network.lacking():
        pytest.skip(reason)
    environ = os.environ | {"PYTHONPATH": str(ROOT)}
    program = subprocess.Popen(
        [sys.executable, "-c", LEAVES],
        env=environ,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    with program:
        assert program.stdout is not None
        program.stdout.readline()
        own = f"host0-{program.pid}"
        network.remove_left()
        assert own in namespaces(), "its process runs"
        program.send_signal(signal.SIGKILL)
    assert own in namespaces()
    with network.network(3) as hosts:
        assert own not in namespaces()
        assert set(hosts.hosts) <= set(namespaces())
        assert answered(hosts, server=0, client=2)
    assert not set(hosts.hosts) & set(namespaces())


def answered(hosts: network.Network, server: int, client: int) -> bool:
    """Whether a process on one host can connect to one on another."""
    address = hosts.address(server), 29511
    listen = f"import socket; s = socket.create_server({address}); print('listens', flush=True); s.accept()"
    connect = f"import socket; socket.create_connection({address}, timeout=10)"
    listens = subprocess.Popen(hosts.inside(server, [sys.executable, "-c", listen]), stdout=subprocess.PIPE)
    with listens:
        assert listens.stdout is not None
        listens.stdout.readline()
        found = subprocess.run(hosts.inside(client, [sys.executable, "-c", connect]))
        listens.kill()
    return found.returncode == 0


def namespaces() -> list[str]:
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    return [line.split()[0] for line in listed.splitlines()]


@pytest.mark.slow
def test_bookkeeping_compares_numbers_of_ranks(tmp_path) -> None:
    file = tmp_path / "bookkeeping.json"
    printed = run("bookkeeping.py", "--json", str(file))
    content = json.loads(file.read_text())
    assert content["rows"].keys() == {"native", "shard"}
    assert all(row.keys() == {"8 ranks", "64 ranks"} for row in content["rows"].values())
    assert [goal["row"] for goal in content["goals"]] == ["P15"] * 2
    assert "64 ranks" in printed


@pytest.mark.slow
def test_the_cost_of_the_time_split_is_measured_against_a_step_of_5_ms(tmp_path) -> None:
    file = tmp_path / "time_split.json"
    run("time_split.py", "--json", str(file))
    content = json.loads(file.read_text())
    assert content["rows"].keys() == {"neither", "split"}
    assert [(goal["row"], goal["goal"]) for goal in content["goals"]] == [("split", 0.005)]


@NETWORKS
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_links_measures_bytes_and_steps_between_hosts(tmp_path: Path) -> None:
    if reason := network.lacking():
        pytest.skip(reason)
    file = tmp_path / "links.json"
    printed = run(
        "links.py", "--hosts", "2", "--rates", "300", "--buckets", "300", "--json", str(file), timeout_s=280
    )
    content = json.loads(file.read_text())
    assert {goal["row"] for goal in content["goals"]} == {
        "P1",
        "P2",
        "P3",
        "P4",
        "P5",
        "P27",
        "wire",
        "buckets",
    }
    tuned = {f"{peer}, {size} MB" for peer in ("ddp", "ddp + hook") for size in TUNED_MB}
    assert {*OURS, *tuned, "ddp", "ddp + hook", "limit, fp32", "limit, fp16"} < content["rows"][
        "300 Mbit"
    ].keys()
    assert all(row["min_ms"] > 0 for row in content["rows"]["300 Mbit"].values())
    ranks = content["rows"]["2 hosts"]
    assert len(ranks) == 2
    for rank in ranks:
        assert rank["bytes_per_parameter"]["ddp"] > rank["bytes_per_parameter"]["ours"] > 0
        assert rank["collectives_beyond"] == dict.fromkeys(OURS, 1)
    assert "speed-up, 300 Mbit, ours" in printed
    assert not [space for space in namespaces() if space.startswith("host")]
