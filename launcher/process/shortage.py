"""Recognises shortage of memory or disk space from an error.

Owns the translation of errors of Python, torch and the system into those with an exit code. Imports no torch:
its error class is looked up only if torch is loaded.
"""

from __future__ import annotations

import errno
import sys

from launcher.errors import LauncherError, OutOfMemoryError, StorageError, whole_text

# From torch's CPU allocator, and from C++.
OF_ALLOCATORS = ("DefaultCPUAllocator: ", "std::bad_alloc")
NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG})
TO_LOWER = "Lower data.micro_batch (the update stays that of data.batch_size), or choose a smaller model."


def shortage_of(
    error: BaseException, who: str, place: str = "", advice: str = TO_LOWER
) -> LauncherError | None:
    """The error for users, if `error` is a shortage of memory or disk space. `who` begins its text.

    `place` (" at file:line") and `advice` are for a shortage of memory.
    """
    if isinstance(error, LauncherError):
        return None
    if kind := _memory(error):
        said = _said(error)
        return OutOfMemoryError(f"{who} ran out of {kind}{place}{f': {said}' if said else ''}. {advice}")
    if isinstance(error, OSError) and error.errno in NO_ROOM:
        place = f" {error.filename}" if error.filename else " a file"
        return StorageError(
            f"{who} could not write{place}: {error.strerror}. Make room there (bytes and inodes: df -h, "
            "df -i), or choose another place with run.dir=DIR."
        )
    return None


def ran_out(error: BaseException) -> str:
    """Which memory ran out and what the allocator said, in one line; "" for any other error."""
    origin = error.__cause__ if isinstance(error, OutOfMemoryError) and error.__cause__ else error
    kind = "memory" if isinstance(origin, OutOfMemoryError) else _memory(origin)
    said = _said(origin)
    return f"{kind}{f': {said}' if said else ''}".rstrip(".") if kind else ""


def _said(error: BaseException) -> str:
    return " ".join(whole_text(error).split("\n", 1)[0].split()[:40])


def _memory(error: BaseException) -> str:
    """Which memory ran out; "" for any other error."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(error, torch.cuda.OutOfMemoryError):
        return "GPU memory"
    if isinstance(error, MemoryError):
        return "memory"
    text = whole_text(error) if isinstance(error, RuntimeError) else ""
    return "memory" if any(words in text for words in OF_ALLOCATORS) else ""
