"""What the kernel says of this process's connections: real sockets on the loopback interface."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Iterator

import pytest

from launcher.distributed.connections import Connection, connections, has_unsent, own_addresses
from launcher.training.timing.links import Links

HERE = "127.0.0.1"
FULL = 64 << 20  # more than both kernel buffers hold


@contextlib.contextmanager
def connected(family: socket.AddressFamily, address: str) -> Iterator[tuple[socket.socket, socket.socket]]:
    with socket.socket(family) as listening:
        if family == socket.AF_INET6:
            listening.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        listening.bind((address, 0))
        listening.listen()
        with socket.create_connection((HERE, listening.getsockname()[1])) as near:
            far, _ = listening.accept()
            with far:
                yield near, far


@pytest.mark.parametrize(("family", "address"), [(socket.AF_INET, HERE), (socket.AF_INET6, f"::ffff:{HERE}")])
def test_connections_are_found_by_the_address_of_the_other_end(family, address):
    with connected(family, address) as (near, far), open(os.devnull) as file:
        near.sendall(bytes(1000))
        far.recv(1000, socket.MSG_WAITALL)
        found = {each.descriptor: each for each in connections({HERE})}
        assert {near.fileno(), far.fileno()} <= set(found), "as IPv4, also where it came in through IPv6"
        assert found[near.fileno()].acked_bytes >= 1000
        assert found[near.fileno()].address == HERE
        assert file.fileno() not in found
        assert connections({"10.99.0.1"}) == connections(()) == []
        near.sendall(b"x")  # it was neither closed nor changed
        assert far.recv(1) == b"x"


def test_bytes_that_nobody_reads_wait_and_the_receiver_is_why():
    with connected(socket.AF_INET, HERE) as (near, _):
        descriptor = near.fileno()
        assert not has_unsent(descriptor)
        near.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            for _ in range(FULL >> 16):
                near.send(bytes(1 << 16))
        assert has_unsent(descriptor)
        (before,) = (each for each in connections({HERE}) if each.descriptor == descriptor)
        time.sleep(0.3)
        (after,) = (each for each in connections({HERE}) if each.descriptor == descriptor)
        assert after.since(before).full_s > 0.1
        assert after.since(before).busy_s >= after.since(before).full_s
    assert not has_unsent(descriptor), "it is closed"


def test_a_descriptor_that_is_used_again_has_no_earlier_totals():
    now = Connection(7, HERE, acked_bytes=10, busy_s=1.0, full_s=0.5)
    assert now.since(Connection(7, HERE, 4, 0.75, 0.5)) == Connection(7, HERE, 6, 0.25, 0.0)
    for other in (None, Connection(7, "10.99.0.1", 4), Connection(7, HERE, 11)):
        assert now.since(other) == now


def test_own_addresses_are_those_of_interfaces_other_than_the_loopback():
    found = own_addresses()
    assert not {"127.0.0.1", "::1"} & set(found)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as routed:
        try:
            routed.connect(("192.0.2.1", 9))  # sends nothing
        except OSError:
            pytest.skip("this machine has no route")
        assert routed.getsockname()[0] in found


def test_a_late_reader_is_no_slow_link():
    with connected(socket.AF_INET, HERE) as (near, far), Links({HERE: 3}, every_s=0.002) as links:
        near.setblocking(False)
        deadline, use = time.monotonic() + 20, None
        while use is None and time.monotonic() < deadline:
            with contextlib.suppress(BlockingIOError):
                near.send(bytes(1 << 20))
            far.recv(1 << 10)  # much slower than it is sent
            time.sleep(0.005)
            use = links.take()
        assert use is not None
        assert has_unsent(near.fileno())
        assert use.share < 0.2
        assert use.receiver == 3
        assert links.take() is None
