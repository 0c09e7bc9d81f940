"""This process's TCP connections to other hosts, and the bytes that wait in them, from the Linux kernel.

Owns the search in /proc and the layout of `struct tcp_info`. Reads the sockets of any library (Gloo, NCCL)
and never changes, duplicates or closes one. On other systems nothing is found.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import socket
import struct
from collections.abc import Container, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

UNSENT = 0x894B  # SIOCOUTQNSD: bytes not yet sent, as opposed to sent and not yet acknowledged
INFO_BYTES = 192
# Offsets in struct tcp_info, of u64: tcpi_bytes_acked, tcpi_busy_time and tcpi_rwnd_limited (both in us).
ACKED_AT, BUSY_AT, FULL_AT = 120, 168, 176
OWN_IPV4 = re.compile(r"\|-- (\S+)\n\s+/32 host LOCAL")


@dataclass(frozen=True)
class Connection:
    """A connection, and its totals since it exists."""

    descriptor: int
    address: str  # of the other end
    acked_bytes: int = 0  # that the other end has acknowledged
    busy_s: float = 0.0  # in which bytes were not yet acknowledged
    full_s: float = 0.0  # of these, in which the other end had no room, because nobody read there

    def since(self, earlier: Connection | None) -> Connection:
        """What has been added to the totals since then; None: ever."""
        if earlier is None or earlier.address != self.address or earlier.acked_bytes > self.acked_bytes:
            return self  # the descriptor is that of a new connection
        return replace(
            self,
            acked_bytes=self.acked_bytes - earlier.acked_bytes,
            busy_s=self.busy_s - earlier.busy_s,
            full_s=self.full_s - earlier.full_s,
        )


def own_addresses() -> list[str]:
    """The addresses of this host, without those of the loopback interface."""
    found = []
    with contextlib.suppress(OSError):
        found += OWN_IPV4.findall(Path("/proc/net/fib_trie").read_text(encoding="ascii"))
    with contextlib.suppress(OSError):
        for line in Path("/proc/net/if_inet6").read_text(encoding="ascii").splitlines():
            found.append(socket.inet_ntop(socket.AF_INET6, bytes.fromhex(line.split()[0])))
    return sorted({address for address in found if not address.startswith("127.") and address != "::1"})


def connections(addresses: Container[str]) -> list[Connection]:
    """The connections of this process to hosts with these addresses."""
    with contextlib.suppress(OSError):
        return list(_connections(addresses))
    return []


def has_unsent(descriptor: int) -> bool:
    """Whether bytes wait that the kernel could not yet send. False for what is no connection any more."""
    try:
        return fcntl.ioctl(descriptor, UNSENT, bytes(4)) != bytes(4)
    except OSError:
        return False


def _connections(addresses: Container[str]) -> Iterator[Connection]:
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # no socket, not connected, or closed by now
            if os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                yield from _connection(int(name), addresses)


def _connection(descriptor: int, addresses: Container[str]) -> Iterator[Connection]:
    opened = socket.socket(fileno=descriptor)
    try:
        if opened.family not in (socket.AF_INET, socket.AF_INET6) or opened.type != socket.SOCK_STREAM:
            return
        address = _plain(opened.getpeername()[0])
        if address not in addresses:
            return
        info = opened.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, INFO_BYTES)
    finally:
        opened.detach()  # it is not ours to close
    if len(info) == INFO_BYTES:  # kernels before 4.10 know less
        acked, busy_us, full_us = (
            struct.unpack_from("Q", info, at)[0] for at in (ACKED_AT, BUSY_AT, FULL_AT)
        )
        yield Connection(descriptor, address, acked, 1e-6 * busy_us, 1e-6 * full_us)


def _plain(address: str) -> str:
    """Without the prefix of IPv4 in IPv6, and without the interface of a link-local address."""
    return address.removeprefix("::ffff:").partition("%")[0]
