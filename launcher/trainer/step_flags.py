"""The slots of a step's all-reduce that the trainer uses: flags and counts, summed over the ranks.

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
    MISSING_SAMPLES = 5  # how many samples ranks lack of their shares, where a stream ends


# Read in every step: a plain int indexes in a third of the time that an IntEnum takes.
_BAD, _MISSING = int(StepFlag.BAD_SAMPLES), int(StepFlag.MISSING_SAMPLES)


def samples_of(plan: BatchPlan, position: Position, report: StepReport) -> int:
    """How many samples of the data set the step trained on, over all ranks.

    Not `report.count`, which a loss may give in tokens, pixels or weights.
    """
    return plan.samples_of(position.step_of_epoch) - int(report.votes[_BAD] + report.votes[_MISSING])
