"""NCCL: the variables that it reads, and what its errors mean.

Owns the difference between an error of this rank and that of one which has lost another rank. Imports no
torch.
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import MutableMapping

from launcher.os.oom import LAST_OF_NCCL

# Torch's watchdog then only logs timeouts, and its monitor ends no process: `hang_timer` does, and names the
# rank. torchrun sets the first variable to 1, so its value is not the user's choice.
FIXED = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_NCCL_ENABLE_MONITORING": "0"}
# Loader processes are forked when memory is already registered with a network card: without these, of
# libibverbs and of libfabric on AWS, a page to which both processes then write is lost to the card.
FORK_SAFE = {"RDMAV_FORK_SAFE": "1", "FI_EFA_FORK_SAFE": "1"}
INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")  # otherwise both listen on the LAN's address
REMOTE = re.compile(
    r"(?i)remote|Connection (closed|reset|refused)|Broken pipe|time(d )?out|abort|Proxy Call to rank"
)
SMALL_SHM = 256 * 2**20  # bytes; NCCL takes some 10 MB for each pair of GPUs without direct access


def prepare(environ: MutableMapping[str, str], one_machine: bool) -> None:
    """Set what NCCL and Gloo read from the environment. The user's own values stay."""
    environ.update(FIXED)
    names = INTERFACES if one_machine and "lo" in (name for _, name in socket.if_nameindex()) else ()
    for key, value in (FORK_SAFE | dict.fromkeys(names, "lo")).items():
        environ.setdefault(key, value)


def is_local(text: str) -> bool:
    """Whether the text is an error of NCCL which no loss of another rank explains."""
    if "NCCL error" not in text or REMOTE.search(text):
        return False
    said = text.partition(LAST_OF_NCCL)[2].strip()
    return bool(said) or "unhandled cuda error" in text or "ncclInvalid" in text


def shm_hint(path: str = "/dev/shm") -> str:
    """How little shared memory there is, and how to get more; empty where there is enough."""
    try:
        found = os.statvfs(path)
    except OSError:
        return f"There is no {path} here, which NCCL needs: mount -t tmpfs -o size=1g shm {path}."
    free, total = (count * found.f_frsize for count in (found.f_bavail, found.f_blocks))
    if min(free, total) >= SMALL_SHM:
        return ""
    return (
        f"{path} has {free >> 20} of {total >> 20} MB free, and NCCL needs more: start docker with "
        "--shm-size=1g or --ipc=host, mount an emptyDir of medium Memory there in Kubernetes, or remove what "
        "ended processes have left."
    )
