"""Runs modules that are compiled as if they were not. Never imports the compiler."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, nullcontext
from typing import cast

import torch


def uncompiled() -> AbstractContextManager[object]:
    """Context in which all that torch.compile made runs eagerly, hooks on modules within it included."""
    if "torch._dynamo" not in sys.modules:  # then nothing is compiled
        return nullcontext()
    return cast(AbstractContextManager[object], torch.compiler.set_stance("force_eager"))
