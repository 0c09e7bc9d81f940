"""The slots of a step's all-reduce that the trainer uses: flags, counts and times, summed over the ranks.

Owns the meaning of each slot; how they travel is the engine's.
"""

from __future__ import annotations

from enum import IntEnum

from launcher.data.batch_plan import BatchPlan
from launcher.engine import StepReport
from launcher.trainer.progress import Position


class StepFlag(IntEnum):
    """The slots of the step's all-reduce: the sum over the ranks of each."""

    STOP = 0  # this and the next two are set if any rank sets them
    SAVE = 1
    ABORT = 2  # a checkpoint could not be written, so the run must end
    BAD_SAMPLES = 3  # how many samples were left out
    STREAM_END = 4  # nothing left in this pass over a stream; all ranks must set it
    MISSING_SAMPLES = 7  # how many samples ranks lack of their shares, where a stream ends


# No flags: the times of one rank in milliseconds, which `stragglers` sends.
WAIT_SLOT, DATA_SLOT = 5, 6

# Read in every step: a plain int indexes in a third of the time that an IntEnum takes.
_BAD, _MISSING = int(StepFlag.BAD_SAMPLES), int(StepFlag.MISSING_SAMPLES)


def samples_of(plan: BatchPlan, position: Position, report: StepReport) -> int:
    """How many samples of the data set the step trained on, over all ranks.

    Not `report.count`, which a loss may give in tokens, pixels or weights.
    """
    return plan.samples_of(position.step_of_epoch) - int(report.votes[_BAD] + report.votes[_MISSING])


class AgreedFlags:
    """The flags that some rank has set, the same on all ranks."""

    def __init__(self) -> None:
        self._agreed: set[StepFlag] = set()

    def count(self, report: StepReport) -> None:
        """Add the flags of a step, which its report carries."""
        self._agreed |= {flag for flag in StepFlag if report.votes[flag]}

    def agree(self, flag: StepFlag) -> None:
        """Add a flag that all ranks have agreed on outside a step."""
        self._agreed.add(flag)

    @property
    def some(self) -> bool:
        """Whether there is any."""
        return bool(self._agreed)

    def __contains__(self, flag: StepFlag) -> bool:
        return flag in self._agreed

    def take(self) -> set[StepFlag]:
        """The flags set since the last call."""
        agreed, self._agreed = self._agreed, set()
        return agreed
