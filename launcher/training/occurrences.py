"""When a run warns of what it records again and again: the first time, the tenth, the hundredth.

All of them are events in metrics.jsonl; only these are also warnings.
"""

from __future__ import annotations

from collections import Counter


class Occurrences:
    """Counts what has occurred on this rank since the run started, by a number such as that of a rank."""

    def __init__(self) -> None:
        self._counts: Counter[int] = Counter()

    def add(self, what: int = 0) -> int:
        """How often it has occurred, if that is due for a warning, else 0."""
        self._counts[what] += 1
        times = self._counts[what]
        return times if str(times).strip("0") == "1" else 0
