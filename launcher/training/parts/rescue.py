"""Lets modules compute in fp32 once their outputs have left the range of fp16, and the run continue.

Owns when that is tried and what is reported of it. A loss scale cannot help there: it moves gradients, not
activations. All ranks read the same report of the same step, search together, and change the same modules
before the next step; the skipped step has changed no weight.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from launcher.engine import StepReport
from launcher.engine.fp32_modules import kind_of
from launcher.training.divergence.evidence import Overflow
from launcher.training.progress import Position, Standing
from launcher.training.recorded_config import fp32_modules, record_config
from launcher.training.run import Run


class Searcher(Protocol):
    """Searches a failed step for its cause. All ranks make the same calls at the same step."""

    def broken_weights(self) -> str: ...

    def overflow(self, position: Position) -> Overflow | None: ...


class Rescue:
    """Computes in fp32 in the modules of the run's earlier rescues, and in those of new ones.

    Only where `precision.rescue` is set, and the arithmetic is half. Building it adds the modules of the
    rescues in `standing`; a new one adds its own there, so that checkpoints have them.
    """

    def __init__(self, run: Run, standing: Standing, searcher: Searcher) -> None:
        self._run = run
        self._standing = standing
        self._searcher = searcher
        self._limit = run.config.precision.max_rescues
        self.active = run.config.precision.rescue and run.stepper.policy.arithmetic.itemsize < 4
        for patterns in standing.rescued:
            run.stepper.compute_in_fp32(patterns)
        if standing.rescued:
            record_config(run, standing)

    def after(self, position: Position, report: StepReport) -> bool:
        """Whether further modules compute in fp32 from the next step on, because of this one.

        To be called before the next step begins. A collective where the losses were not finite.
        """
        if not (self.active and report.bad_losses):
            return False
        found = None if self._searcher.broken_weights() else self._searcher.overflow(position)
        stepper = self._run.stepper
        if found is None or not found.module or found.module in stepper.fp32_modules:
            return False
        if len(self._standing.rescued) >= self._limit:
            self._run.telemetry.warn(
                f"{found.text} in step {position.step}: it is not rescued, after "
                f"precision.max_rescues={self._limit} rescues."
            )
            return False
        patterns = kind_of(stepper.model, found.module)
        stepper.compute_in_fp32(patterns)
        self._standing.rescued.append(patterns)
        self._report(position, found, patterns)
        record_config(self._run, self._standing)
        return True

    def _report(self, position: Position, found: Overflow, patterns: Sequence[str]) -> None:
        modules = list(fp32_modules(self._run.config, self._standing))
        self._run.telemetry.decision(
            "rescue",
            f"fp32 arithmetic in {', '.join(patterns)} from step {position.step + 1} on; {found.text} in "
            f"step {position.step}. To start with it: precision.fp32_modules={modules}",
            module=found.module,
            patterns=list(patterns),
        )
