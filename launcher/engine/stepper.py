"""One training step, from a loss to updated weights: the engine's front.

Owns the order of events within a step: scale, backward, reduce, agree, unscale, clip, update or skip. It
knows no files, no config and no recipes. Every rank calls backward() as often as it has micro-batches (not
at all is allowed) and then step(); all ranks come out of step() with the same verdict and the same weights.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from launcher.engine.buffers import Buffers
from launcher.engine.clock import StepClock
from launcher.engine.layout import Layout
from launcher.engine.policy import Emulation, Policy, choose_emulation
from launcher.engine.reducer import Reducer
from launcher.engine.result import StepResult
from launcher.engine.scale import LossScale, Scaling, nearest_power_of_two
from launcher.engine.update import Optimizer, Scalars, Updater


@dataclass(frozen=True)
class Wire:
    """How gradients travel. `dtype` None: the policy's; `bucket_bytes` None: from the model's size.

    `predivide` None: 1 up to 8 ranks, else 2^ceil(log2(W) / 2), a power of two that keeps fp16 sums of
    many ranks in range.
    """

    dtype: torch.dtype | None = None
    bucket_bytes: int | None = None
    overlap: bool = True
    predivide: int | None = None

    def __post_init__(self) -> None:
        if self.predivide is not None and (self.predivide < 1 or self.predivide & (self.predivide - 1)):
            raise ValueError(f"wire predivide={self.predivide} is not a power of two (1, 2, 4, ...).")


class Stepper:
    """Trains `model` with `optimizer` under a precision policy, on one or many ranks.

    `group` None means one process. `micro_batches` is the largest number of backward() calls before each
    step(); the last of them overlaps with the wire. `reference_count` is n0 of the loss boundary: the usual
    number of samples (or tokens) per step and rank; None takes it from the first step. `learning_rates`
    gives one rate per applied step, the last one for ever after; None means `optimizer.lr` throughout.

    Building a Stepper moves the model's parameters and buffers into flat memory and takes rank 0's values
    on all ranks. Raises ValueError for a model that cannot be trained and where ranks hold different
    parameters.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
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
        wire = wire or Wire()
        self.model = model
        self.policy = policy or Policy.fp16()
        self._group = group
        self._world_size = dist.get_world_size(group) if group else 1
        _refuse_different_models(model, group)  # first: what comes next then raises on all ranks or on none
        self.layout = Layout(model, self.policy, wire.dtype)
        self.buffers = Buffers(model, group)
        self._take_values_of_rank_0()
        self._device = self.layout.device
        self.emulation: Emulation = choose_emulation(self.policy, self._device, emulate)
        self._predivide = wire.predivide or default_predivide(self._world_size)
        self.reducer = Reducer(
            self.layout, group, micro_batches, wire.bucket_bytes, wire.overlap, self._predivide
        )
        self.updater = Updater(self.layout, optimizer, compiled)
        self.scale = LossScale(scaling or Scaling(mode=self.policy.scale_mode), self._device)
        self._clip_norm = clip_norm
        rates = list(learning_rates) if learning_rates is not None else [optimizer.lr]
        self._rates = torch.tensor(rates, dtype=torch.float64, device=self._device)
        self._micro_batches = micro_batches
        self._reference = reference_count
        self._names = [slot.name for slot in self.layout.slots]
        self.clock = StepClock(self._device)
        self._start_of_step()

    def forward(self) -> AbstractContextManager[object]:
        """The precision context for a forward pass."""
        return self.policy.forward(self._device, self.emulation.used)

    def backward(self, loss_sum: Tensor, count: int | Tensor) -> None:
        """Back-propagate one micro-batch.

        `loss_sum`: fp32 scalar, the sum of the losses of `count` samples (or tokens). The step divides by
        the count of all micro-batches of all ranks, so micro-batches and ranks may differ in size.
        """
        self._refuse_unusable(loss_sum)
        if self._reference is None:
            self._reference = self._agree_on_reference(count)
        self._done += 1
        last = self._done == self._micro_batches
        self._count(loss_sum, count)
        if last:
            self._send_counts()
        self.reducer.begin_backward(last)
        factor = self.scale.value() / self._reference  # both powers of two: exact
        # Emulated arithmetic must reach the forward passes that activation checkpointing repeats in backward.
        with self.forward() if self.emulation.used else nullcontext():
            (loss_sum * factor).backward()  # type: ignore[no-untyped-call]

    def step(self) -> StepResult:
        """Reduce, agree, unscale, clip, update or skip. A collective: every rank calls it once per step."""
        if self._reference is None:
            self._reference = self._agree_on_reference(0)
        if self._counts_work is None:
            self._send_counts()
        self.clock.mark("compute")
        self.reducer.flush()
        reduced = self.reducer.finish()
        if isinstance(self._counts_work, dist.Work):
            self._counts_work.wait()
        count, loss_sum, bad_losses = self._counts.unbind()
        self.clock.mark("wire")

        squares = reduced.sums.sum()
        bad_loss = bad_losses > 0
        overflow = ~squares.isfinite() & ~bad_loss
        skip = overflow | bad_loss | (count == 0)

        scale = self.scale.value().double()
        assert self._reference is not None
        unscale = self._predivide * self._reference / (scale * count)
        grad_norm = unscale * squares.sqrt()
        clip = torch.ones_like(grad_norm)
        if self._clip_norm is not None:
            clip = (self._clip_norm / (grad_norm + 1e-6)).clamp(max=1.0)
        # take, not [...]: indexing with a 0-dim tensor asks the host for its value
        lr = self._rates.take(self.scale.applied.clamp(max=len(self._rates) - 1))
        self.updater.step(Scalars((unscale * clip).float(), lr, self.scale.applied + 1, skip))
        self.buffers.restore_if(skip)
        self.scale.advance(skip, bad_loss, overflow)
        self.clock.mark("update")

        values = torch.stack([loss_sum / count, grad_norm, scale, lr, count, skip.double(), bad_losses])
        result = StepResult.capture(values, self.scale.state, reduced, self._names, self.clock.take())
        self._start_of_step()
        return result

    def named_masters(self) -> dict[str, Tensor]:
        """fp32 values of the trainable parameters by name (views where the policy has masters)."""
        return self.layout.masters()

    def state_bytes(self) -> int:
        """Bytes of persistent training state: weights, masters, wire gradients, optimizer states, buffers."""
        kept = [self.scale.state, *self.buffers.tensors(), *self.reducer.tensors()]
        for segment in self.layout.segments:
            kept += [segment.weight, segment.grad, *self.updater.states[segment.name]]
            kept += [segment.master] if segment.half and segment.master is not None else []
        return sum(tensor.numel() * tensor.element_size() for tensor in kept)

    def _start_of_step(self) -> None:
        self.buffers.snapshot()  # before any forward pass: that is where BatchNorm statistics move
        self._done = 0
        self._counts = torch.zeros(3, dtype=torch.float64, device=self._device)
        self._counts_work: dist.Work | bool | None = None

    def _count(self, loss_sum: Tensor, count: int | Tensor) -> None:
        """Add to what travels with the step: count, sum of losses, number of losses not finite."""
        loss = loss_sum.detach().double()
        n = count.to(loss) if isinstance(count, Tensor) else torch.full_like(loss, float(count))
        self._counts += torch.stack([n, loss, (~loss.isfinite()).double()])

    def _send_counts(self) -> None:
        """The step's only collective beside the buckets; always the first of a step, on every rank."""
        self._counts_work = True
        if self._group is not None:
            self._counts_work = dist.all_reduce(self._counts, group=self._group, async_op=True)

    def _agree_on_reference(self, count: int | Tensor) -> int:
        """n0 from the first step: the power of two nearest to the mean count per rank. A collective."""
        total = torch.zeros((), dtype=torch.float64, device=self._device) + count * self._micro_batches
        if self._group is not None:
            dist.all_reduce(total, group=self._group)
        return nearest_power_of_two(float(total) / self._world_size)

    def _refuse_unusable(self, loss_sum: Tensor) -> None:
        if loss_sum.dtype != torch.float32 or loss_sum.ndim != 0:
            raise ValueError(
                f"the loss is {loss_sum.dtype} of shape {tuple(loss_sum.shape)}; it must be fp32, 0-dim. "
                "Take logits.float() before the loss (an fp16 loss times the loss scale would overflow) and "
                "sum over the samples."
            )
        if not loss_sum.requires_grad:
            raise ValueError(
                "the loss does not depend on any trainable parameter. Compute it from the model."
            )
        if self._done == self._micro_batches:
            raise RuntimeError(
                f"backward() was called more than {self._micro_batches} times before step(). "
                f"Build the Stepper with micro_batches={self._micro_batches + 1} or more."
            )

    def _take_values_of_rank_0(self) -> None:
        if self._group is None:
            return
        for segment in self.layout.segments:
            exact = segment.weight if segment.master is None else segment.master
            dist.broadcast(exact, group=self._group, group_src=0)
        self.layout.round_weights()
        for p in self.model.parameters():
            if not p.requires_grad:
                values = p.detach().contiguous()
                dist.broadcast(values, group=self._group, group_src=0)
                p.detach().copy_(values)
        self.buffers.broadcast()


def default_predivide(world_size: int) -> int:
    """1 up to 8 ranks, else 2^ceil(log2(W) / 2)."""
    exponent = (world_size - 1).bit_length()  # ceil(log2(W))
    return 1 if world_size <= 8 else int(2 ** -(-exponent // 2))


def _refuse_different_models(model: nn.Module, group: dist.ProcessGroup | None) -> None:
    """All ranks must hold the same tensors in the same order. A collective; all ranks raise alike."""
    if group is None:
        return
    tensors = [*model.named_parameters(), *model.named_buffers()]
    lines = [f"{n} {tuple(t.shape)} {t.stride()} {t.dtype} {t.requires_grad}" for n, t in tensors]
    digest = int.from_bytes(hashlib.sha256("\n".join(lines).encode()).digest()[:7], "little")
    device = tensors[0][1].device if tensors else None
    both = torch.tensor([digest, -digest], dtype=torch.int64, device=device)
    dist.all_reduce(both, op=dist.ReduceOp.MAX, group=group)
    if both[0] != -both[1]:
        raise ValueError(
            "the ranks hold different parameters or buffers (names, shapes, strides, dtypes, requires_grad "
            "or order). Build the same model on all of them; "
            f"rank {dist.get_rank(group)} has {len(tensors)} of them, the first is "
            f"{lines[0] if lines else 'none'}."
        )
