"""Hosts on one machine: Linux network namespaces, connected by links whose rate can be limited.

Needs root, and never touches an interface of the machine itself: every interface is created inside a
namespace of its own, and ends with it. Used by the benchmarks of links and by the tests of two hosts.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

PREFIX = "10.99.0."
INTERFACE = "cable"  # of every host, in its own namespace


class Network:
    """`num_hosts` namespaces that reach each other: two by a cable, more by a switch in one of its own.

    Host number n has the address 10.99.0.(n + 1) on its interface `cable`.
    """

    def __init__(self, num_hosts: int) -> None:
        self.hosts = [f"host{n}-{os.getpid()}" for n in range(num_hosts)]
        self._switch = f"switch-{os.getpid()}"

    def connect(self) -> None:
        for host in self.hosts:
            ip("netns", "add", host)
        if len(self.hosts) == 2:
            near, far = self.hosts
            ip("-n", near, "link", "add", INTERFACE, "type", "veth", "peer", "name", INTERFACE, "netns", far)
        else:
            self._plug_into_switch()
        for number, host in enumerate(self.hosts):
            ip("-n", host, "addr", "add", f"{self.address(number)}/24", "dev", INTERFACE)
            for device in (INTERFACE, "lo"):
                ip("-n", host, "link", "set", device, "up")

    def _plug_into_switch(self) -> None:
        ip("netns", "add", self._switch)
        ip("-n", self._switch, "link", "add", "bridge", "type", "bridge")
        ip("-n", self._switch, "link", "set", "bridge", "up")
        for number, host in enumerate(self.hosts):
            port = ("peer", "name", f"port{number}", "netns", self._switch)
            ip("-n", host, "link", "add", INTERFACE, "type", "veth", *port)
            ip("-n", self._switch, "link", "set", f"port{number}", "master", "bridge", "up")

    def remove(self) -> None:
        """End the namespaces. Processes in them keep theirs alive, so they should have ended."""
        for space in (*self.hosts, self._switch):
            subprocess.run(["ip", "netns", "del", space], capture_output=True)

    def set_link(self, host: int, state: str) -> None:
        """`up` or `down`."""
        ip("-n", self.hosts[host], "link", "set", INTERFACE, state)

    def inside(self, host: int, command: Sequence[str]) -> list[str]:
        """The command that runs `command` on a host."""
        return ["ip", "netns", "exec", self.hosts[host], *command]

    @staticmethod
    def address(host: int) -> str:
        return f"{PREFIX}{host + 1}"


@contextmanager
def network(num_hosts: int) -> Iterator[Network]:
    """A connected network, removed at the end. One that a killed process has left is removed first."""
    remove_left()
    made = Network(num_hosts)
    try:
        made.connect()
        yield made
    finally:
        made.remove()


def remove_left() -> None:
    """Remove networks of processes that have ended without doing so."""
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout
    for space, pid in re.findall(r"^((?:host\d+|switch)-(\d+))\b", listed, re.MULTILINE):
        if not Path("/proc", pid).exists():
            subprocess.run(["ip", "netns", "del", space], capture_output=True)


def ip(*words: str) -> None:
    """Run `ip`; on failure raises with what it wrote."""
    done = subprocess.run(["ip", *words], capture_output=True, text=True)
    if done.returncode:
        raise OSError(f"ip {' '.join(words)}: {done.stderr.strip() or done.returncode}")


def burst_bytes(mbit: int) -> int:
    """What a limited link sends at once after it was idle. Less would split packets: 5 % more bytes."""
    return (128 if mbit <= 100 else 256) << 10


def limit_own_link(mbit: int | None) -> None:
    """Within a host: send at most so many Mbit/s. None removes the limit."""
    subprocess.run(["tc", "qdisc", "del", "dev", INTERFACE, "root"], capture_output=True)
    if mbit is not None:
        rate = ("tbf", "rate", f"{mbit}mbit", "burst", str(burst_bytes(mbit)), "latency", "50ms")
        subprocess.run(["tc", "qdisc", "add", "dev", INTERFACE, "root", *rate], check=True)


def bytes_sent() -> int:
    """Within a host: bytes that its interface has sent since it exists, headers included."""
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, values = line.partition(":")
        if name.strip() == INTERFACE:
            return int(values.split()[8])
    raise OSError(f"no interface {INTERFACE} in this namespace")


def lacking() -> str:
    """Why this machine cannot run a network of namespaces, or ''."""
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            return f"{tool} is not installed (iproute2)"
    if os.geteuid() != 0:
        return "network namespaces need root"
    try:
        with network(2) as two:
            limit = [
                "tc",
                *("qdisc", "add", "dev", INTERFACE, "root"),
                *("tbf", "rate", "1gbit", "burst", "256k", "latency", "50ms"),
            ]
            done = subprocess.run(two.inside(0, limit), capture_output=True, text=True)
            return f"tc cannot limit a link: {done.stderr.strip()}" if done.returncode else ""
    except OSError as error:
        return f"network namespaces cannot be made: {error}"
