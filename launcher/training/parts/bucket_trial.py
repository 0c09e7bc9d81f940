"""wire.bucket_mb=auto: the size of the buckets, measured in the first steps where no bit depends on it.

Owns the trial: in each of its steps all ranks send buckets of the same size, and what the step took travels
with the counts of a later step, so that it costs no collective. All ranks read the same sums, and so choose
the same size. The choice is not saved: a resumed run, perhaps on another link, measures again and keeps its
bits.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar

from launcher.engine import Stepper, StepReport
from launcher.engine.diagnostics.step_timer import DATA
from launcher.training.progress import Position
from launcher.training.votes import BUCKET_SLOT, milliseconds_of, time_as_votes

TOPIC = "buckets"
WARM_UP = 3  # steps, which compile and touch memory for the first time
LAG = 2  # steps until a time travels: a step is read while the next one runs, and sent with the one after
ROUNDS = 7  # steps of each size, in turn
# Another size than the one that follows from the model's must be faster by this share of a step, and in all
# rounds but one: anything less is noise, of other processes for instance.
LEAST_GAIN, MOST_LOST = 0.02, 1
PAYS = 10  # steps that are left for each step of the trial


Times = dict[int, float]  # by round, the mean over the ranks in milliseconds


@dataclass
class BucketTrial:
    """Measures, then sets the size. All ranks call the same methods at the same steps; idle until `begin`.

    `decide` is that of a Telemetry: it reports what was chosen, and why.
    """

    name: ClassVar[str] = "bucket_trial"

    stepper: Stepper
    world_size: int
    total_steps: int
    is_sharded: bool
    decide: Callable[..., None]
    _sizes: list[int] = field(default_factory=list)  # empty: nothing to choose, or it has been chosen
    _usual: int = 0
    _first: int = 0  # step of the trial; it ends before `_end`
    _end: int = 0
    _own_ms: dict[int, float] = field(default_factory=dict)  # by step, of this rank
    _times: dict[int, Times] = field(default_factory=dict)  # by size

    def begin(self, step: int) -> None:
        """Plan the trial of a run after `step` steps."""
        sizes, self._usual = self.stepper.bucket_sizes(), self.stepper.bucket_bytes
        length, steps_left = len(sizes) * ROUNDS, self.total_steps - step
        obstacles = {
            "wire.shard=true: the size determines which rank holds which optimizer states": self.is_sharded,
            f"with {self.world_size} ranks the size changes the result (not with wire.sum=fp32)": not sizes,
            "all sizes make the same buckets": len(sizes) < 2,
            f"{steps_left} steps are too few to measure other sizes": steps_left < PAYS * length,
        }
        reason = next((text for text, applies in obstacles.items() if applies), "")
        if not reason:
            self._sizes, self._times = sizes, {size: {} for size in sizes}
            self._first = step + 1 + WARM_UP
            self._end = self._first + length
        elif self.stepper.num_buckets > 2:  # with fewer there is hardly anything to choose
            text = f"{_mb(self._usual)}, from the model's size: {reason}"
            self.decide(TOPIC, text, bucket_bytes=self._usual)

    def vote(self, position: Position) -> None:
        """Set the buckets of the coming step, and send what an earlier step has taken this rank."""
        if not self._sizes:
            return
        if self._first <= position.step < self._end:
            self.stepper.set_bucket_bytes(self._turn(position.step)[0])
        elif position.step == self._end:
            self.stepper.set_bucket_bytes(self._usual)  # until the last times have arrived
        if (own_ms := self._own_ms.get(position.step - LAG)) is not None:
            self.stepper.vote(BUCKET_SLOT, time_as_votes(own_ms))

    def after_step(self, position: Position, report: StepReport) -> None:
        """Take the times of a step that was read, in order. A dropped step is not read, nor are its votes."""
        if not self._sizes:
            return
        if self._first <= position.step < self._end:
            self._own_ms[position.step] = sum(ms for part, ms in report.spans_ms.items() if part != DATA)
        if votes := report.votes[BUCKET_SLOT]:
            size, turn = self._turn(position.step - LAG)
            self._times[size][turn] = milliseconds_of(votes, self.world_size) / self.world_size
        if position.step >= self._end - 1 + LAG:
            self._conclude()

    def _turn(self, step: int) -> tuple[int, int]:
        """The size in turn and the number of its round; each round begins with another size."""
        turn, place = divmod(step - self._first, len(self._sizes))
        return self._sizes[(turn + place) % len(self._sizes)], turn

    def _conclude(self) -> None:
        medians = {size: statistics.median(times.values()) for size, times in self._times.items() if times}
        faster = [size for size in medians if _is_faster(self._times[size], self._times[self._usual])]
        best = min(faster, key=medians.__getitem__, default=self._usual)
        self._sizes = []
        if faster:
            self.stepper.set_bucket_bytes(best)
        found = ", ".join(f"{_mb(size)} {ms:.1f} ms" for size, ms in medians.items())
        self.decide(
            TOPIC,
            f"{_mb(best)}, measured: a step takes {found} (medians of {ROUNDS})"
            + ("" if faster else "; no other is faster in nearly all rounds"),
            bucket_bytes=best,
            step_ms={_mb(size): ms for size, ms in medians.items()},
        )


def _is_faster(times: Times, usual: Times) -> bool:
    """Whether a size is faster than the usual one beyond noise."""
    rounds = times.keys() & usual.keys()
    if len(rounds) < ROUNDS - MOST_LOST:
        return False
    won = sum(times[each] < usual[each] for each in rounds)
    gained = statistics.median(times.values()) < (1 - LEAST_GAIN) * statistics.median(usual.values())
    return gained and won >= ROUNDS - MOST_LOST


def _mb(size_bytes: int) -> str:
    return f"{size_bytes / 2**20:.2g} MB"
