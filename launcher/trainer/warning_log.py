"""Where the warnings of a run go.

Owns which rank shows them: those of the engine and the data sets become events, which rank 0 has; those of
other libraries go to the stderr of rank 0 and to the log of their rank. The user's own filters are respected.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from launcher.engine import EngineWarning
from launcher.errors import DataWarning, escaped
from launcher.telemetry import Telemetry

EVENT_WARNINGS = (EngineWarning, DataWarning)

log = logging.getLogger("launcher")


@contextmanager
def warnings_logged(telemetry: Telemetry, rank: int) -> Iterator[None]:
    """Within the context warnings go to the log of their rank; on rank 0 they are shown, too."""
    original_showwarning: Any = warnings.showwarning

    def show(
        message: object, category: type[Warning], filename: str, lineno: int, *more: object, **_: object
    ) -> None:
        """Show a warning; called by `warnings` in the place of its own function."""
        if issubclass(category, EVENT_WARNINGS):
            log.warning("rank %d: %s", rank, message)
            telemetry.warn(str(message))
            return
        text = escaped(str(message))
        log.warning("%s:%d: %s: %s", filename, lineno, category.__name__, text)
        if rank == 0:
            original_showwarning(text, category, filename, lineno, *more)

    with warnings.catch_warnings():
        for each in EVENT_WARNINGS:
            warnings.simplefilter("always", each)  # each is given once per Stepper or data set
        warnings.simplefilter("default", append=True)  # after the user's filters: once for each line of code
        warnings.showwarning = show
        yield
