"""The questions that ranks vote on in each step, and what else travels with its counts.

Owns the meaning of each vote; how votes travel is the engine's.
"""

from __future__ import annotations

from enum import IntEnum

from launcher.data.batch_plan import BatchPlan
from launcher.engine import StepReport
from launcher.trainer.progress import Position


class StepFlag(IntEnum):
    """What the ranks vote on in every step. One vote is enough but for the last three."""

    STOP = 0
    SAVE = 1
    ABORT = 2  # a checkpoint could not be written, so the run must end
    BAD_SAMPLES = 3  # as many votes as samples that a rank has left out
    STREAM_END = 4  # nothing left in this pass over a stream; all votes are needed
    MISSING_SAMPLES = 8  # as many votes as a rank lacks of its share, where a stream ends


# No questions: the times of one rank in milliseconds, which `stragglers` sends.
WAIT_SLOT, DATA_SLOT = 5, 6

# Read in every step: a plain int indexes in a third of the time that an IntEnum takes.
_BAD, _MISSING = int(StepFlag.BAD_SAMPLES), int(StepFlag.MISSING_SAMPLES)


def samples_of(plan: BatchPlan, position: Position, report: StepReport) -> int:
    """How many samples of the data set the step trained on, over all ranks.

    Not `report.count`, which a loss may give in tokens, pixels or weights.
    """
    return plan.samples_of(position.step_of_epoch) - int(report.votes[_BAD] + report.votes[_MISSING])


class AgreedFlags:
    """The questions that some rank has voted for, the same on all ranks."""

    def __init__(self) -> None:
        self._agreed: set[StepFlag] = set()

    def count(self, report: StepReport) -> None:
        """Add the votes of a step, which its report carries."""
        self._agreed |= {question for question in StepFlag if report.votes[question]}

    def agree(self, question: StepFlag) -> None:
        """Add a question that all ranks have agreed on outside a step."""
        self._agreed.add(question)

    @property
    def some(self) -> bool:
        """Whether there is any."""
        return bool(self._agreed)

    def __contains__(self, question: StepFlag) -> bool:
        return question in self._agreed

    def take(self) -> set[StepFlag]:
        """The questions agreed on since the last call."""
        agreed, self._agreed = self._agreed, set()
        return agreed
