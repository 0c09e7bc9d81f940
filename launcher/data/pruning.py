"""Removes what a cache folder has not been asked for in a long time.

Owns which files are caches, and when one is old. A file counts as used when it was last opened: `use` marks
that, and a lock that it takes keeps the file while the descriptor is open. Never a reason to end a run.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import re
import stat
import time
from pathlib import Path

KEPT_DAYS = 30  # each change of an option leaves a cache behind, of gigabytes for photographs
OURS = re.compile(r"[0-9a-f]{32}(\.\w+)?\.(images|partial|safetensors)")

log = logging.getLogger("launcher")


def use(descriptor: int) -> None:
    """Mark an open cache file as used now, and keep it until the last copy of the descriptor is closed."""
    with contextlib.suppress(OSError):  # of another user, or on a file system without locks
        os.utime(descriptor)
    with contextlib.suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_SH)


def prune(folder: Path) -> None:
    """Delete the caches in `folder` that nobody has opened for KEPT_DAYS and no process has open."""
    with contextlib.suppress(OSError):
        for path in sorted(folder.iterdir()):
            if OURS.fullmatch(path.name):
                with contextlib.suppress(OSError):
                    _remove_if_old(path)


def _remove_if_old(path: Path) -> None:
    found = path.lstat()
    if not stat.S_ISREG(found.st_mode) or time.time() - found.st_mtime < KEPT_DAYS * 86400:
        return
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)  # raises BlockingIOError while it is in use
        if os.fstat(descriptor).st_mtime == found.st_mtime:  # else opened since
            path.unlink()
            log.info("removed %s: not used for %d days", path, (time.time() - found.st_mtime) / 86400)
    finally:
        os.close(descriptor)
