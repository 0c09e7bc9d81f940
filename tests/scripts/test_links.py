"""The benchmark of links: how its figures follow from what is measured."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.bench import links, network
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


def test_a_promise_is_over_the_best_buckets_of_the_hook() -> None:
    alone = dict.fromkeys(("torch", "fp32", "fp16"), [[0.5, 0.5, 0.5]] * 3)
    figures = links.figures_of_times(100, {"times": times_of(2.1), "alone": alone} | SENDING, 1)
    found = {each.baseline: each for each in figures if each.what.endswith("ours, fp32 arithmetic")}
    assert (found["ddp + hook"].value, found["ddp + hook"].promised) == (pytest.approx(0.84), None)
    tuned = found["ddp + hook, 1 MB"]
    assert (tuned.value, tuned.promised) == (pytest.approx(1.05), 1.05)
    assert found["limit"].value == pytest.approx(1.4)
    assert found["ddp"].value == pytest.approx(2.1 / 4)


def test_the_computed_step_is_compared_with_what_it_took() -> None:
    """1 M parameters are 16 Mbit, 16 / 95.6 s over 100 Mbit; the first of 4 buckets waits for 0.1 / 4 s.

    Over 1 Gbit the step computes for longer than it sends, and sending takes 0.01 s of it.
    """
    found = {"times": {"ours": [0.6] * 3}, "alone": {"fp16": [[0.1, 0.1, 0.3]] * 3}} | SENDING
    figure = links.error_of_computed_step(100, found, 1_000_000, "ours")
    assert figure.value == pytest.approx(abs((0.4 + 0.1 / 4 + 16 / 95.6) / 0.6 - 1))
    figure = links.error_of_computed_step(1000, found, 1_000_000, "ours")
    assert figure.value == pytest.approx(abs((0.5 + 0.01 + 16 / 956 / 4) / 0.6 - 1))


def test_the_chosen_size_is_compared_with_the_best_of_the_given_ones() -> None:
    figure = links.figure_of_buckets(100, {"1 MB": [4.0] * 3, "2 MB": [3.0] * 3, links.AUTO: [3.3] * 3})
    assert (figure.baseline, figure.value) == ("2 MB", pytest.approx(1.1))


def test_bytes_are_in_units_of_what_a_ring_sends() -> None:
    """Four ranks that send 3 bytes per parameter each: 2 in units of 2 x 3/4."""
    rank = {
        "bytes_per_parameter": dict.fromkeys(OURS, 3.0) | {"ddp": 6.0},
        "collectives_beyond": dict.fromkeys(OURS, 1) | {"ours, shard": 2},
    }
    figures = links.figures_of_bytes([rank] * 4)
    assert [each.value for each in figures if each.what.startswith("bytes")] == [2.0, 0.5] * len(OURS)
    assert [each.value for each in figures if each.what.startswith("collectives")] == [1, 1, 2]


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
    assert {each["baseline"] for each in content["figures"]} >= {"", "ddp", "limit", "measured", "ours"}
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
    assert "step at 300 Mbit/s, ours" in printed
    assert not [space for space in namespaces() if space.startswith("host")]
