"""One training step: what has been done of it, and the order of what is left.

Owns the progress between the first backward pass and the update, and with it the order of a step's
collectives, which is the same on all ranks. The Stepper, its only user, checks what a user gives.
"""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch.distributed as dist
from torch import Tensor

from launcher.engine.build import StepperOptions, StepperParts
from launcher.engine.errors import UnusableError, check_backward
from launcher.engine.grads.reference_count import ReferenceCount
from launcher.engine.optim.learning_rates import LearningRates
from launcher.engine.optim.update import StepScalars
from launcher.engine.precision.found_inf import StepTotals, Verdict, judge
from launcher.engine.result import StepNumbers
from launcher.engine.step_timer import COMMUNICATION, COMPUTE, UPDATE


class Step:
    """The present step of a Stepper with these parts; `restart` begins the next."""

    def __init__(self, options: StepperOptions, parts: StepperParts, group: dist.ProcessGroup | None) -> None:
        self._parts, self._policy, self._group = parts, options.policy, group
        device = parts.layout.device
        self.reference_count = ReferenceCount(options.reference_count, options.micro_batches, device, group)
        self.rates = LearningRates(options.learning_rates, None if parts.on_host else device)
        self._clip_norm = options.clip_norm
        self.restart()

    def restart(self, not_abandoned: Tensor | bool = True) -> None:
        """Begin the next step; `not_abandoned`: no rank has abandoned the one before."""
        self._parts.buffers.snapshot()  # before any forward pass, which updates BatchNorm statistics
        self.num_backwards = 0  # backward() calls of this step
        self._overlaps = False  # whether buckets are sent within them
        # Whether this rank can only abandon the step. Set before each part that may raise, and cleared after
        # it, so that it stays where the part did raise.
        self.must_abandon = False
        self._abandoned = False  # whether this rank does so in the step that is being finished
        self.totals_sent = False  # whether the totals have been sent: it can then not be abandoned
        self.reference_count.restart(not_abandoned)
        self._parts.reducer.restart()
        self._parts.totals.restart()

    def check_between_steps(self, call: str) -> None:
        """Raise UnusableError for a call that belongs between two steps."""
        if calls := self.num_backwards + self.must_abandon:
            raise UnusableError(
                f"{call} was called within a step, after {calls} backward() calls. Call it between steps: "
                "after step() or abandon(), before the next backward()."
            )

    def check_may_continue(self) -> None:
        """Raise unless the step may continue; once per step unless the parameters are still attached, too."""
        if self.totals_sent:
            raise RuntimeError(
                "a step() raised an error after this rank had agreed to it: the other ranks may have "
                "applied it. It can be neither repeated nor abandoned: end the process, and resume from a "
                "checkpoint."
            )
        if not (self.num_backwards or self.must_abandon):
            self._parts.attached_params.check()

    def during_backward(self) -> AbstractContextManager[object]:
        """The precision context of a backward pass."""
        return self._policy.backward(self._parts.layout.device, self._parts.emulation.used)

    def backward_seed(self) -> Tensor:
        """S / n0, fp32, 0-dim: where J = (S / n0) * sum of losses is differentiated, backward starts with it.

        Exact, as both are powers of two. Never the same tensor twice: a hook might write to it.
        """
        return self._parts.scale.over(self.reference_count.value)

    def backward(self, loss_sum: Tensor, count: float | Tensor) -> None:
        """Back-propagate one micro-batch whose loss and count can be trained on."""
        parts = self._parts
        check_backward(self.num_backwards, self.must_abandon, self.reference_count.micro_batches)
        if not self.num_backwards:
            self.reference_count.expect(count)  # may refuse the count, which changes nothing
            # In a step before the ranks have agreed on the reference count, finish() corrects what is sent.
            self._overlaps = self.reference_count.agreed is not None
        self.must_abandon = True  # until the pass has finished
        # A step may end with fewer passes than that: finish() then sends every bucket.
        last = self.num_backwards + 1 == self.reference_count.micro_batches
        with self.during_backward(), parts.reducer.receiving(early=last and self._overlaps):
            loss_sum.backward(self.backward_seed())  # type: ignore[no-untyped-call]
        parts.totals.add(loss_sum, count)
        self.must_abandon = False
        self.num_backwards += 1

    def finish(self) -> StepNumbers:
        """Reduce, agree, unscale, clip, update or skip.

        On a GPU the host waits for the device only to agree on the reference count, and in a TorchOptimizer.
        """
        squares, status = self._reduce_gradients()
        totals = self._reduce_totals(squares, status)
        verdict = self._judge(totals)
        state = self._parts.scale.state  # until `_end` that of this step
        lr = self.rates.at(state.applied_steps)
        numbers = StepNumbers.of(totals, verdict, state.scale, lr, self._parts.reducer.sent_bytes)
        self._update(verdict, lr)
        self._restore_buffers(verdict.skip)
        self._end(verdict)
        return numbers

    def _reduce_gradients(self) -> tuple[Tensor, Tensor | int]:
        """Send what was not sent in the backward pass; the sums of squares, and the status of this rank."""
        parts = self._parts
        self.check_may_continue()
        if not self.must_abandon:
            parts.buffers.collect()  # may raise, so it comes before anything is sent or written
        self._abandoned = self.must_abandon
        self.must_abandon = True  # cleared by `restart`
        # Before any bucket, and not in the backward pass: a rank may have no pass.
        correction = self.reference_count.agree()
        parts.clock.mark(COMPUTE)
        parts.reducer.start_grad_sync(self._abandoned, correction)
        return parts.reducer.finish_grad_sync(self._abandoned)

    def _reduce_totals(self, squares: Tensor, status: Tensor | int) -> StepTotals:
        message = self._parts.totals.message(squares, status)
        # From here on other ranks can apply the step without this one.
        self.totals_sent = True
        totals = self._parts.totals.reduce(message)
        self._parts.clock.mark(COMMUNICATION)
        return totals

    def _judge(self, totals: StepTotals) -> Verdict:
        """What all ranks do with the step, from the same bits."""
        parts = self._parts
        scale, p_n0 = parts.scale, float(parts.predivide_factor * self.reference_count.value)
        is_outlier = parts.outliers.is_outlier if parts.outliers else None
        return judge(parts.operations, totals, scale.state, scale.scaling, p_n0, self._clip_norm, is_outlier)

    def _update(self, verdict: Verdict, lr: Tensor | float) -> None:
        """Update masters and weights, or write nothing where the step is skipped."""
        parts = self._parts
        # First: the update would undo what was written to the weights since the last one.
        self.reload_model_params()
        parts.updater.step(StepScalars(verdict.multiplier, lr, verdict.state.applied_steps, verdict.skip))
        # After a skipped step as well: on a GPU the host does not know the verdict, and all ranks must call
        # it.
        parts.zero1.gather_weights()
        if verdict.skip is not True:  # a tensor where the device decides: counted as an update, as by torch
            parts.in_place.count_update()

    def _restore_buffers(self, skip: Tensor | bool) -> None:
        """Return to the buffers from before a skipped step."""
        if self._abandoned:
            self._parts.buffers.restore()  # a pass that failed may have replaced one
        else:
            self._parts.buffers.restore_if(skip)

    def _end(self, verdict: Verdict) -> None:
        """Move the loss scale, and begin the next step."""
        self._parts.scale.state = verdict.state
        if self._parts.outliers:
            self._parts.outliers.record(verdict.loss, verdict.grad_norm, verdict.skip, verdict.outlier)
        self._parts.clock.mark(UPDATE)
        self.restart(verdict.not_abandoned)

    def reload_model_params(self) -> None:
        """Copy weights that were written in place into their masters."""
        if changed := self._parts.in_place.changed():
            self._parts.in_place.reload_model_params(changed)
