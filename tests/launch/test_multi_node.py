"""Parents of several machines: what they do beside the fork of their workers."""

import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, cast

import pytest
import torch.distributed as dist

from launcher.distributed.env import LaunchEnv
from launcher.distributed.exit_records import JobFailed
from launcher.errors import StalledError
from launcher.launch.multi_node import MultiNode
from launcher.launch.root_cause import RunOutcome
from launcher.os.signals import StopSignal
from tests.configs import composed


class Meeting:
    """The store of the parents, whose `clone` looks up a name."""

    def __init__(self) -> None:
        self.store, self.cloned_by = dist.HashStore(), []

    def clone(self):
        self.cloned_by.append(threading.current_thread())
        return self.store

    def __getattr__(self, name: str):
        return getattr(self.store, name)


def test_no_name_is_looked_up_beside_a_fork() -> None:
    """A worker that is forked while a thread looks up a name finds libc's lock of it taken, for ever."""
    meeting = Meeting()
    with MultiNode(LaunchEnv(role="node"), meeting, "0", composed().launch) as nodes:
        assert meeting.cloned_by == [threading.current_thread()]
        assert nodes._thread.is_alive()
    assert not nodes._thread.is_alive()
    assert meeting.cloned_by == [threading.current_thread()], "made once"


def test_the_first_meeting_names_only_the_node_that_is_late() -> None:
    """No statuses are exchanged before the first fork, so that the others seemed silent too."""
    store, launch = dist.HashStore(), LaunchEnv(role="node", world_size=4)
    for node in (1, 2):
        store.set(f"job/0/nodes/attempt/0/{node}", "2")
    nodes = MultiNode(launch, store, "0", replace(composed().launch, init_timeout_s=0.2))
    with pytest.raises(StalledError, match=r"^node 3 is gone"):
        nodes.next_rendezvous(2, StopSignal())


def test_a_stop_of_one_machine_before_the_workers_start_ends_all() -> None:
    """The third has not come yet, and has no status; init_timeout_s is an hour."""
    meeting, limits = Meeting(), replace(composed().launch, init_timeout_s=3600.0)
    signals = [StopSignal(), StopSignal()]

    def end_of(node: int) -> JobFailed:
        nodes = MultiNode(LaunchEnv(role="node", rank=node, world_size=3), meeting, "0", limits)
        with pytest.raises(JobFailed) as raised, nodes:
            nodes.next_rendezvous(2, signals[node])
        return raised.value

    with ThreadPoolExecutor(2) as pool:
        ends = [pool.submit(end_of, node) for node in range(2)]
        while not meeting.store.check([f"job/0/nodes/attempt/0/{node}" for node in range(2)]):
            time.sleep(0.01)
        signals[1].handler(signal.SIGTERM)
        errors = [end.result(timeout=10) for end in ends]
    assert [error.exit_code for error in errors] == [128 + signal.SIGTERM] * 2
    assert str(errors[1]) == "stopped by SIGTERM before the workers started"
    assert str(errors[0]) == f"node 1 ({os.uname().nodename}): {errors[1]}"


def test_a_machine_that_comes_after_another_has_stopped_ends_too() -> None:
    """All have said how many workers they start, so that its workers run already when it reads the status."""
    meeting, limits = Meeting(), composed().launch
    first, second = (LaunchEnv(role="node", rank=rank, world_size=2) for rank in range(2))
    stopped = StopSignal()
    stopped.handler(signal.SIGTERM)
    with pytest.raises(JobFailed), MultiNode(second, meeting, "0", limits) as nodes:
        nodes.next_rendezvous(2, stopped)
    with MultiNode(first, meeting, "0", limits) as nodes:
        assert nodes.next_rendezvous(2, StopSignal()) == (0, 4)
        with pytest.raises(JobFailed, match="stopped by SIGTERM"):
            outcome_of(nodes)


def outcome_of(nodes: MultiNode) -> RunOutcome:
    while (outcome := nodes.outcome(None, cast(Any, None))) is None:
        time.sleep(0.05)
    return outcome
