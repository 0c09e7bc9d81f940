"""One training step: what has been done of it, and the order of what is left.

Owns the progress between the first backward pass and the update, and with it the order of a step's
collectives, which is the same on all ranks. The Stepper, its only user, checks what a user gives.
"""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch
import torch.distributed as dist
from torch import Tensor

from launcher.engine.assembly import StepperOptions, StepperParts
from launcher.engine.errors import NO_GRADIENT, UnusableError, refuse_backward
from launcher.engine.notices import SHARED_GROUP
from launcher.engine.optim.updater import StepScalars
from launcher.engine.step_timer import COMPUTE, UPDATE, WIRE
from launcher.engine.verdict import Numbers, Terms
from launcher.engine.wire.step_counts import Reference


class Step:
    """The present step of a Stepper with these parts; `restart` begins the next."""

    def __init__(self, choices: StepperOptions, parts: StepperParts, group: dist.ProcessGroup | None) -> None:
        self._parts, self._policy, self._group = parts, choices.policy, group
        self.reference = Reference(choices.reference_count, choices.micro_batches, parts.layout.device, group)
        self._clip_norm = choices.clip_norm
        rates = [float(rate) for rate in choices.learning_rates]  # or a report would have NumPy's numbers
        self.rates: Tensor | list[float] = rates
        if not parts.on_host:
            self.rates = torch.tensor(rates, dtype=torch.float64, device=parts.layout.device)
        self.read: torch.cuda.Event | None = None  # when a copy of weights and states is made
        self.restart()

    def restart(self, abandoned: Tensor | bool = False) -> None:
        """Begin the next step; `abandoned` says whether the one before was."""
        self._parts.buffers.snapshot()  # before any forward pass, which updates BatchNorm statistics
        self.done = 0  # backward() calls of this step
        self._sends_early = False  # whether buckets are sent within them
        self.failed = False  # whether one of them, or the step, raised: it can then only be abandoned
        self.exchanged = False  # whether all gradients have been sent: it can then not be abandoned
        self.reference.restart(abandoned)
        self._parts.tally.restart()

    def refuse_within(self, call: str) -> None:
        """Raise UnusableError for a call that belongs between two steps."""
        if calls := self.done + self.failed:
            raise UnusableError(
                f"{call} was called within a step, after {calls} backward() calls. Call it between steps: "
                "after step() or abandon(), before the next backward()."
            )

    def refuse_detached(self) -> None:
        """The full check once per step, at its first call: it costs about 0.3 us per parameter."""
        self._parts.attachment.refuse_other_weights()
        if self.exchanged:
            raise RuntimeError(
                "a step() raised an error after this rank had sent its gradients: the other ranks may have "
                "applied it. It can be neither repeated nor abandoned: end the process, and resume from a "
                "checkpoint."
            )
        if not (self.done or self.failed):
            self._parts.attachment.check()

    def during_backward(self) -> AbstractContextManager[object]:
        """The precision context of a backward pass."""
        return self._policy.backward(self._parts.layout.device, self._parts.emulation.used)

    def slope(self) -> Tensor:
        """S / n0, fp32, 0-dim: where J = (S / n0) * sum of losses is differentiated, backward starts with it.

        Exact, as both are powers of two. Never the same tensor twice: a hook might write to it.
        """
        return self._parts.scale.over(self.reference.divisor)

    def backward(self, loss_sum: Tensor, count: float | Tensor) -> None:
        """Back-propagate one micro-batch whose loss and count can be trained on."""
        parts = self._parts
        refuse_backward(self.done, self.failed, self.reference.micro_batches)
        self.failed = True  # until the pass has finished
        if not self.done:
            self._begin(count)
        # Before the pass: the tally is sent ahead of the first bucket, which may go within it.
        parts.tally.add(loss_sum, count)
        # A step may end with fewer passes than that: finish() then sends every bucket.
        last = self.done + 1 == self.reference.micro_batches
        with self.during_backward(), parts.reducer.receiving(early=last and self._sends_early):
            loss_sum.backward(self.slope())  # type: ignore[no-untyped-call]
            # Within the context, whose end drains p.grad.
            if not parts.reducer.has_received:
                self.failed = False
                parts.tally.take_back()
                raise UnusableError(NO_GRADIENT)
        self.failed = False
        self.done += 1

    def _begin(self, count: float | Tensor) -> None:
        """Prepare the first pass of a step: n0, and whether buckets are sent within the passes.

        Not over a group that Steppers share: ranks may make the passes of the networks in another order, or
        not at all, and messages of two networks would meet. All ranks call the step()s in one order.
        """
        reducer = self._parts.reducer
        self.reference.expect(count)
        shared = reducer.shares_group()
        if shared and reducer.overlap:
            self._parts.notices.warn(SHARED_GROUP, stacklevel=4)
        # In a step before the ranks have agreed on n0, finish() corrects what is sent.
        self._sends_early = self.reference.count is not None and not shared

    def finish(self) -> tuple[Tensor | Numbers, int]:
        """Reduce, agree, unscale, clip, update or skip. On a GPU the host waits for nothing.

        Returns the step's numbers, as StepResult takes them, and the bytes that this rank sent.
        """
        parts = self._parts
        self.refuse_detached()
        if not self.failed:
            parts.buffers.collect()  # may raise, so it comes before anything is sent or written
        failed, self.failed = self.failed, True  # until the step has finished
        # Before any bucket, and not in the backward pass: a rank may have no pass.
        correction = self.reference.agree()
        parts.clock.mark(COMPUTE)
        parts.reducer.flush(failed, correction)
        # From here on other ranks can apply the step without this one.
        self.exchanged = True
        sums, marks, sent_bytes = parts.reducer.finish()
        # After finish(): with a sharded optimizer its collective of the norms brings the tally, too.
        tally = parts.tally.totals()
        parts.in_place.take()
        parts.clock.mark(WIRE)

        unit = float(parts.divisor * self.reference.divisor)
        terms = Terms(unit, self._clip_norm, parts.scale.scaling)
        verdict = parts.judge(terms, sums, marks, tally, parts.scale.present, self.rates)
        self._wait_for_readers()
        parts.updater.step(StepScalars(verdict.multiplier, verdict.lr, verdict.number, verdict.skip))
        # After a skipped step as well: on a GPU the host does not know the verdict, and all ranks must call
        # it.
        parts.shards.gather_weights()
        if verdict.skip is not True:  # a tensor where the device decides: counted as an update, as by torch
            parts.in_place.count_update()
        if failed:
            parts.buffers.restore()
        else:
            parts.buffers.restore_if(verdict.skip)
        parts.scale.become(verdict.state)
        # Only where this rank had samples; its weights move in any case.
        if self.done:
            parts.replica.count_update(verdict.skip)
        parts.clock.mark(UPDATE)
        self.restart(verdict.abandoned)
        return verdict.packed, sent_bytes

    def _wait_for_readers(self) -> None:
        # A checkpoint may still be copying the weights and states that the update overwrites.
        read, self.read = self.read, None
        if read is not None:
            torch.cuda.current_stream(self._parts.layout.device).wait_event(read)
