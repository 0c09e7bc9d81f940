"""Warnings of a run: each of Python's shown once, and counted; when those of a run's own are due again.

Owns which rank shows them: those of the engine and the data sets become events, which rank 0 has; those of
other libraries go to the stderr of rank 0 and to the log of their rank. The user's own filters are respected.
"""

from __future__ import annotations

import logging
import os
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from launcher.config.user_code import calling_line, is_of_the_user
from launcher.engine import EngineWarning
from launcher.errors import DataWarning, escaped
from launcher.telemetry import Telemetry

EVENT_WARNINGS = (EngineWarning, DataWarning)
MAX_TEXTS = 1000  # that are told apart; more are counted by their lines of code
Place = tuple[str, int, str]  # file, line, and what it says

log = logging.getLogger("launcher")


@contextmanager
def warnings_logged(telemetry: Telemetry, rank: int) -> Iterator[None]:
    """Within the context warnings are shown once; at its end those that were repeated are counted."""
    counts: Counter[Place] = Counter()
    original_showwarning: Any = warnings.showwarning

    def show(
        message: object, category: type[Warning], filename: str, lineno: int, *more: object, **_: object
    ) -> None:
        """Show a warning; called by `warnings` in the place of its own function."""
        if issubclass(category, EVENT_WARNINGS):
            log.warning("rank %d: %s", rank, message)
            telemetry.warn(str(message))
            return
        if not is_of_the_user(filename):  # torch's own line would help nobody
            filename, lineno = calling_line() or (filename, lineno)
        text = f"{category.__name__}: {message}"
        place = (filename, lineno, text if len(counts) < MAX_TEXTS else category.__name__)
        counts[place] += 1
        if counts[place] > 1:
            return
        log.warning("%s:%d: %s", filename, lineno, text)
        if rank == 0:
            shown = escaped(str(message))
            original_showwarning(
                message if shown == str(message) else shown, category, filename, lineno, *more
            )

    with warnings.catch_warnings():
        for each in EVENT_WARNINGS:
            warnings.simplefilter("always", each)  # each is given once per Stepper or data set
        warnings.simplefilter("always", append=True)  # after the user's filters; here it is shown once
        warnings.showwarning = show
        try:
            yield
        finally:
            for (filename, lineno, text), number in counts.most_common():
                if number > 1:
                    name = f"{os.path.basename(filename)}:{lineno}"
                    log.warning("%s: given %d times: %s", name, number, text.partition("\n")[0])


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
