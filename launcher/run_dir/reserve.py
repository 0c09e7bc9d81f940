"""Room on the disk that is kept for how a run ends, where nothing else finds any.

Owns one hidden file of the run's directory, there while the run is. It is given up for the few kB of
result.json and status.json when these meet a full disk, and only then.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable
from pathlib import Path

from launcher.run_dir.atomic import open_plain

RESERVE = ".reserve"
SIZE_BYTES = 64 * 1024
NO_ROOM = (errno.ENOSPC, errno.EDQUOT)


def keep_reserve(directory: Path) -> None:
    """Allocate it, or do without: a run that has no room for it may still free some of its own."""
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
    """Call `write`, and once more with the reserve's room where there is no other. Raises OSError."""
    try:
        write()
    except OSError as error:
        if error.errno not in NO_ROOM:
            raise
        give_up_reserve(directory)
        write()
