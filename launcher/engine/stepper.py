"""The engine's public class: a training step from a loss to updated weights, on one or many ranks.

Owns the interface: each method checks that it is called at the right moment, and leaves the work to `step` or
to one of the parts. Knows nothing of files, configs and recipes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import launcher.engine.limits as limits
from launcher.engine.build import StepperOptions, StepperParts
from launcher.engine.checks.arguments import check_model, check_optimizer, group_of
from launcher.engine.checks.mean_loss import WARNING, is_mean
from launcher.engine.checks.ported_loop import note_calls_outside
from launcher.engine.checks.same_on_all_ranks import check_same_on_all_ranks
from launcher.engine.checks.step_warnings import warn_if_alone
from launcher.engine.errors import UnusableError, check_loss
from launcher.engine.grads.collectives import DDPOptions
from launcher.engine.grads.copy_in import dry_backward
from launcher.engine.optim.torch_optimizer import AnyOptimizer
from launcher.engine.params.param_groups import ParameterGroup
from launcher.engine.precision.fp32_modules import compute_in_fp32, names_in_fp32
from launcher.engine.precision.loss_scale import ScaleStart, Scaling
from launcher.engine.precision.outliers import SkipOutliers
from launcher.engine.precision.policy import Policy
from launcher.engine.rank_state import size_bytes
from launcher.engine.result import StepResult
from launcher.engine.state import EngineState
from launcher.engine.step import Step


class Stepper:
    """Trains `model` with `optimizer` under a precision policy, on one or many ranks.

    Every rank calls backward() once per micro-batch (possibly never), then step() or abandon(); all ranks
    reach the same verdict and the same weights. All build the same model with the same arguments, of which
    only `micro_batches` and `emulate` may differ. Raises UnusableError otherwise, and for a model that cannot
    be trained.

    `group` None: the default process group, or one process where none is initialised. To train alone while
    other ranks exist, pass a group of one: `new_group([get_rank()], use_local_synchronization=True)`.
    `clip_norm`: the largest norm of the mean gradient of all ranks, as of torch's clip_grad_norm_, which
    itself clips nothing between backward() and step(), because p.grad is None there.
    `learning_rates`: one per applied step, the last one after that; None: `optimizer.lr` throughout.
    `micro_batches`: the largest number of backward() calls before each step(); the last one overlaps
    communication. `reference_count` (n0): the usual number of samples (or tokens) per step and rank; None:
    from the counts of the first step, which costs that step one collective. `groups`: see ParameterGroup.
    `skip_outliers`: see SkipOutliers; None: no finite step is skipped.

    Building it moves parameters and buffers into flat memory and broadcasts rank 0's values: load weights
    before, or with `load`. Cast, move, freeze and replace parameters before, too: what is cast, moved or
    frozen later raises UnusableError, and a layer that is put in another's place is not trained. Weights may
    be written in place between steps, alike on all ranks (`p.clamp_()` under torch.no_grad(),
    model.load_state_dict()): what differs from the rounded masters is copied into them, in the precision of
    the weights. A write through `p.data` or `buffer.data` cannot be detected: the next update undoes the
    former. After buffers were written between steps (reset_running_stats(), update_bn()) call
    average_buffers(), or the next skipped step undoes it; model.load_state_dict() needs no call.

    Hooks on parameters get the gradient of one micro-batch of one rank, multiplied by the loss scale: a mask
    or a factor works there, a limit such as clamp(-1, 1) does not. As with torch.optim, autograd raises for a
    graph that was recorded before an update, unless the graph has casted copies of the weights (autocast over
    fp32 weights, emulated arithmetic): it then gives the gradients at the weights from before.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: AnyOptimizer,
        policy: Policy | None = None,
        group: dist.ProcessGroup | None = None,
        *,
        scaling: Scaling | None = None,
        ddp: DDPOptions | None = None,
        clip_norm: float | None = None,
        learning_rates: Sequence[float] | None = None,
        micro_batches: int = 1,
        reference_count: int | None = None,
        emulate: bool | None = None,
        groups: Sequence[ParameterGroup] = (),
        skip_outliers: SkipOutliers | None = None,
    ) -> None:
        self.group = group_of(group)
        check_optimizer(optimizer)
        check_model(model, self.group)
        policy = policy or Policy.fp16()
        options = StepperOptions(
            policy=policy,
            ddp=ddp or DDPOptions(),
            scaling=scaling or Scaling.of(policy),
            clip_norm=clip_norm,
            optimizer=optimizer,
            learning_rates=[optimizer.lr] if learning_rates is None else list(learning_rates),
            groups=groups,
            reference_count=reference_count,
            micro_batches=micro_batches,
            emulate=emulate,
            skip_outliers=skip_outliers,
        )
        if self.group is None:
            warn_if_alone()
        # Before anything is built: what comes next then raises on all ranks or on none.
        check_same_on_all_ranks(model, options.shared(), self.group)
        self.model, self.policy, self.clip_norm = model, policy, clip_norm
        self._parts = parts = StepperParts(model, options, self.group)
        # For EMA, the launcher and tests; a training loop uses the methods only.
        self.layout, self.buffers, self.clock = parts.layout, parts.buffers, parts.clock
        self.reducer, self.zero1, self.updater = parts.reducer, parts.zero1, parts.updater
        self.scale, self.emulation = parts.scale, parts.emulation
        self._step = Step(options, parts, self.group)
        note_calls_outside(model)

    @property
    def lr(self) -> float:
        """The learning rate of the next applied step. Waits for the device.

        Setting it replaces `learning_rates` from the next applied step on, for a schedule in the training
        loop; `lr_optimizer` is for schedulers of torch. Setting does not wait for the device. The rate is
        not part of state_dict(): set it again after load_state_dict().
        """
        return self._step.rates.next(self.scale.state.applied_steps)

    @lr.setter
    def lr(self, rate: float) -> None:
        self._step.rates.replace(rate)

    @property
    def lr_optimizer(self) -> torch.optim.Optimizer:
        """What a scheduler of torch takes as optimizer; its rate is that of the next step from now on.

        `scheduler = CosineAnnealingLR(stepper.lr_optimizer, T_max=100)`, and scheduler.step() after each
        step(). A skipped step counts for the scheduler, unless the loop leaves its step() out.
        """
        return self._step.rates.optimizer(self.scale.state.applied_steps)

    def forward(self) -> AbstractContextManager[object]:
        """The precision context for a forward pass."""
        return self.policy.forward(self.device, self.emulation.used)

    def compute_in_fp32(self, modules: Sequence[str]) -> list[str]:
        """Compute in fp32 in the modules whose names match a pattern of `fnmatch`, from the next forward().

        For modules whose outputs leave the range of fp16, which no loss scale prevents; see `fp32_modules`.
        Returns the names of those that were added. Call it on all ranks alike, between steps. Not for models
        under torch.compile. Raises UnusableError for a pattern that matches no module.
        """
        self._step.check_between_steps("compute_in_fp32()")
        return compute_in_fp32(self.model, modules)

    @property
    def fp32_modules(self) -> tuple[str, ...]:
        """Names of the modules that compute in fp32 whatever the policy."""
        return tuple(names_in_fp32(self.model))

    def set_micro_batches(self, micro_batches: int) -> None:
        """Allow up to `micro_batches` backward() calls before each step(), from the next step on.

        Several are summed in fp32, which takes 4 bytes per parameter; changes nothing else. Ranks may have
        different numbers. Between steps.
        """
        self._step.check_between_steps("set_micro_batches()")
        limits.at_least_one.require("micro_batches", micro_batches)
        self.reducer.accumulate(micro_batches > 1)
        self._step.reference_count.micro_batches = micro_batches

    @property
    def num_buckets(self) -> int:
        """The number of messages in which the gradients of a step are sent."""
        return len(self.reducer.buckets)

    def vote(self, question: int, votes: float = 1.0) -> None:
        """Set this rank's `votes` for one of the caller's questions, 0 to 9, at any time before step().

        They are sent with the totals of the step, at no extra collective: `StepReport.votes[question]` is
        their sum over the ranks. A number of any kind may be sent so, such as a count or a time.
        """
        limits.question.require("vote question", question)
        self._parts.totals.vote(question, votes)

    def backward(self, loss_sum: Tensor, count: float | Tensor) -> None:
        """Back-propagate one micro-batch.

        `loss_sum`: fp32 scalar, the sum of the losses of `count` samples (or tokens). The step divides by the
        count of all micro-batches of all ranks. A plain loss.backward() is not part of a step: its gradients
        stay in `p.grad`.

        Raises UnusableError for a loss or a count that cannot be trained on: the step is unchanged, and
        another backward() may follow. After any other error, from the model or out of memory, only abandon()
        or step() may follow, and both abandon the step.
        """
        self._step.check_may_continue()
        check_loss(loss_sum, count)
        self._parts.ported_loop.check_backward(loss_sum)
        if is_mean(loss_sum, count):
            self._parts.warnings.warn(WARNING)
        self._step.backward(loss_sum, count)

    def dry_backward(self, loss_sum: Tensor) -> dict[str, Tensor]:
        """The gradients of one micro-batch at the present loss scale, by name, as autograd computes them.

        Not part of a step, and changes no state. Raises UnusableError before the first step, unless there is
        a `reference_count`.
        """
        if self._step.reference_count.agreed is None:
            raise UnusableError(
                "dry_backward() was called before the reference count is known. Build the Stepper with "
                "reference_count, the usual number of samples per rank and step, or call it after the first "
                "step() that had samples."
            )
        with self._step.during_backward():
            return dry_backward(self.layout.parameters, loss_sum, self._step.backward_seed())

    def step(self) -> StepResult:
        """Reduce, agree, unscale, clip, update or skip. A collective: every rank calls it once per step.

        Raises UnusableError if no backward(loss_sum, count) came before it and p.grad holds gradients, as
        after `loss.backward()`. On several ranks, some of which may have no samples, it warns once instead.
        After a backward() that raised, it does what `abandon` does.
        """
        parts, step = self._parts, self._step
        has_backward = step.num_backwards > 0 or step.must_abandon
        parts.ported_loop.check_step(has_backward)
        return self._finish()

    def _finish(self) -> StepResult:
        self._step.rates.follow_scheduler()
        return StepResult(self._step.finish(), self._parts.names, self.clock.take(), self._parts.warnings)

    def abandon(self) -> StepResult:
        """Drop this step on all ranks, as if backward() had not been called; in place of step().

        Gradients, counts and votes are dropped and buffers restored; nothing else changes. The same
        collectives as step(), which other ranks may call; `StepReport.abandoned_ranks` says who abandoned it.
        Possible while `can_abandon`, also after a step() that raised. After that the other ranks may have
        applied the step, and this Stepper raises RuntimeError.

        Where a module runs collectives (SyncBatchNorm), a pass that fails on only one rank leaves the others
        waiting in them: end the job in that case.
        """
        self._parts.attached_params.check()
        self._step.must_abandon = True
        return self._finish()

    @property
    def can_abandon(self) -> bool:
        """Whether the step can still be dropped on all ranks: until this rank has sent its totals."""
        return not self._step.totals_sent

    def own_masters(self) -> list[Tensor]:
        """The flat fp32 masters that this rank updates, with what was written to the weights since then."""
        self._step.reload_model_params()
        return self.zero1.masters()

    def named_masters(self, rank: int | None = None) -> dict[str, Tensor]:
        """fp32 values of the trainable parameters by name. A collective where the masters are sharded.

        Those are gathered in host memory, on all ranks or only on `rank` of the group, as in `state`.
        """
        self._parts.attached_params.check()
        self._step.reload_model_params()
        return self._parts.rank_state.masters(rank)

    def state(self, rank: int | None = None) -> EngineState:
        """Everything needed to resume bit for bit, by name. Views where possible: clone() to keep it.

        Between steps only. Waits for the device. A collective where the optimizer is sharded, which gathers
        masters and states in host memory, a bucket at a time: on all ranks, or only on `rank` of the group;
        the others' state then lacks the sharded parameters.
        """
        self._step.check_between_steps("state()")
        self._parts.attached_params.check()
        self._step.reload_model_params()
        return self._parts.rank_state.state(self._step.reference_count.agreed, rank)

    def load(self, state: EngineState) -> ScaleStart:
        """Resume from `state`, also of another number of ranks or with other DDPOptions.

        The result says whether the loss scale was restored: only a dynamic one is, if this run's mode and
        limits allow it. Raises ValueError, before anything is changed, for the state of another model or
        optimizer. Between steps only. A collective where the optimizer is sharded, or another rank sends
        the state.
        """
        self._step.check_between_steps("load()")
        self._parts.attached_params.check()
        start = self._parts.rank_state.load(state)
        # A graph over the old weights must raise in its backward pass, as after an update.
        self._parts.in_place.count_update()
        # Masters and weights were set together: there is no change to copy from one to the other.
        self._parts.in_place.forget()
        # One that was given, or agreed on since, stays: what was scaled with it remains comparable.
        self._step.reference_count.agreed = self._step.reference_count.agreed or state.reference_count
        return start

    def state_dict(self, rank: int | None = None) -> dict[str, Any]:
        """`state()` as plain dicts, ints and strings, which torch.load(weights_only=True) can read.

        References, like torch's state dicts: save or copy them before the next step.
        """
        return dict(vars(self.state(rank)))

    def load_state_dict(self, values: Mapping[str, Any]) -> ScaleStart:
        """Resume from a `state_dict()`, as `load()`."""
        return self.load(EngineState(**values))

    def replicas(self, by_parameter: bool = True) -> dict[str, Tensor]:
        """Flat tensors that must hold the same bits on all ranks, by readable name.

        Without the masters and states of a sharded optimizer, each of which has one owner. Without
        `by_parameter` a few large tensors, whose padding may differ. Waits for the device.
        """
        self._parts.attached_params.check()
        self._step.reload_model_params()
        rate = torch.tensor([self.lr], dtype=torch.float64, device=self.device)
        count = self._step.reference_count.agreed
        return {"learning rate": rate} | self._parts.rank_state.comparable(count, by_parameter)

    @property
    def device(self) -> torch.device:
        """Where the model, its masters and its gradients are."""
        return self.layout.device

    @property
    def flat_numel(self) -> int:
        """Elements of the flat memory of all trainable parameters, padding included; tied ones count once."""
        return sum(flat_buffer.numel for flat_buffer in self.layout.flat_buffers)

    @property
    def loss_scale(self) -> float:
        """The loss scale of the next step; 1 where there is none. Waits for the device."""
        return float(self.scale.value())

    def restart_loss_scale(self) -> None:
        """Return to the initial loss scale, on all ranks alike, between steps.

        After compute_in_fp32() where gradients overflowed: what made a lower scale necessary is gone.
        """
        self._step.check_between_steps("restart_loss_scale()")
        self.scale.restart()

    def counters(self) -> dict[str, int]:
        """Counters of the loss scale by name, including applied and skipped steps. Waits for the device."""
        return self.scale.counters()

    def average_buffers(self) -> None:
        """Replace running statistics (BatchNorm) by their mean over the ranks, other buffers by rank 0's.

        Statistics are floating-point buffers whose names begin with running_. Integers are left as they are.
        A collective, called before an evaluation, between steps. A checkpoint keeps each rank's own buffers.
        One process calls it after writing buffers between steps, too: see Stepper.
        """
        self._step.check_between_steps("average_buffers()")
        self.buffers.average()

    @contextmanager
    def weights_swapped(self) -> Iterator[None]:
        """The context for `ExponentialMovingAverage.in_model`, in which the model has other weights.

        Between steps only. Autograd refuses the backward pass of a graph over its start or its end.
        """
        self._step.check_between_steps("ExponentialMovingAverage.in_model()")
        self._parts.attached_params.check()
        # At both ends: a graph over the weights may not run backward over the averages, nor the reverse.
        self._parts.in_place.count_update()
        self._parts.attached_params.weights_swapped = True
        try:
            yield
        finally:
            self._parts.in_place.count_update()
            self._parts.attached_params.weights_swapped = False

    def reduced_gradients(self) -> dict[str, Tensor]:
        """The reduced gradients by parameter name, scaled by the loss scale, in `gradient_dtype`.

        Views, valid from step() to the next backward(). Of a sharded optimizer use `own_gradients`.
        """
        return self.layout.gradients()

    def own_gradients(self) -> dict[str, Tensor]:
        """The part of `reduced_gradients` that this rank updates, flat."""
        return self.reducer.own_gradients()

    def state_bytes(self) -> int:
        """Bytes of `bytes_by_kind`, and of the sums of several micro-batches."""
        return sum(self.bytes_by_kind().values()) + size_bytes(self.reducer.tensors())

    def bytes_by_kind(self) -> dict[str, int]:
        """Bytes of weights, masters, gradients, states (of torch's from its first step on) and buffers."""
        return self._parts.rank_state.bytes_by_kind()
