"""Whether a sweep has asked this job to end: by its file, looked for on rank 0 alone, or by wandb's agent.

The other ranks learn of it by rank 0's vote to stop, so that all end after the same step.
"""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Mapping
from pathlib import Path

from launcher.run_dir.pruning import PruneRequest, prune_request
from launcher.telemetry.tracker.wandb_agent import sweep_of_agent

EVERY_S = 0.5  # between two looks: a step costs a comparison of clocks, a shared disk two look-ups a second


class SweepStopListener:
    """Looks for a request in the run's directory; `request` is what it has found."""

    def __init__(self, run_dir: Path, is_rank0: bool) -> None:
        self.request: PruneRequest | None = None
        self._run_dir = run_dir
        self._next_s = 0.0 if is_rank0 else math.inf

    def asked(self) -> bool:
        """Whether the run is to be pruned; false on all ranks but 0."""
        now = time.monotonic()
        if now >= self._next_s and self.request is None:
            self._next_s = now + EVERY_S
            self.request = prune_request(self._run_dir)
        return self.request is not None


def request_of_agent(stop: signal.Signals | None, environ: Mapping[str, str]) -> PruneRequest | None:
    """The request of a sweep of wandb, whose agent stops a run early by SIGTERM, and kills it 30 s later."""
    sweep = sweep_of_agent(environ)
    if not sweep or stop != signal.SIGTERM:
        return None
    return PruneRequest(f"stopped by wandb's sweep {sweep}", keep_checkpoint=True)
