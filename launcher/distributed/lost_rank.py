"""Which errors of a rank show that it has lost another one: those of Gloo, NCCL and the store.

Owns the patterns that tell them from a rank's own errors. Imports no torch.
"""

from __future__ import annotations

import re

from launcher.distributed import nccl
from launcher.errors import whole_text

TIMED_OUT = re.compile(r"timed out|(wait|application) timeout", re.IGNORECASE)  # in Gloo's words
# Errors of a rank that failed because another one did: of Gloo, NCCL or the store. Matched against the
# error's message only.
OF_ANOTHER = re.compile(
    r"gloo|nccl|DistBackendError|DistNetworkError|DistStoreError|Wait timeout|Broken pipe|"
    r"Application timeout|Connection (closed|reset)",
    re.IGNORECASE,
)


def is_of_another(error: BaseException) -> bool:
    """Whether an exception, by its class and text, is that of a rank which lost another one."""
    text = f"{type(error).__name__}: {whole_text(error)}"
    return bool(OF_ANOTHER.search(text)) and not nccl.is_own(text)


def is_loss(error: BaseException) -> bool:
    """Whether an error of Gloo or NCCL says that another rank has closed its connection."""
    text = whole_text(error)
    lost = OF_ANOTHER.search(text) and not nccl.is_own(text)
    return isinstance(error, RuntimeError) and bool(lost) and not TIMED_OUT.search(text)
