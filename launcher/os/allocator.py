"""The C library's allocator, set for a program that needs the same large blocks again in every step.

glibc returns a freed block of more than 32 MiB to the system, and smaller ones from the top of its heap. The
next step gets them back as new pages, which the kernel fills with zeros one by one. On a CPU that takes a
third of a step of the small network on CIFAR-10 at batch 256.
"""

from __future__ import annotations

import ctypes
import os

M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # mallopt(3)
LARGEST = 2**31 - 1  # mallopt takes an int
OWN_CHOICES = ("GLIBC_TUNABLES", "MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_MAX_", "MALLOC_MMAP_THRESHOLD_")


def tune_malloc() -> bool:
    """Let this process keep what it frees. Returns whether it does: not with another C library than glibc.

    Variables by which the user has set the allocator are left alone.
    """
    if any(name in os.environ for name in OWN_CHOICES):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return bool(mallopt(M_MMAP_MAX, 0)) and bool(mallopt(M_TRIM_THRESHOLD, LARGEST))
