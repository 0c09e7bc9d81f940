"""What a machine had too little of: memory, or room on a disk, from the error that says so.

Owns the translation of Python's, torch's and the system's own errors into those with an exit code. Imports no
torch: its class of error is looked up only where it has been loaded.
"""

from __future__ import annotations

import errno
import sys

from launcher.errors import LauncherError, OutOfMemoryError, StorageError

# From a tensor on the CPU that does not fit, and from a container of C++ that does not.
OF_ALLOCATORS = ("DefaultCPUAllocator: ", "std::bad_alloc")
NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG})
TO_LOWER = "Lower data.micro_batch (the update stays that of data.batch_size), or choose a smaller model."


def shortage_of(
    error: BaseException, who: str, place: str = "", advice: str = TO_LOWER
) -> LauncherError | None:
    """The error that a user can act on, if `error` is a lack of memory or of room; `who` begins its text.

    `place` (" at file:line") and `advice` are those of a lack of memory.
    """
    if isinstance(error, LauncherError):
        return None
    if kind := _memory(error):
        said = " ".join(str(error).split("\n", 1)[0].split()[:40])
        return OutOfMemoryError(f"{who} ran out of {kind}{place}{f': {said}' if said else ''}. {advice}")
    if isinstance(error, OSError) and error.errno in NO_ROOM:
        place = f" {error.filename}" if error.filename else " a file"
        return StorageError(
            f"{who} could not write{place}: {error.strerror}. Make room there (bytes and inodes: df -h, "
            "df -i), or choose another place with run.dir=DIR."
        )
    return None


def _memory(error: BaseException) -> str:
    """Which memory there was too little of; "" if it was something else."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(error, torch.cuda.OutOfMemoryError):
        return "GPU memory"
    if isinstance(error, MemoryError):
        return "memory"
    text = str(error) if isinstance(error, RuntimeError) else ""
    return "memory" if any(words in text for words in OF_ALLOCATORS) else ""
