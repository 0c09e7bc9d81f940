"""Sends gradients from autograd to the other ranks: buckets, accumulation, overlap with backward.

Owns the hooks on the parameters, the buckets and their order. Every rank sends all buckets in one order, each
as soon as it and all before it are complete, whatever the order in which gradients arrive; parameters without
a gradient send zeros. Collectives of ranks meet by their order alone: in another order, or without one of
them, ranks would wait for ever or add up unlike parameters. `collectives` has how a bucket is sent.

A step: receiving() around each backward pass, in which hooks call register_grad_ready(); start_grad_sync()
sends the rest; finish_grad_sync() waits, and reads the sums of squares; restart().
"""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import launcher.engine.async_work as async_work
from launcher.engine.errors import UnusableError
from launcher.engine.grads.collectives import Bucket, Collective, ShardedSum
from launcher.engine.grads.copy_in import CopyIn, grads_set_aside
from launcher.engine.grads.grad_norm import SquaresReader, is_not_finite
from launcher.engine.params.flat_buffers import ParamRange
from launcher.engine.params.flat_params import Layout
from launcher.engine.precision.found_inf import ABANDONED

# Gradients of one process that may stay in `p.grad` until the backward pass ends: nothing waits for them, and
# hooks on 1000 parameters cost 3 ms of a step of 15. Without hooks they take this
# memory beside the flat gradients; with them each bucket is moved, and freed, during the pass.
NO_HOOKS_BELOW_BYTES = 1 << 24


class Reducer:
    """Sums the gradients of all ranks and micro-batches.

    `collectives` has the collective of each flat buffer, by name.
    """

    def __init__(
        self,
        layout: Layout,
        group: async_work.Group,
        collectives: Mapping[str, Collective],
        micro_batches: int = 1,
        overlap: bool = True,
    ) -> None:
        self._layout, self._group, self.overlap = layout, group, overlap
        self._rank = dist.get_rank(group) if group else 0
        self._sums: dict[str, Tensor] = {}  # by flat buffer; none for one micro-batch
        self.buckets = self._buckets(collectives)  # in the order in which all ranks send them
        # One read per dtype, after all buckets: on a GPU each read is some kernels.
        parts = [part for bucket in self.buckets for part in bucket.collective.reduced_by_param(bucket)]
        runs = itertools.groupby(parts, key=lambda part: part.dtype)
        self._squares = [SquaresReader(list(run)) for _, run in runs]
        # What the hooks read and write. These lists and the set stay the same objects: a hook keeps them.
        self.receives = False
        self.arrived: set[int] = set()  # by ParamRange.index, the gradients of this micro-batch
        # By ParamRange.index, the bucket of each parameter.
        self.bucket_of = [bucket.index for bucket in self.buckets for _ in bucket.params]
        self.pending: list[int] = []  # by bucket, the gradients of this micro-batch that have not arrived
        self.restart()
        self.accumulate(micro_batches > 1)
        stays = group is None and sum(bucket.size_bytes for bucket in self.buckets) <= NO_HOOKS_BELOW_BYTES
        for param in () if stays else layout.params:
            _register_hook(self, param)

    def restart(self) -> None:
        """Begin the next step."""
        for bucket in self.buckets:
            bucket.copy_in.drop()
        self.arrived.clear()
        self._next = 0  # the first bucket that was not sent
        self._sends = False  # whether buckets are sent within the present backward pass, the last of the step
        self.sent_bytes = 0  # that this rank has passed to collectives in this step

    def accumulate(self, accumulates: bool) -> None:
        """Make room for the fp32 sums of several micro-batches per step, or free it. Between steps only."""
        if accumulates != bool(self._sums):
            flat_buffers = self._layout.flat_buffers if accumulates else []
            self._sums = {  # may run out of memory
                each.name: torch.zeros_like(each.grad, dtype=torch.float32) for each in flat_buffers
            }
            for bucket in self.buckets:
                bucket.copy_in.add_up_in(self._sums.get(bucket.flat_buffer.name))

    def _buckets(self, collectives: Mapping[str, Collective]) -> list[Bucket]:
        """One bucket per range."""
        buckets: list[Bucket] = []
        for flat_buffer in self._layout.flat_buffers:
            collective = collectives[flat_buffer.name]
            for bucket_range in flat_buffer.bucket_ranges:
                message = flat_buffer.grad[bucket_range.start : bucket_range.end]
                factor = collective.send_multiplier
                copy_in = CopyIn(flat_buffer, bucket_range, self._layout.parameters, factor)
                buckets.append(Bucket(len(buckets), flat_buffer, bucket_range, collective, message, copy_in))
        return buckets

    @contextlib.contextmanager
    def receiving(self, early: bool) -> Iterator[None]:
        """Receive the gradients of one micro-batch. Buckets that are complete are sent at once, if `early`.

        Outside this context a backward pass is plain torch: its gradients stay in `p.grad`.
        """
        self._sends = early and self.overlap
        self.arrived.clear()
        self.pending[:] = [len(bucket.params) for bucket in self.buckets]
        with grads_set_aside(self._layout.parameters.values()):
            self.receives = True
            try:
                yield
                with torch._C.DisableTorchFunction():  # as in the hooks
                    for bucket in self.buckets:
                        bucket.copy_in.drain()
            finally:
                self.receives = False

    def register_grad_ready(self, param: ParamRange, again: bool) -> None:
        """All gradients of a parameter's bucket are ready. Send all buckets that are next in the fixed order.

        `again`: this is the parameter's second gradient in this backward pass. Raises UnusableError where the
        first one was sent.
        """
        bucket = self.bucket_of[param.index]
        if again:
            if bucket < self._next:
                raise UnusableError(
                    f"parameter {param.name} received a gradient twice in one backward pass, as "
                    "re-entrant activation checkpointing does: use use_reentrant=False, or "
                    "DDPOptions(overlap=False)."
                )
            return
        self.buckets[bucket].copy_in.drain()
        while self._sends and self._next < len(self.buckets) and not self.pending[self._next]:
            waiting = self.buckets[self._next]
            # While it waited for the buckets before it, a second gradient of a parameter may have arrived.
            waiting.copy_in.drain()
            self._send(waiting)

    def start_grad_sync(self, abandoned: bool = False, correction: float = 1.0) -> None:
        """Send the remaining buckets, and those of parameters without a gradient, with zeros.

        Every rank calls this in each step, so all ranks send all buckets, in the same order; where the step
        is `abandoned`, whatever they hold. What this rank sends is multiplied by `correction`, a power of
        two; other than 1 only if nothing was sent early. After an error, here or in a backward pass, another
        call sends what is missing, and nothing twice.
        """
        for bucket in self.buckets[self._next :]:
            self._send(bucket, abandoned, correction)

    def finish_grad_sync(self, abandoned: bool = False) -> tuple[Tensor, Tensor | int]:
        """Wait for the buckets in order, and read their squares.

        Returns the sums of squares, fp64 [parameters], in the order of ParamRange.index, and the status of
        this rank (see `step_totals`). Where it has `abandoned` the step, nothing is read.
        """
        for bucket in self.buckets:
            bucket.collective.wait(bucket)
        if abandoned:
            return torch.zeros(
                len(self.bucket_of), dtype=torch.float64, device=self._layout.device
            ), ABANDONED
        squares = torch.cat([reader.read() for reader in self._squares])
        if self._group is None:
            return squares, 0  # a rank alone checks nothing before it sends
        return squares, is_not_finite([extreme for bucket in self.buckets for extreme in bucket.extremes])

    def own_gradients(self) -> dict[str, Tensor]:
        """The elements of the reduced gradient that this rank owns, flat, by parameter name.

        Each element has one owner. Scaled; valid from step() to the next backward.
        """
        own = {}
        for bucket in self.buckets:
            others = self._rank and not isinstance(bucket.collective, ShardedSum)  # rank 0 owns what all hold
            for param, part in zip(bucket.params, bucket.collective.reduced_by_param(bucket), strict=True):
                own[param.name] = part[:0] if others else part
        return own

    def unused(self) -> list[str]:
        """The parameters for which this rank's first step had no gradient."""
        return [name for bucket in self.buckets for name in bucket.copy_in.unused or ()]

    def tensors(self) -> list[Tensor]:
        """What is held here besides the gradients: the sums of several micro-batches."""
        return list(self._sums.values())

    def _send(self, bucket: Bucket, abandoned: bool = False, correction: float = 1.0) -> None:
        """Check this rank's gradient, then send the bucket.

        Memory may run out anywhere in here, and the other ranks wait for what this rank has not sent. So a
        bucket counts as sent only once its collective has been called, and `start_grad_sync` begins with the
        first that was not.
        """
        if abandoned:
            bucket.copy_in.drop()
        else:
            bucket.copy_in.complete()
            if correction != 1.0:
                bucket.message.mul_(correction)
            if isinstance(bucket.collective, ShardedSum):
                bucket.clear_padding()  # which may hold the previous step's sum
            if self._group is not None and bucket.message.numel():  # not where its parameters are all empty
                bucket.extremes = torch.aminmax(bucket.message)
        self.sent_bytes += bucket.collective.start(bucket)
        self._next = bucket.index + 1


def _register_hook(reducer: Reducer, param: ParamRange) -> None:
    """Register the hook of one parameter: a network of many small ones spends its backward pass in here.

    The gradient stays in `p.grad` until its bucket is complete. A weak reference: the model does not keep the
    reducer alive.
    """
    held, index = weakref.ref(reducer), param.index
    arrived, bucket_of, pending = reducer.arrived, reducer.bucket_of, reducer.pending

    def receive(parameter: nn.Parameter) -> None:
        reducer = held()
        if reducer is None or not reducer.receives:
            return
        again, bucket = index in arrived, bucket_of[index]
        if not again:
            arrived.add(index)
            pending[bucket] -= 1
            if pending[bucket]:
                return
        # Emulated half arithmetic would look at each call in here, all of which it would leave alone.
        with torch._C.DisableTorchFunction():
            reducer.register_grad_ready(param, again)

    register: Any = reducer._layout.parameters[param.name].register_post_accumulate_grad_hook
    register(receive)
