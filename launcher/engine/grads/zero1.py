"""ZeRO-1 (Rajbhandari et al. 2020): which rank updates what.

Whole flat buffers on every rank, or a shard of each bucket on its owner. Owns the shards that the optimizer
updates, and their conversion to parameters by name and back. Sharding divides the memory of masters and
optimizer states by the number of ranks; vectors are small and stay whole.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

import launcher.engine.async_work as async_work
from launcher.engine.grads.collectives import Collective, ShardedSum, start_gather
from launcher.engine.params.flat_buffers import FlatBuffer, ParamRange, Shard
from launcher.engine.params.flat_params import GroupSlices, Layout


class Zero1:
    """The shards of a layout, in the order in which an updater holds its states.

    Building it drops the full masters of sharded flat buffers: from then on each rank has only its shards.
    """

    def __init__(
        self, layout: Layout, collectives: Mapping[str, Collective], group: async_work.Group
    ) -> None:
        self._layout, self._collectives, self._group = layout, collectives, group
        self.shards: list[Shard] = []
        self.places: list[tuple[FlatBuffer, slice]] = []  # which elements of which flat buffer each shard is
        for flat_buffer in layout.flat_buffers:
            collective = collectives[flat_buffer.name]
            if not isinstance(collective, ShardedSum):
                self.shards.append(flat_buffer)
                self.places.append((flat_buffer, slice(0, flat_buffer.numel)))
                continue
            for bucket_range in flat_buffer.bucket_ranges:
                part = bucket_range.shard(dist.get_rank(group), layout.world_size)
                shard = flat_buffer.part(part)
                master = shard.master.clone() if shard.half and shard.master is not None else shard.master
                grad = collective.owned(flat_buffer, bucket_range)
                self.shards.append(Shard(shard.weight, master, grad))
                self.places.append((flat_buffer, part))
            if flat_buffer.half:
                flat_buffer.master = None  # frees the memory of what other ranks own

    @property
    def forms(self) -> dict[str, tuple[torch.Size, torch.dtype]]:
        """Shape and dtype of each parameter's master by name, in the order of the layout."""
        return {param.name: (param.shape, torch.float32) for param in self._layout.params}

    def group_slices(self) -> list[GroupSlices]:
        """The elements that are updated alike, by shard, counted from the shard's start."""
        return [self._layout.group_slices(flat_buffer, part) for flat_buffer, part in self.places]

    def gather_full(self, tensors: Sequence[Tensor], rank: int | None = None) -> dict[str, Tensor]:
        """fp32 values by parameter name from one flat tensor per shard.

        Views where every rank holds all. Sharded ones are copied to new host memory, on all ranks, or only on
        `rank` of the group: the others' result leaves those parameters out. That is a collective, and takes
        the memory of one bucket on the device.
        """
        found: dict[str, Tensor] = {}
        for flat_buffer in self._layout.flat_buffers:
            places = zip(tensors, self.places, strict=True)
            own = [tensor for tensor, (each, _) in places if each is flat_buffer]
            whole = self._gathered(flat_buffer, own, rank) if self._is_sharded(flat_buffer) else own[0]
            if whole is not None:
                found |= {param.name: param.view(whole) for param in flat_buffer.params}
        return found

    def masters(self) -> list[Tensor]:
        """fp32 values by shard: the masters, or widened weights where there are none."""
        return [shard.main_params() for shard in self.shards]

    def scatter(self, named: Mapping[str, Tensor], tensors: Sequence[Tensor], prefix: str = "") -> None:
        """The inverse of `gather_full`: copy values by parameter name into one flat tensor per shard.

        `prefix` comes before the names. Asks for each parameter once, on all ranks in one order.
        """
        for flat_buffer in self._layout.flat_buffers:
            places = zip(tensors, self.places, strict=True)
            own = [(tensor, part) for tensor, (each, part) in places if each is flat_buffer]
            for param in flat_buffer.params:
                values = param.in_memory_order(named[prefix + param.name])
                for tensor, part in own:
                    inside = param.within(part)  # of `tensor`, the elements of this parameter
                    if inside.start < inside.stop:
                        first = part.start + inside.start - param.offset  # in the parameter
                        tensor[inside].copy_(values[first : first + inside.stop - inside.start])

    def load_masters(self, named: Mapping[str, Tensor]) -> None:
        """Take fp32 weights by name, and round the half weights from them. A collective if sharded."""
        exact = self.masters()
        self.scatter(named, exact)
        for shard, values in zip(self.shards, exact, strict=True):
            if shard.half:
                shard.weight.copy_(values)
        self.gather_weights()

    def params_with_masters(self) -> list[tuple[FlatBuffer, ParamRange]]:
        """The parameters whose weights are rounded copies of masters, on whichever ranks those are."""
        found: dict[str, tuple[FlatBuffer, ParamRange]] = {}
        for shard, (flat_buffer, _) in zip(self.shards, self.places, strict=True):
            if shard.half and shard.master is not None:
                found |= {param.name: (flat_buffer, param) for param in flat_buffer.params}
        return list(found.values())

    def masters_from_weights(self, flat_buffer: FlatBuffer, param: ParamRange) -> None:
        """Set this rank's masters of a parameter to its weights where they do not round to them."""
        for shard, (each, part) in zip(self.shards, self.places, strict=True):
            if each is flat_buffer and shard.master is not None:
                inside = param.within(part)
                master, weight = shard.master[inside], shard.weight[inside]
                master.copy_(torch.where(master.to(weight.dtype) == weight, master, weight))

    def gather_weights(self) -> None:
        """Give all ranks the weights of all shards, after an update. A collective where sharded.

        Waits for them, although the next forward pass could begin before. Hooks that made each module wait
        for its own weights would not see every read: torch.nn.MultiheadAttention and the Mamba of
        transformers use the weights of a child without calling it, and a user may read any parameter between
        two steps. Such a read would get weights of two steps, without an error.
        """
        for flat_buffer in self._layout.flat_buffers:
            collective = self._collectives[flat_buffer.name]
            if isinstance(collective, ShardedSum):
                collective.gather_weights(flat_buffer)

    def _is_sharded(self, flat_buffer: FlatBuffer) -> bool:
        """Whether each rank owns a shard of each bucket, not all of them."""
        return isinstance(self._collectives[flat_buffer.name], ShardedSum)

    def _gathered(self, flat_buffer: FlatBuffer, own: Sequence[Tensor], rank: int | None) -> Tensor | None:
        """All ranks' values of a flat buffer on the host; None on a rank that is not to have them."""
        assert self._group is not None
        world_size, whole = dist.get_world_size(self._group), None
        if rank is None or rank == dist.get_rank(self._group):
            pinned = self._layout.device.type == "cuda"
            whole = torch.empty(flat_buffer.numel, dtype=torch.float32, pin_memory=pinned)
        for bucket_range, part in zip(flat_buffer.bucket_ranges, own, strict=True):
            received = None if whole is None else part.new_empty(world_size, len(part))  # [rank, element]
            if rank is not None:
                parts = None if received is None else list(received.unbind())
                work = dist.gather(part, parts, group=self._group, group_dst=rank, async_op=True)
                async_work.run(work, part)
            elif received is not None:
                async_work.wait_for(start_gather(received.view(-1), part, self._group), received)
            if whole is not None and received is not None:
                whole[bucket_range.start : bucket_range.end].copy_(received.view(-1), non_blocking=True)
        if self._layout.device.type == "cuda":
            torch.cuda.current_stream(self._layout.device).synchronize()  # the copies are asynchronous
        return whole
