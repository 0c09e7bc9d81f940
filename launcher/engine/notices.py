"""What the engine says once about a training loop that it can run but that does not do what it seems to."""

from __future__ import annotations

import warnings

from launcher.engine.refusal import EngineWarning

NO_SAMPLES = (
    "a step had no samples on any rank: it is skipped, and its loss is nan. Call stepper.backward(loss_sum, "
    "count) before stepper.step(), with the number of samples as count."
)


class Notices:
    """Warnings of one Stepper, each given once."""

    def __init__(self) -> None:
        self._given: set[str] = set()

    def warn(self, text: str, stacklevel: int) -> None:
        """Warn, as at `stacklevel` frames above the caller of this."""
        if text not in self._given:
            self._given.add(text)
            warnings.warn(text, EngineWarning, stacklevel=stacklevel + 1)
