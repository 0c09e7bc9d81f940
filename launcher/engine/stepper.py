"""One training step, from a loss to updated weights: the engine's front.

Owns the order of events within a step: scale, backward, reduce, agree, unscale, clip, update or skip. It
knows no files, no config and no recipes. Every rank calls backward() as often as it has micro-batches (not
at all is allowed) and then step() or abandon(); all ranks come out of it with the same verdict and the same
weights.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import launcher.engine.limits as limits
from launcher.engine.arguments import group_of, rates_of, refuse_attribute, refuse_kinds, refuse_lazy
from launcher.engine.attachment import Attachment
from launcher.engine.diagnostics.mean_loss import WARNING, is_mean
from launcher.engine.diagnostics.step_timer import COMPUTE, UPDATE, WIRE, StepClock
from launcher.engine.errors import (
    NO_BACKWARD,
    NO_COUNT,
    NO_GRADIENT,
    NO_REFERENCE,
    UnusableError,
    refuse_backward,
    refuse_loss,
    refuse_optimizer,
    refuse_within_step,
)
from launcher.engine.flat.broadcast import refuse_different_models, take_values_of_rank_0
from launcher.engine.flat.buffers import Buffers
from launcher.engine.flat.layout import Layout
from launcher.engine.in_place import InPlaceChanges
from launcher.engine.notices import Notices
from launcher.engine.optim.compilation import Compilation, choose_compilation
from launcher.engine.optim.fused import Optimizer, Scalars
from launcher.engine.optim.torch_optimizer import TorchOptimizer, refuse_unadaptable, updater_of
from launcher.engine.precision.calibration import dry_pass, safe_exponent
from launcher.engine.precision.loss_scale import LossScale, ScaleStart, Scaling
from launcher.engine.precision.policy import Emulation, Policy, choose_emulation
from launcher.engine.replica import Replica, size_bytes
from launcher.engine.state import EngineState, counters_of
from launcher.engine.step_result import StepResult
from launcher.engine.verdict import Terms, judge_on, next_rate
from launcher.engine.wire.reducer import Reducer
from launcher.engine.wire.shards import Shards
from launcher.engine.wire.step_counts import Tally, agree_on_reference
from launcher.engine.wire.transports import Wire, choose_transports


class Stepper:
    """Trains `model` with `optimizer` under a precision policy, on one or many ranks.

    `group` None means the default process group, or one process where none is initialised. To train alone
    beside other ranks pass a group of one: `new_group([get_rank()], use_local_synchronization=True)`. The
    attribute `group` is the group in use, None for one process.

    `micro_batches` is the largest number of backward() calls before each step(); the last of them overlaps
    with the wire. `reference_count` is n0 of the loss boundary: the usual number of samples (or tokens) per
    step and rank; None takes it from the counts of the first step, which costs that step one collective.
    `learning_rates` gives one rate per applied step, the last one for ever after; None means `optimizer.lr`
    throughout. `compiled` makes one kernel of the update with torch.compile, on all ranks or on none; where
    that does not work, `compilation.reason` says why.

    Building a Stepper moves the model's parameters and buffers into flat memory and takes rank 0's values
    on all ranks: load weights before it, or afterwards with `load`. Raises UnusableError for what cannot be
    trained, and where ranks hold different parameters.

    Cast, move, freeze, thaw and replace parameters before building it: backward(), step(), state() and
    load() raise UnusableError where they are no longer those that it was built on. requires_grad may be
    False in between, as for another network's pass through this one.

    A trainable parameter that received no gradient on any rank has a zero one: decay and momentum act on it,
    as in DDP's, Megatron's and DeepSpeed's flat buffers, and unlike a torch optimizer that finds p.grad None.
    Parameters that were frozen before building are left alone.

    Weights may be changed in place between steps, on all ranks alike: `p.clamp_()` or `p.copy_()` under
    torch.no_grad(), model.load_state_dict(), Embedding(max_norm=...), which is made alike on all ranks.
    What differs from a master rounded is taken into it, also in a step that is skipped. A change through
    `p.data` cannot be seen: the next update undoes it, and state() raises UnusableError. With max_norm and
    a group also named_masters(), state() and replicas() are collectives.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | TorchOptimizer,
        policy: Policy | None = None,
        group: dist.ProcessGroup | None = None,
        *,
        scaling: Scaling | None = None,
        wire: Wire | None = None,
        clip_norm: float | None = None,
        learning_rates: Sequence[float] | None = None,
        micro_batches: int = 1,
        reference_count: int | None = None,
        emulate: bool | None = None,
        compiled: bool = False,
    ) -> None:
        before = set(vars(self))  # what a subclass has set already
        refuse_optimizer(optimizer)
        refuse_kinds(model, policy, scaling, wire, emulate, compiled)
        group = group_of(group)
        refuse_lazy(model)
        wire = wire or Wire()
        self.model = model
        self.policy = policy or Policy.fp16()
        self.group = group
        world_size = dist.get_world_size(group) if group else 1
        rates = rates_of(learning_rates, optimizer.lr)
        limits.refuse_settings(clip_norm, rates, micro_batches, reference_count)
        # First: what comes next then raises on all ranks or on none.
        refuse_different_models(model, reference_count, group)
        refuse_unadaptable(optimizer, model, self.policy, wire.shard and world_size > 1)
        self.layout = Layout(model, self.policy, wire.dtype, world_size, wire.bucket_bytes)
        self.buffers = Buffers(model, group)
        take_values_of_rank_0(self.layout, model, self.buffers, group)
        self._device = self.layout.device
        self.emulation: Emulation = choose_emulation(self.policy, self._device, emulate)
        self.compilation: Compilation = choose_compilation(compiled, optimizer, self.layout, group)
        transports, self._divisor = choose_transports(wire, self.layout, group)
        self._tally = Tally(self._device, group)
        self.reducer = Reducer(
            self.layout,
            group,
            transports,
            micro_batches,
            wire.overlap,
            self.compilation.used,
            self._tally.send,
        )
        self._attachment = Attachment(model, self.layout, self.reducer)
        self.shards = Shards(self.layout, transports, group)
        self.updater = updater_of(optimizer, self.layout, self.shards.pieces, self.compilation.used)
        self._in_place = InPlaceChanges(model, self.layout, self.shards, group)
        self.scale = LossScale(scaling or Scaling.of(self.policy), self._device)
        self._clip_norm = clip_norm
        self._judge = judge_on(self._device, self.compilation.used)
        self._rates = torch.tensor(rates, dtype=torch.float64, device=self._device)
        self._micro_batches = micro_batches
        self._reference = reference_count
        self._names = [slot.name for slot in self.layout.slots]
        self.clock = StepClock(self._device)
        self._notices = Notices({slot.name for slot in self.layout.slots if slot.numel})
        self._read: torch.cuda.Event | None = None  # when a copy of weights and states is made
        self._replica = Replica(model, self.layout, self.buffers, self.shards, self.updater, self.scale)
        self._failed: bool  # whether a backward() of this step raised: then only abandoning it is left
        self._start_of_step()
        self._parts = frozenset(vars(self).keys() - before)
        self._built = True

    def __setattr__(self, name: str, value: object) -> None:
        """Only `lr` can be set: a misspelt name, or a part that others hold too, would change nothing.

        A subclass may set attributes of its own.
        """
        own = name.startswith("_") and hasattr(self, name)
        if getattr(self, "_built", False) and not own and name != "lr":
            refuse_attribute(self, Stepper, self._parts, name)
        super().__setattr__(name, value)

    @property
    def lr(self) -> float:
        """The learning rate of the next applied step. Waits for the device.

        Setting it fixes the rate from the next applied step on, in place of `learning_rates`, for a schedule
        in the training loop: `stepper.lr = scheduler.get_last_lr()[0]`. That waits for nothing, and a step
        captured in a CUDA graph follows it. It is not part of state_dict(): set it again after
        load_state_dict(), as the schedule does.
        """
        return float(next_rate(self._rates, self.scale.applied))

    @lr.setter
    def lr(self, rate: float) -> None:
        limits.not_negative.require("lr", rate)
        self._rates.fill_(rate)

    def forward(self) -> AbstractContextManager[object]:
        """The precision context for a forward pass."""
        return self.policy.forward(self._device, self.emulation.used)

    def calibrate(self, loss: Callable[[], Tensor | tuple[Tensor, int | Tensor]] | None) -> int | None:
        """Start the loss scale where one dry backward says that it fits, before the first step.

        `loss` runs the forward pass on this rank's first micro-batch (without `forward()`) and returns the
        fp32 sum of its losses, with their count where no `reference_count` was given: n0 then comes from this
        pass. None on a rank without a micro-batch. Returns the exponent of the new scale, None if there was
        nothing to see or there is no loss scale. A collective. Waits for the device.
        """
        self._refuse_within_step("calibrate()")
        if self.scale.scaling.mode == "none":
            return None
        growth = max(1.0, self.layout.world_size / self._divisor) * self._micro_batches
        with self.reducer.grad_put_aside():
            dry = dry_pass(self.model, loss, self.reducer.gradients_aside, growth, self.group)
        self.buffers.restore()
        if self._reference is None:
            if dry.count is None:
                raise UnusableError(NO_COUNT)
            self._reference = self._agree_on_reference(dry.count) or None
        if dry.octave is None or self._reference is None:
            return None
        return self.scale.start_at(safe_exponent(dry.octave, self._reference))

    def vote(self, question: int) -> None:
        """Vote for something of the caller's in the coming step, before its first backward().

        It travels with the counts, so it costs no collective: `StepReport.votes[question]` is the number of
        ranks in favour, the same on all ranks. `question` is 0 to 3.
        """
        limits.question.require("vote question", question)
        self._refuse_within_step("vote()")
        self._tally.vote(question)

    def backward(self, loss_sum: Tensor, count: int | Tensor) -> None:
        """Back-propagate one micro-batch.

        `loss_sum`: fp32 scalar, the sum of the losses of `count` samples (or tokens). The step divides by
        the count of all micro-batches of all ranks, so micro-batches and ranks may differ in size.

        Any other backward pass is torch's: its gradients stay in `p.grad`, which no step reads or changes.

        Raises UnusableError for a loss or a count that cannot be trained on: that leaves no trace, and
        another backward() may follow. After any other error, of the model's or for want of memory, what this
        rank holds of the step is incomplete: only abandon() or step() may follow, and both abandon the step.
        """
        self._refuse_detached()
        refuse_loss(loss_sum, count)
        if is_mean(loss_sum, count):
            self._notices.warn(WARNING, stacklevel=2)
        refuse_backward(self._done, self._failed, self._micro_batches)
        if self._reference is None:
            self._reference, self._settles_reference = self._agree_on_reference(count), True
        self._tally.add(loss_sum, count)
        self._failed = True  # until the pass is through
        with self._during_backward(), self.reducer.receiving(self._done + 1 == self._micro_batches):
            self._objective(loss_sum).backward()  # type: ignore[no-untyped-call]
            if not self.reducer.has_received:
                self._failed = False
                self._tally.take_back()
                raise UnusableError(NO_GRADIENT)
        self._failed = False
        self._done += 1

    def dry_backward(self, loss_sum: Tensor) -> dict[str, Tensor]:
        """The gradients of one micro-batch at the loss scale of now, by name, as autograd gives them.

        It takes no part in a step and leaves no trace. Raises UnusableError before the first step, unless
        there is a `reference_count` or calibrate() was called.
        """
        if self._reference is None:
            raise UnusableError(NO_REFERENCE)
        with self._during_backward():
            return self.reducer.gradients_aside(self._objective(loss_sum))

    def step(self) -> StepResult:
        """Reduce, agree, unscale, clip, update or skip. A collective: every rank calls it once per step.

        Raises UnusableError where it follows no backward(loss_sum, count) and p.grad holds gradients, of
        `loss.backward()` for instance; on several ranks, of which some may have no samples, it warns of that
        once. After a backward() that raised it does what `abandon` does.
        """
        if not self._failed:
            self._refuse_missed_backward()
        packed, wire_bytes = self.step_on_device()
        world_size = self.layout.world_size
        return StepResult.capture(
            packed, self._names, world_size, wire_bytes, self.clock.take(), self._notices
        )

    def abandon(self) -> StepResult:
        """Instead of step(): drop this step on all ranks, as if its backward() calls had never been.

        Gradients, counts and votes are dropped, buffers (BatchNorm statistics) are restored; weights,
        optimizer, loss scale, counters and learning rate stay. The same collectives as step(): other ranks
        may call either, and theirs is dropped too. `StepReport.abandoned_ranks` says who abandoned it.

        Where a module has collectives of its own (SyncBatchNorm), a pass that fails on one rank only leaves
        the others waiting there: end the job then.
        """
        self._failed = True
        return self.step()

    def step_on_device(self) -> tuple[Tensor, int]:
        """`step()` without the report to the host: what a CUDA graph can capture.

        The step's numbers, packed for StepResult, and the bytes that this rank handed to the wire.
        """
        self._refuse_detached()
        if not self._failed:
            self.buffers.collect()  # may refuse: before anything is sent or written
        if self._reference is None:
            self._reference, self._settles_reference = self._agree_on_reference(0), True
        terms = Terms(float(self._divisor * max(1, self._reference)), self._clip_norm, self.scale.scaling)
        self.clock.mark(COMPUTE)
        self.reducer.flush(abandoned=self._failed)
        reduced = self.reducer.finish()
        tally = self._tally.totals()
        self._in_place.take()
        self.clock.mark(WIRE)

        verdict = self._judge(terms, reduced.sums, reduced.marks, tally, self.scale.state, self._rates)
        self._wait_for_readers()
        self.updater.step(Scalars(verdict.multiplier, verdict.lr, verdict.number, verdict.skip))
        self.shards.gather_weights()
        if self._failed:
            self.buffers.restore()
        else:
            self.buffers.restore_if(verdict.skip)
        self.scale.state.copy_(verdict.state)
        if self._done:
            self._replica.count_update(verdict.skip)
        self.clock.mark(UPDATE)
        # Agreeing on the reference has waited for the device too.
        if self._settles_reference and bool(verdict.abandoned):
            self._reference = None
        self._start_of_step()
        return verdict.packed, reduced.bytes

    def hold_update(self, read: torch.cuda.Event) -> None:
        """Let the next update wait, on the device, until `read`: weights and states are being copied.

        Not for steps that are captured in a graph.
        """
        self._read = read

    def named_masters(self) -> dict[str, Tensor]:
        """fp32 values of the trainable parameters by name. A collective where the masters are sharded."""
        self._attachment.refuse_taken_over()
        self._in_place.take()
        return self._replica.masters()

    def state(self) -> EngineState:
        """Everything needed to resume bit for bit, by name. Views where possible: clone() what must last.

        Between steps only. A collective where the optimizer is sharded. Waits for the device.
        """
        self._refuse_within_step("state()")
        self._attachment.check()
        self._in_place.take()
        self._in_place.refuse_unseen()
        return self._replica.state(self._reference)

    def load(self, state: EngineState) -> ScaleStart:
        """Continue from `state`, which may come from another number of ranks or another wire.

        The result says whether the loss scale is that of the state: only a dynamic one is, where this run's
        mode and limits allow it. Applied and skipped steps are taken in any case. Raises ValueError, before
        anything is changed, for the state of another model or optimizer. Between steps only. A collective
        where the optimizer is sharded.
        """
        self._refuse_within_step("load()")
        self._attachment.check()
        start = self._replica.load(state)
        self._in_place.forget()
        self._reference = self._reference or state.reference_count
        return start

    def state_dict(self) -> dict[str, Any]:
        """`state()` as plain dicts, ints and strings, which torch.load(weights_only=True) reads again.

        References, as torch's own: save or copy them before the next step. For safetensors:
        `save_file(stepper.state().tensors(), path)`. A collective where `state()` is one.
        """
        return self.state().as_dict()

    def load_state_dict(self, values: Mapping[str, Any]) -> ScaleStart:
        """Continue from what `state_dict()` gave; from safetensors: `load(EngineState.from_tensors(...))`.

        As `load()`; raises UnusableError for another mapping, a model's own state_dict for instance.
        """
        return self.load(EngineState.from_dict(values))

    def replicas(self) -> dict[str, Tensor]:
        """Flat tensors that must hold the same bits on all ranks, by a name for people.

        Where the optimizer is sharded its masters and states have one owner each and are not among them.
        """
        self._in_place.take()
        return self._replica.comparable(self._reference)

    @property
    def device(self) -> torch.device:
        """Where the model, its masters and its gradients are."""
        return self._device

    @property
    def num_trainable(self) -> int:
        """Elements of all trainable parameters; tied ones count once."""
        return sum(segment.numel for segment in self.layout.segments)

    @property
    def loss_scale(self) -> float:
        """The loss scale of the next step; 1 where there is none. Waits for the device."""
        return float(self.scale.value())

    def counters(self) -> dict[str, int]:
        """Counters of the loss scale by name: steps applied and skipped among them. Waits for the device."""
        return counters_of(self.scale)

    def average_buffers(self) -> None:
        """Replace floating-point buffers (BatchNorm statistics) by their mean over the ranks.

        A collective, for an evaluation. A checkpoint keeps each rank's own.
        """
        self.buffers.average()

    def reduced_gradients(self) -> dict[str, Tensor]:
        """The reduced gradients by parameter name, still times the loss scale, in the dtype of the wire.

        Views, valid from step() to the next backward(). With `Wire(shard=True)` use `own_gradients`.
        """
        return self.layout.gradients()

    def own_gradients(self) -> dict[str, Tensor]:
        """As `reduced_gradients`, but only the elements that this rank updates: flat."""
        return self.reducer.own_gradients()

    @property
    def has_trained(self) -> bool:
        """Whether samples of this rank have gone into an update since the start. Waits for the device."""
        return self._replica.has_trained

    def changed_buffers(self) -> dict[str, bool]:
        """By name, whether a buffer has other bits than at the start, or after `load`."""
        return self._replica.changed_buffers()

    def state_bytes(self) -> int:
        """Bytes of persistent training state: weights, masters, wire gradients, optimizer states, buffers."""
        return size_bytes([*self._replica.tensors(), *self.reducer.tensors()])

    def _start_of_step(self) -> None:
        self.buffers.snapshot()  # before any forward pass: that is where BatchNorm statistics move
        self._done = 0  # backward() calls of this step
        self._failed = False
        self._settles_reference = False  # whether n0 was agreed on in this step
        self._reference = self._reference or None  # 0: that step was empty
        self._tally.restart()

    def _refuse_detached(self) -> None:
        """The whole look once per step, at its first call: it costs about 0.3 us per parameter."""
        self._attachment.refuse_taken_over()
        if not (self._done or self._failed):
            self._attachment.check()

    def _refuse_within_step(self, call: str) -> None:
        refuse_within_step(call, self._done + self._failed)

    def _objective(self, loss_sum: Tensor) -> Tensor:
        """J = (S / n0) * sum of losses, in fp32."""
        assert self._reference is not None
        return loss_sum * (self.scale.value() / max(1, self._reference))  # both powers of two: exact

    def _wait_for_readers(self) -> None:
        read, self._read = self._read, None
        if read is not None:
            torch.cuda.current_stream(self._device).wait_event(read)

    def _during_backward(self) -> AbstractContextManager[object]:
        return self.policy.backward(self.emulation.used)

    def _refuse_missed_backward(self) -> None:
        """Gradients in p.grad and none of this step's: `loss.backward()` was called in place of ours."""
        if self._done or all(p.grad is None for p in self.layout.parameters.values()):
            return
        if self.layout.world_size == 1:
            raise UnusableError(NO_BACKWARD)
        self._notices.warn(NO_BACKWARD, stacklevel=3)

    def _agree_on_reference(self, count: int | Tensor) -> int:
        """Each rank's first micro-batch stands for all of them."""
        return agree_on_reference(count * self._micro_batches, self._device, self.group)
