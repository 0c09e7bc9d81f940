"""Parents of several machines: what they do beside the fork of their workers."""

import threading
from dataclasses import replace

import pytest
import torch.distributed as dist

from launcher.distributed.env import LaunchEnv
from launcher.errors import StalledError
from launcher.launch.multi_node import MultiNode
from launcher.os.signals import StopSignal
from tests.configs import composed


class Meeting:
    """The store of the parents, whose `clone` looks up a name."""

    def __init__(self) -> None:
        self.store, self.cloned_by = dist.HashStore(), []

    def clone(self):
        self.cloned_by.append(threading.current_thread())
        return self.store


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
