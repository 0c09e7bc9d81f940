"""Jobs on a real Ray cluster on loopback: several nodes on one machine, with GPUs that are only declared."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from launcher.errors import PreflightError
from launcher.telemetry.event_log import read_events
from tests.configs import composed
from tests.golden import Message
from tests.sweep.carriers.jobs import (
    ENDLESS,
    assert_gone,
    codes,
    ended,
    environment,
    follow,
    have_saved,
    jobs_in,
    processes_of,
    started,
)

# Read as Ray is imported, here and in its processes: no address but loopback's.
os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
ray: Any = pytest.importorskip("ray", reason="the extra `ray` is not installed")
from launcher.sweep.carriers.ray import RayCarrier  # noqa: E402

SWEEP = composed().sweep
pytestmark = pytest.mark.timeout(300)


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Any]:
    """A head without GPUs. Tests add machines with some."""
    from ray.cluster_utils import Cluster

    for name, value in environment().items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONBREAKPOINT", "")  # which Ray sets
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)  # Ray allows no more GPUs than are visible
    monkeypatch.setenv("RAY_DISABLE_IMPORT_WARNING", "1")
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    head = {"num_cpus": 1, "num_gpus": 0, "node_ip_address": "127.0.0.1", "include_dashboard": False}
    running = Cluster(initialize_head=True, head_node_args=head)
    monkeypatch.setenv("RAY_ADDRESS", running.address)
    try:
        yield running
    finally:
        ray.shutdown()
        running.shutdown()


def add(cluster: Any, gpus: int) -> Any:
    return cluster.add_node(num_cpus=1, num_gpus=gpus, node_ip_address="127.0.0.1")


@pytest.mark.slow
def test_a_job_of_a_node_that_dies_resumes_on_another(cluster: Any, tmp_path: Path) -> None:
    machines = [add(cluster, 2), add(cluster, 2)]
    (first, first_place), (second, second_place), (third, third_place) = jobs_in(tmp_path, 3, nproc=2)
    changes: list[Any] = []
    with RayCarrier(SWEEP) as carrier:
        carrier.submit(first, first_place)
        carrier.submit(second, second_place)
        follow(carrier, started(0, 1), changes)
        assert len(first.devices) == len(second.devices) == 2
        follow(
            carrier,
            lambda _: all(
                (place / "checkpoints/step-00000004").exists() for place in (first_place, second_place)
            ),
            changes,
        )
        carrier.submit(third, third_place)  # waits: all four GPUs are taken
        actor = ray._private.state.actors(carrier._running[0].actor._actor_id.hex())
        node = actor["Address"]["NodeID"]
        (dying,) = [machine for machine in machines if machine.node_id == node]
        cluster.remove_node(dying, allow_graceful=False)
        (tmp_path / "go").touch()
        follow(carrier, ended(0, 1, 2), changes, 150)
    assert codes(changes) == {0: 0, 1: 0, 2: 0}
    resumed = [event for event in read_events(first_place / "metrics.jsonl") if event["event"] == "start"]
    assert resumed[-1]["step"] >= 4


@pytest.mark.slow
def test_jobs_are_stopped_and_killed_and_nothing_is_left(cluster: Any, tmp_path: Path) -> None:
    add(cluster, 2)
    jobs = jobs_in(tmp_path, 3, ENDLESS, epochs=100000)
    changes: list[Any] = []
    with RayCarrier(SWEEP) as carrier:
        for job, place in jobs:
            assert carrier.has_room(job)
            carrier.submit(job, place)
        follow(carrier, started(0, 1), changes)
        assert not set(jobs[0][0].devices) & set(jobs[1][0].devices)
        follow(carrier, lambda _: have_saved(jobs[:2]), changes)
        carrier.stop(jobs[2][0])  # has not started
        carrier.stop(jobs[0][0])
        carrier.stop(jobs[1][0], at_once=True)
        assert len(processes_of(jobs[0][1])) >= 1
        follow(carrier, ended(0, 1, 2), changes)
    assert codes(changes) == {0: 75, 1: 128 + signal.SIGKILL, 2: 128 + signal.SIGKILL}
    assert_gone(jobs)


@pytest.mark.slow
def test_a_job_too_large_for_every_machine_is_refused(cluster: Any, tmp_path: Path, message: Message) -> None:
    add(cluster, 2)
    ((job, place),) = jobs_in(tmp_path, 1, nproc=3)
    with RayCarrier(SWEEP) as carrier, pytest.raises(PreflightError) as caught:
        carrier.submit(job, place)
    assert "launch.nproc=3" in message(caught.value)


def test_without_a_cluster_the_command_that_starts_one_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    handler = signal.getsignal(signal.SIGTERM)
    with pytest.raises(PreflightError, match=r"no Ray cluster can be reached .* `ray start --head`"):
        RayCarrier(SWEEP)
    assert signal.getsignal(signal.SIGTERM) == handler


def test_a_head_that_is_gone_ends_the_sweep_with_how_to_continue(cluster, monkeypatch) -> None:
    with RayCarrier(SWEEP) as carrier:
        assert not carrier.poll(0.0)
        monkeypatch.setattr("launcher.sweep.carriers.ray.HEAD_S", -1.0)
        assert not carrier.poll(0.0)  # it is there
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        monkeypatch.setattr(carrier, "_head", ("127.0.0.1", port))
        with pytest.raises(PreflightError, match="then the same command"):
            carrier.poll(0.0)
