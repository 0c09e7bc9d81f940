"""Disk space reserved for the last files of a run.

Owns one hidden file of the run's directory, which exists while the run does. It is deleted when the disk is
full for result.json or status.json, to make room for their few kB.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable
from pathlib import Path

from launcher.run_dir.atomic import open_plain

RESERVE = ".reserve"
SIZE_BYTES = 64 * 1024  # room for the temporary files of result.json and status.json
NO_ROOM = (errno.ENOSPC, errno.EDQUOT)


def keep_reserve(directory: Path) -> None:
    """Allocate the reserve if there is room. A run without it continues."""
    with contextlib.suppress(OSError):
        descriptor = open_plain(directory / RESERVE, os.O_RDWR | os.O_CREAT)
        try:
            os.posix_fallocate(descriptor, 0, SIZE_BYTES)
        except OSError:
            give_up_reserve(directory)
        finally:
            os.close(descriptor)


def give_up_reserve(directory: Path) -> None:
    with contextlib.suppress(OSError):
        (directory / RESERVE).unlink(missing_ok=True)


def write_with_reserve(directory: Path, write: Callable[[], None]) -> None:
    """Call `write`; if the disk is full, delete the reserve and call it again. Raises OSError."""
    try:
        write()
    except OSError as error:
        if error.errno not in NO_ROOM:
            raise
        give_up_reserve(directory)
        write()
