"""Executes a program that ignores signals, whatever handlers it installs. Also the script that does so.

A scheduler signals all processes of a job, and the service of a tracker has to outlive that. An executed
program ignores what was ignored before, until it installs a handler, as programs in Go do for SIGTERM. Here
the kernel answers such a call with success and changes nothing. Imports nothing of the launcher, so that it
starts in 20 ms.
"""

from __future__ import annotations

import ctypes
import os
import platform
import signal
import struct
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 38, 22, 2  # linux/prctl.h, linux/seccomp.h
# By machine: AUDIT_ARCH_* of linux/audit.h, and the number of rt_sigaction
MACHINES = {"x86_64": (0xC000003E, 13), "aarch64": (0xC00000B7, 134)}
# linux/bpf_common.h: load a word; jump if it is equal; return
LOAD, EQUAL, RETURN = 0x20, 0x15, 0x06
NUMBER, ARCH, FIRST_ARGUMENT = 0, 4, 16  # offsets in struct seccomp_data
ALLOW, SUCCESS = 0x7FFF0000, 0x00050000  # SECCOMP_RET_ALLOW; SECCOMP_RET_ERRNO without an error


def start_ignoring(numbers: Sequence[int], command: Sequence[str], **options: Any) -> subprocess.Popen[bytes]:
    """Start a program that ignores these signals from its first moment on; `options` are those of Popen."""
    script = [sys.executable, "-I", "-S", __file__, ",".join(str(int(each)) for each in numbers)]
    before = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)  # the script inherits it, and unblocks them
    try:
        return subprocess.Popen([*script, *command], **options)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def main() -> None:
    numbers = [int(each) for each in sys.argv[1].split(",")]
    for number in numbers:
        signal.signal(number, signal.SIG_IGN)  # drops one that has arrived meanwhile
    signal.pthread_sigmask(signal.SIG_UNBLOCK, numbers)
    keep_handlers(numbers)
    os.execv(sys.argv[2], sys.argv[2:])


def keep_handlers(numbers: Sequence[int]) -> None:
    """Let no later call of this process change what these signals do; nothing where the kernel refuses."""
    if platform.machine() not in MACHINES:
        return
    arch, rt_sigaction = MACHINES[platform.machine()]
    lines = [
        (LOAD, 0, 0, ARCH),
        (EQUAL, 0, len(numbers) + 3, arch),  # else to ALLOW, like the next jump
        (LOAD, 0, 0, NUMBER),
        (EQUAL, 0, len(numbers) + 1, rt_sigaction),
        (LOAD, 0, 0, FIRST_ARGUMENT),
        *((EQUAL, len(numbers) - place, 0, number) for place, number in enumerate(numbers)),
        (RETURN, 0, 0, ALLOW),
        (RETURN, 0, 0, SUCCESS),
    ]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in lines))
    program = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(lines), ctypes.addressof(code)))
    prctl = ctypes.CDLL(None).prctl
    prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)  # a filter may only be set by who can gain no privileges
    prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, program, 0, 0)


if __name__ == "__main__":
    main()
