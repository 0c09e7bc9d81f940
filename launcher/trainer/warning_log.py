"""Where the warnings of a run go, and when one that recurs is due again.

Owns which rank shows them: those of the engine and the data sets become events, which rank 0 has; those of
other libraries go to the stderr of rank 0 and to the log of their rank. The user's own filters are respected.
"""

from __future__ import annotations

import logging
import warnings
from collections import Counter
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


class PowerOfTenThrottle:
    """Counts what has occurred on this rank since this process started, by a number such as that of a rank.

    All of it is an event in metrics.jsonl; the first, the tenth, the hundredth time is a warning too.
    """

    def __init__(self) -> None:
        self._counts: Counter[int] = Counter()

    def add(self, what: int = 0) -> int:
        """How often it has occurred, if that is due for a warning, else 0."""
        self._counts[what] += 1
        times = self._counts[what]
        return times if str(times).strip("0") == "1" else 0
