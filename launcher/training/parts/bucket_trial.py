"""wire.bucket_mb=auto: the size of the buckets, measured in the first steps where no bit depends on it.

Owns the trial: in each of its steps all ranks send buckets of the same size, and what the step took travels
with the counts of a later step, so that it costs no collective. All ranks read the same sums, and so choose
the same size. The choice is not saved: a resumed run, perhaps on another link, measures again and keeps its
bits.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable

from launcher.engine import Stepper, StepReport
from launcher.engine.diagnostics.step_timer import DATA
from launcher.training.progress import Position
from launcher.training.votes import BUCKET_SLOT, milliseconds_of, time_as_votes

TOPIC = "buckets"
WARM_UP = 3  # steps, which compile and touch memory for the first time
ROUNDS = 7  # steps of each size, in turn
# Another size than the one that follows from the model's must be faster by this share of a step, and in all
# rounds but one: anything less is noise, of other processes for instance.
LEAST_GAIN, MOST_LOST = 0.02, 1
PAYS = 10  # steps that are left for each step of the trial


Times = dict[int, float]  # by round, the mean over the ranks in milliseconds


class BucketTrial:
    """Measures, then sets the size. All ranks call the same methods at the same steps; idle until `begin`."""

    def __init__(
        self,
        stepper: Stepper,
        world_size: int,
        total_steps: int,
        is_sharded: bool,
        decide: Callable[..., None],
    ) -> None:
        """`decide` is that of a Telemetry: it reports what was chosen, and why."""
        self._stepper = stepper
        self._world_size = world_size
        self._total_steps = total_steps
        self._is_sharded = is_sharded
        self._decide = decide
        self._sizes: list[int] = []  # empty: there is nothing to choose, or it has been chosen
        self._usual = 0
        self._first = self._end = 0  # steps of the trial
        self._own: deque[tuple[int, float]] = deque()  # this rank's times to send: step, milliseconds
        self._sent: dict[int, int] = {}  # by step in which a time travels, the step that it is of
        self._times: dict[int, Times] = {}  # by size

    def begin(self, step: int, learner: object) -> None:
        """Plan the trial of a run after `step` steps."""
        is_recorded, steps_left = getattr(learner, "is_recorded", False), self._total_steps - step
        sizes, self._usual = self._stepper.bucket_sizes(), self._stepper.bucket_bytes
        length = len(sizes) * ROUNDS
        if reason := self._obstacle(sizes, length, steps_left, is_recorded):
            if self._stepper.num_buckets > 2:  # with fewer there is hardly anything to choose
                text = f"{_mb(self._usual)}, from the model's size: {reason}"
                self._decide(TOPIC, text, bucket_bytes=self._usual)
            return
        self._sizes, self._times = sizes, {size: {} for size in sizes}
        self._first = step + 1 + WARM_UP
        self._end = self._first + length

    def _obstacle(self, sizes: list[int], length: int, steps_left: int, is_recorded: bool) -> str:
        """Why nothing is measured; empty if something is."""
        if self._is_sharded:
            return "wire.shard=true: the size determines which rank holds which optimizer states"
        if not sizes:
            return (
                f"with {self._world_size} ranks the size changes the order of additions, and the result "
                "(not with wire.sum=fp32)"
            )
        if len(sizes) < 2:
            return "all sizes make the same buckets"
        if is_recorded:
            return "a recorded step keeps its buckets"
        if steps_left < PAYS * length:
            return f"{steps_left} steps are too few to measure other sizes"
        return ""

    def vote(self, position: Position) -> None:
        """Set the buckets of the coming step, and send what an earlier step has taken this rank."""
        if not self._sizes:
            return
        if self._first <= position.step < self._end:
            self._stepper.set_bucket_bytes(self._size_in(position.step))
        elif position.step == self._end:
            self._stepper.set_bucket_bytes(self._usual)  # until the last times have arrived
        if self._own:
            self._sent[position.step], own_ms = self._own.popleft()
            self._stepper.vote(BUCKET_SLOT, time_as_votes(own_ms))

    def after_step(self, position: Position, report: StepReport) -> None:
        """Take the times of a step that was read, in order. A dropped step is not read, nor are its votes."""
        if not self._sizes:
            return
        if self._first <= position.step < self._end:
            own_ms = sum(ms for part, ms in report.spans_ms.items() if part != DATA)
            self._own.append((position.step, own_ms))
        if (step := self._sent.pop(position.step, None)) is not None and report.votes[BUCKET_SLOT]:
            all_ms = milliseconds_of(report.votes[BUCKET_SLOT], self._world_size)
            self._times[self._size_in(step)][self._round_of(step)] = all_ms / self._world_size
        if position.step >= self._end and not (self._own or self._sent):
            self._conclude()

    def _size_in(self, step: int) -> int:
        """The size in turn, each round beginning with another one."""
        return self._sizes[(self._round_of(step) + step - self._first) % len(self._sizes)]

    def _round_of(self, step: int) -> int:
        return (step - self._first) // len(self._sizes)

    def _conclude(self) -> None:
        medians = {size: statistics.median(times.values()) for size, times in self._times.items() if times}
        faster = [size for size in medians if _is_faster(self._times[size], self._times[self._usual])]
        best = min(faster, key=medians.__getitem__, default=self._usual)
        self._sizes = []
        if faster:
            self._stepper.set_bucket_bytes(best)
        found = ", ".join(f"{_mb(size)} {ms:.1f} ms" for size, ms in medians.items())
        self._decide(
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
