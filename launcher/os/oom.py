"""Recognises shortage of memory or disk space from an error.

Owns the translation of errors of Python, torch and the system into those with an exit code. Imports no torch:
its error class is looked up only if torch is loaded.
"""

from __future__ import annotations

import errno
import re
import sys

from launcher.errors import LauncherError, OutOfMemoryError, StorageError, whole_text

# In a RuntimeError of torch's CPU allocator, of C++, or of the system.
OF_HOST = re.compile(r"DefaultCPUAllocator: |std::bad_alloc|Cannot allocate memory")
# Of what allocates beside torch's allocator for GPUs, whose error is a class: handles and plans of cuBLAS,
# cuDNN, cuFFT, pinned memory and graphs of CUDA, Triton's modules.
OF_GPU = re.compile(r"ALLOC(ATION)?_FAILED|(CUDA|HIP) error: out of memory|\[CUDA\]: out of memory")
OF_NCCL = re.compile(r"(?s)NCCL error.*(Cuda failure.*out of memory|Failed to CUDA (host )?[cm]?alloc)")
LAST_OF_NCCL = "Last error:\n"  # stands before what NCCL says itself
NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG})
TO_LOWER = (
    "Lower data.micro_batch_size (the update stays that of data.batch_size), divide the optimizer's states "
    "among the ranks with ddp.shard_optimizer=true, or choose a smaller model."
)


def to_resource_error(
    error: BaseException, who: str, place: str = "", advice: str = TO_LOWER
) -> LauncherError | None:
    """The error for users, if `error` is a shortage of memory or disk space. `who` begins its text.

    `place` (" at file:line") and `advice` are for a shortage of memory.
    """
    if isinstance(error, LauncherError):
        return None
    if kind := _memory(error):
        return OutOfMemoryError(f"{who} ran out of {kind}{place}{_said(error)}. {advice}")
    if isinstance(error, OSError) and error.errno in NO_ROOM:
        place = f" {error.filename}" if error.filename else " a file"
        return StorageError(
            f"{who} could not write{place}: {error.strerror}. Make room there (bytes and inodes: df -h, "
            "df -i), or choose another place with run.dir=DIR."
        )
    return None


def oom_text(error: BaseException) -> str:
    """Which memory ran out and what the allocator said, in one line; "" for any other error.

    Also "" for a shortage of NCCL: its communicator has failed, and smaller pieces do not help.
    """
    origin = error.__cause__ if isinstance(error, OutOfMemoryError) and error.__cause__ else error
    if OF_NCCL.search(whole_text(origin)):
        return ""
    kind = "memory" if isinstance(origin, OutOfMemoryError) else _memory(origin)
    return f"{kind}{_said(origin)}".rstrip(".") if kind else ""


def _said(error: BaseException) -> str:
    """What the allocator said, as the end of a sentence: the first words of it."""
    words = whole_text(error).rpartition(LAST_OF_NCCL)[2].split("\n", 1)[0].split()[:40]
    return f": {' '.join(words)}" if words else ""


def _memory(error: BaseException) -> str:
    """Which memory ran out; "" for any other error."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(error, torch.cuda.OutOfMemoryError):
        return "GPU memory"
    if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM):
        return "memory"
    text = whole_text(error) if isinstance(error, RuntimeError) else ""
    if OF_GPU.search(text) or OF_NCCL.search(text):
        return "GPU memory"
    return "memory" if OF_HOST.search(text) else ""
