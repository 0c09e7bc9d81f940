"""What the parts of a run share on one rank, and the questions that ranks vote on in each step.

Owns the meaning of each vote, and how a time travels as one; how votes travel is the engine's.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Protocol

from launcher.config.schema import Config
from launcher.distributed.env import WorkerEnv
from launcher.distributed.heartbeat import Heartbeat
from launcher.engine import Stepper, StepReport, WeightAverage
from launcher.run_dir.records import logs_of_failure
from launcher.telemetry import Telemetry
from launcher.training.progress import Position
from launcher.training.requests import Requests


@dataclass(frozen=True)
class Run:
    """One rank of a running job."""

    config: Config
    env: WorkerEnv
    stepper: Stepper
    telemetry: Telemetry
    heartbeat: Heartbeat
    requests: Requests
    average: WeightAverage | None = None  # of the weights, where ema.decay asks for one

    @property
    def logs_of_failure(self) -> str:
        """The logs that a failure of this rank refers to, as the end of a sentence."""
        return logs_of_failure(Path(self.config.run.dir), self.env.rank, self.env.world_size)


class Question(IntEnum):
    """What the ranks vote on in every step. One vote is enough but for the last two."""

    STOP = 0
    SAVE = 1
    GIVE_UP = 2  # a checkpoint could not be written, so the run must end
    BAD_SAMPLES = 3  # as many votes as samples that a rank has left out
    STREAM_END = 4  # nothing left in this pass over a stream; all votes are needed


# No questions: the times of one rank, which `stragglers` sends as votes, and the times of all
# ranks, which `bucket_trial` sends.
WAIT_SLOT, DATA_SLOT, BUCKET_SLOT = 5, 6, 7


def time_as_votes(milliseconds: float) -> int:
    """A time as votes: whole microseconds, and one more, because no vote is 0."""
    return round(1e3 * milliseconds) + 1


def milliseconds_of(votes: int, num_ranks: int = 1) -> float:
    """The sum of the times of so many ranks."""
    return (votes - num_ranks) / 1e3


class Voter(Protocol):
    """Follows the steps of a run, and sends what it measures with their counts. Alike on all ranks."""

    def vote(self, position: Position) -> None:
        """Before a step."""
        ...

    def after(self, position: Position, report: StepReport) -> None:
        """After a step was read, in order."""
        ...


class Votes:
    """The questions that some rank has voted for, the same on all ranks."""

    def __init__(self) -> None:
        self._agreed: set[Question] = set()
        self.bad_samples = 0  # left out so far, over all ranks

    def count(self, report: StepReport) -> None:
        """Add the votes of a step, which its report carries."""
        self._agreed |= {question for question in Question if report.votes[question]}
        self.bad_samples += report.votes[Question.BAD_SAMPLES]

    def agree(self, question: Question) -> None:
        """Add a question that all ranks have agreed on outside a step."""
        self._agreed.add(question)

    @property
    def some(self) -> bool:
        """Whether there is any."""
        return bool(self._agreed)

    def __contains__(self, question: Question) -> bool:
        return question in self._agreed

    def take(self) -> set[Question]:
        """The questions agreed on since the last call."""
        agreed, self._agreed = self._agreed, set()
        return agreed
