"""How long something may take in a test: as promised where it runs alone, more beside other tests."""

from __future__ import annotations

import os

CROWDED = 3


def at_most(seconds: float) -> float:
    """`seconds` are what the design promises on a machine that does nothing else.

    The workers of pytest-xdist share the cores, so a test among them gets `CROWDED` times that.
    """
    return seconds * (CROWDED if "PYTEST_XDIST_WORKER" in os.environ else 1)
