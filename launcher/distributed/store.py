"""The key-value store that the ranks of a launch share: how it is opened, and waits for its keys.

Owns the connection to it and the errors of a rank that waits in vain. Imports torch only to open it.
"""

from __future__ import annotations

import os
import socket
import stat
import time
from collections.abc import Iterable
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING

from launcher.distributed.env import LaunchEnv
from launcher.errors import PreflightError, StalledError, first_sentence

if TYPE_CHECKING:
    import torch.distributed as dist


ANSWER_S = 4.0  # for an answer of the store, from a process that ends


def ignore_store_errors() -> suppress:
    """Within the context nothing is raised if the store is gone."""
    from torch.distributed import DistError

    return suppress(DistError)


def open_store(launch: LaunchEnv, timeout_s: float) -> dist.Store | None:
    """The key-value store that the ranks of this launch share; None for one process.

    Under torchrun it is the agent's; under a plain scheduler rank 0 hosts it on MASTER_ADDR:MASTER_PORT and
    waits for no other rank. Keys are private to this attempt of this launch, so a restart never reads keys of
    an earlier attempt. Raises PreflightError, or StalledError where no store answers within the time.
    """
    if launch.world_size == 1:
        return None
    import torch.distributed as dist

    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    timeout = timedelta(seconds=timeout_s)
    try:
        if _has_agent_store():
            store, _, _ = next(dist.rendezvous("env://", launch.rank, launch.world_size, timeout=timeout))
        else:
            hosts = launch.rank == 0
            listening = _listening(launch, port) if hosts else None
            # The host, too: of a name that nobody knows torch's client writes a page of C++ frames.
            _wait_for_listener(address, port, timeout_s)
            store = dist.TCPStore(
                address, port, None, hosts, timeout, wait_for_workers=False, master_listen_fd=listening
            )
    except (dist.DistError, OSError) as error:
        raise StalledError(
            f"{launch.name} could not reach {launch.role} 0 within {timeout_s:g} s: {first_sentence(error)} "
            f"{launch.role.capitalize()} 0 was not started, has died, or {launch.endpoint} does not "
            "point to it. launch.init_timeout_s says how long others wait for it."
        ) from error
    store.set_timeout(timeout)
    # A store of rank 0's own is new in each attempt. A torchrun that joined later has counted fewer of them.
    attempt = launch.restart_count if _has_agent_store() else 0
    return dist.PrefixStore(f"launcher/{launch.run_id}/{attempt}", store)


def _has_agent_store() -> bool:
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _listening(launch: LaunchEnv, port: int) -> int:
    """Descriptor of a socket for the store, bound here because torch's error is a page of C++ frames."""
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    try:
        return socket.create_server(("", port), family=family, dualstack_ipv6=both).detach()
    except OSError as error:
        raise PreflightError(
            f"{launch.endpoint}: port {port} cannot be used on this machine: "
            f"{os.strerror(error.errno or 0)}. If another launch uses it, give this one another port, the "
            f"same for all its {launch.role}s."
        ) from error


def _wait_for_listener(address: str, port: int, timeout_s: float) -> None:
    """Wait in Python, so that a signal ends it. Raises OSError."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            return socket.create_connection((address, port), 1.0).close()
        except OSError:
            if time.monotonic() >= deadline:
                raise
            time.sleep(0.1)


def restart_store(store: dist.Store | None, launch: LaunchEnv) -> dist.Store | None:
    """A store that outlives an attempt, for keys that a restart must find again.

    Only under torchrun, whose agent keeps its store between attempts, also for a single process.
    """
    import torch.distributed as dist

    if store is None and _has_agent_store():
        store, _, _ = next(dist.rendezvous("env://", launch.rank, launch.world_size))
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return None if store is None else dist.PrefixStore(f"launcher/{launch.run_id}/memory", store)


def set_tcp_timeouts(seconds: float) -> None:
    """Limit how long the store's machine may stay silent before a store call fails.

    The timeouts of a TCPStore apply to waiting for a key. For the answer to a request it waits as long as the
    kernel retransmits the request to a machine that is gone: a quarter of an hour.
    """
    port, descriptors = os.environ.get("MASTER_PORT", ""), list[str]()
    with suppress(OSError):  # of a process with as many open files as it may have, which says so elsewhere
        descriptors = os.listdir("/proc/self/fd") if port else []
    for descriptor in map(int, descriptors):
        with suppress(OSError):
            if stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                # A copy: the socket object closes its descriptor, and the store keeps using its own.
                _set_tcp_timeouts(os.dup(descriptor), int(port), seconds)


def _set_tcp_timeouts(descriptor: int, port: int, seconds: float) -> None:
    """Limit the silence of a socket if it is connected to that port. Closes the descriptor."""
    with socket.socket(fileno=descriptor) as end:
        if end.family in (socket.AF_INET, socket.AF_INET6) and end.getpeername()[1] == port:
            end.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            # Probes begin after a third of the time; TCP_USER_TIMEOUT decides when unanswered ones end the
            # connection.
            for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL):
                end.setsockopt(socket.IPPROTO_TCP, option, max(1, int(seconds / 3)))
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(seconds * 1000))


def missing_ranks(store: dist.Store, key: str, ranks: Iterable[int], wait_s: float) -> list[int]:
    """The ranks of which `key`, with a place for the number, is not set within the time.

    Raises DistError if the store is gone.
    """
    keys = {rank: key.format(rank) for rank in ranks}
    if wait_for_keys(store, list(keys.values()), wait_s):
        return []
    return [rank for rank in keys if not store.check([keys[rank]])]


def wait_for_keys(store: dist.Store, keys: list[str], wait_s: float) -> bool:
    """Whether all keys are set within the time. Raises DistError if the store is gone.

    Asks again and again: a wait of the store's own would handle no signal, and print C++ frames at its end.
    """
    began = time.monotonic()
    while not store.check(keys):
        waited_s = time.monotonic() - began
        if waited_s >= wait_s:
            return False
        # Often at first, seldom later: each check is a message to rank 0's machine, from every rank.
        time.sleep(min(0.02 + waited_s / 50, 0.5))
    return True
