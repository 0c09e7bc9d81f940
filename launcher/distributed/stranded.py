"""Ends torchrun on a host that has lost the connection to the machine of torchrun's store.

With `--rdzv-backend c10d` torchrun polls its store ten times a second. If that machine is gone, it waits for
as long as the kernel retransmits the request: a quarter of an hour, by net.ipv4.tcp_retries2, whatever
timeouts were set. Meanwhile it neither notices that its workers have ended nor handles SIGTERM, whose handler
is Python code, and no other process can shorten the wait. So a worker that has failed leaves a small process
behind, which sends SIGKILL to torchrun if the kernel shows that it waits in this way. torchrun with restarts
left is not ended: it restarts once the link is up again.

Run as a file, by path, so that it starts quickly: it imports neither this package nor torch.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

REPEATED = 4  # retransmissions, at intervals that double: at least 3 s of silence
GRACE_S = 2.0  # for torchrun to end by itself, and for other workers of this machine to record why they end
WATCH_S = 10.0  # three times what REPEATED takes; a torchrun that has not ended by then is busy, not stranded
ESTABLISHED = "01"  # in /proc/net/tcp


def watch(environ: Mapping[str, str]) -> None:
    """Leave a process behind that ends this worker's torchrun if it waits for a machine that is gone.

    Called last by a worker that has failed. Does nothing unless torchrun started this process on several
    machines and has no restart left.
    """
    several = int(environ.get("WORLD_SIZE", 1)) > int(environ.get("LOCAL_WORLD_SIZE", 1))
    used, allowed = (environ.get(f"TORCHELASTIC_{key}") for key in ("RESTART_COUNT", "MAX_RESTARTS"))
    agent = os.getppid()
    if not several or used is None or used != allowed or not _is_agent(agent):
        return
    from launcher.process.guardian import VARIABLE

    try:
        handle = os.pidfd_open(agent)  # its pid cannot be reused while this child exists
    except OSError:  # not before Linux 5.3, and forbidden in some containers
        return
    subprocess.Popen(
        # Isolated and without site-packages, so that it starts quickly.
        [sys.executable, "-I", "-S", __file__, str(agent), str(handle)],
        # Without the variable by which this process's guardian would find it.
        env={key: value for key, value in environ.items() if key != VARIABLE},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        pass_fds=[handle],
        start_new_session=True,
    )


def _is_agent(pid: int) -> bool:
    """Whether this parent is torchrun, and not a shell in between that inherited its variables."""
    try:
        return b"TORCHELASTIC_RUN_ID=" not in Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return False


def end_if_stranded(agent: int, handle: int) -> None:
    """Wait for torchrun to end; send SIGKILL if it waits for an answer of another machine."""
    ended = select.poll()
    ended.register(handle, select.POLLIN)
    began = time.monotonic()
    while not ended.poll(200) and (waited_s := time.monotonic() - began) < WATCH_S:
        if waited_s >= GRACE_S and is_stranded(agent):
            print(
                f"error: torchrun (pid {agent}) waits for its store on a machine that does not answer, and "
                "would for a quarter of an hour: sending SIGKILL.",
                file=sys.stderr,
            )
            return signal.pidfd_send_signal(handle, signal.SIGKILL)


def is_stranded(pid: int) -> bool:
    """Whether another machine does not acknowledge data sent on a connection of the process."""
    process = Path(f"/proc/{pid}")
    try:
        inodes = {os.readlink(end)[8:-1] for end in (process / "fd").iterdir()}  # of socket:[number]
        tables = [(process / "net" / name).read_text() for name in ("tcp", "tcp6")]
    except OSError:
        return False
    # Columns of /proc/net/tcp: 3 state, 4 tx_queue:rx_queue, 6 retransmissions, 8 probes, 9 inode.
    rows = (row.split() for table in tables for row in table.splitlines()[1:])
    return any(row[9] in inodes and row[3] == ESTABLISHED and _is_unanswered(row) for row in rows)


def _is_unanswered(row: list[str]) -> bool:
    """Whether the peer is silent: judged by retransmissions, or by probes if this host's link is down."""
    is_waiting = int(row[4].partition(":")[0], 16) > 0
    return is_waiting and max(int(row[6], 16), int(row[8])) >= REPEATED


if __name__ == "__main__":
    end_if_stranded(*map(int, sys.argv[1:]))
