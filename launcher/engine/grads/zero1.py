"""ZeRO-1: which rank updates what. Whole segments on every rank, or a piece of each run on its owner.

Owns the pieces that the optimizer updates, and their conversion to parameters by name and back. Sharding
divides the memory of masters and optimizer states by the number of ranks; vectors are small and stay whole.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

import launcher.engine.works as works
from launcher.engine.grads.bucket import Collective
from launcher.engine.grads.collectives import ShardedSum, is_sharded, start_gather
from launcher.engine.params.flat_buffers import Piece, Segment, Slot
from launcher.engine.params.flat_params import Layout, Stretches

Allocate = Callable[[int, bool], Tensor]  # fp32 host memory for so many elements, pinned or not
CHUNK = 1 << 24  # elements gathered at once: 64 MB on a device


def on_host(numel: int, pinned: bool) -> Tensor:
    """New memory for `Zero1.gather_full`."""
    return torch.empty(numel, dtype=torch.float32, pin_memory=pinned)


class Zero1:
    """The pieces of a layout, in the order in which an updater holds its states.

    Building it drops the full masters of sharded segments: from then on each rank has only its pieces.
    """

    def __init__(self, layout: Layout, collectives: Mapping[str, Collective], group: works.Group) -> None:
        self._layout, self._collectives, self._group = layout, collectives, group
        self.pieces: list[Piece] = []
        self.places: list[tuple[Segment, slice]] = []  # which elements of which segment each piece is
        for segment in layout.segments:
            collective = collectives[segment.name]
            if not isinstance(collective, ShardedSum):
                self._add(segment, segment, slice(0, segment.numel))
                continue
            for run in segment.runs:
                part = run.piece(dist.get_rank(group), layout.world_size)
                piece = segment.part(part)
                master = piece.master.clone() if piece.half and piece.master is not None else piece.master
                self._add(Piece(piece.weight, master, collective.owned(segment, run)), segment, part)
            if segment.half:
                segment.master = None  # frees the memory of what other ranks own

    def _add(self, piece: Piece, segment: Segment, part: slice) -> None:
        self.pieces.append(piece)
        self.places.append((segment, part))

    @property
    def forms(self) -> dict[str, tuple[torch.Size, torch.dtype]]:
        """Shape and dtype of each parameter's master by name, in the order of the layout."""
        return {slot.name: (slot.shape, torch.float32) for slot in self._layout.slots}

    def stretches(self) -> list[Stretches]:
        """The elements that are updated alike, by piece, counted from the piece's start."""
        return [self._layout.stretches(segment, part) for segment, part in self.places]

    def any_rank(self, found: bool) -> bool:
        """Whether `found` on any rank; a collective where the optimizer is sharded, else this rank's own."""
        if not self.sharded:
            return found
        flag = torch.tensor(int(found), device=self._layout.device)
        works.all_reduce(flag, self._group, dist.ReduceOp.MAX)
        return bool(flag)

    def gather_full(
        self, tensors: Sequence[Tensor], rank: int | None = None, allocate: Allocate = on_host
    ) -> dict[str, Tensor]:
        """fp32 values by parameter name from one flat tensor per piece.

        Views where every rank holds all. Sharded ones are copied to the host memory that `allocate` gives, on
        all ranks, or only on `rank` of the group: the others' result leaves those parameters out. That is a
        collective, and takes CHUNK elements on the device, however large the model is.
        """
        found: dict[str, Tensor] = {}
        for segment in self._layout.segments:
            own = [tensor for tensor, (each, _) in zip(tensors, self.places, strict=True) if each is segment]
            whole = self._gathered(segment, own, rank, allocate) if self._divides(segment) else own[0]
            if whole is not None:
                found |= {slot.name: slot.view(whole) for slot in segment.slots}
        if self.sharded and self._layout.device.type == "cuda":
            torch.cuda.current_stream(self._layout.device).synchronize()  # the copies are asynchronous
        return found

    def masters(self) -> list[Tensor]:
        """fp32 values by piece: the masters, or widened weights where there are none."""
        return [piece.exact() for piece in self.pieces]

    def scatter(self, named: Mapping[str, Tensor], tensors: Sequence[Tensor]) -> None:
        """The inverse of `gather_full`: copy values by parameter name into one flat tensor per piece."""
        for tensor, (segment, part) in zip(tensors, self.places, strict=True):
            for slot in segment.slots:
                inside = slot.within(part)  # of `tensor`, the elements of this parameter
                if inside.start < inside.stop:
                    first = part.start + inside.start - slot.offset  # in the parameter
                    values = slot.in_memory_order(named[slot.name])
                    tensor[inside].copy_(values[first : first + inside.stop - inside.start])

    def load_masters(self, named: Mapping[str, Tensor]) -> None:
        """Take fp32 weights by name, and round the half weights from them. A collective if sharded."""
        exact = self.masters()
        self.scatter(named, exact)
        for piece, values in zip(self.pieces, exact, strict=True):
            if piece.half:
                piece.weight.copy_(values)
        self.gather_weights()

    @property
    def sharded(self) -> bool:
        """Whether masters and states of some parameters have one owner each among the ranks."""
        return is_sharded(self._collectives)

    def rounded(self) -> list[tuple[Segment, Slot]]:
        """The parameters whose weights are rounded copies of masters, on whichever ranks those are."""
        pieces = zip(self.pieces, self.places, strict=True)
        halves = {id(segment) for piece, (segment, _) in pieces if piece.half and piece.master is not None}
        return [(each, slot) for each in self._layout.segments if id(each) in halves for slot in each.slots]

    def take_weights(self, segment: Segment, slot: Slot) -> None:
        """Set this rank's masters of a parameter to its weights where they do not round to them."""
        for piece, (each, part) in zip(self.pieces, self.places, strict=True):
            if each is segment and piece.master is not None:
                inside = slot.within(part)
                master, weight = piece.master[inside], piece.weight[inside]
                master.copy_(torch.where(master.to(weight.dtype) == weight, master, weight))

    def gather_weights(self) -> None:
        """Give all ranks the weights of all pieces, after an update. A collective where sharded.

        Waits for them, although the next forward pass could begin before. Hooks that made each module wait
        for its own weights would not see every read: torch.nn.MultiheadAttention and the Mamba of
        transformers use the weights of a child without calling it, and a user may read any parameter between
        two steps. Such a read would get weights of two steps, without an error.
        """
        for segment in self._layout.segments:
            collective = self._collectives[segment.name]
            if isinstance(collective, ShardedSum):
                collective.gather_weights(segment)

    def keep_weights(self, segment: Segment) -> Tensor:
        """A copy of its weights, to be put back between two steps.

        Where the optimizer is sharded memory is short: the copy is in that of the gradients, which nothing
        reads until the next step writes them, or on the host where those are smaller.
        """
        weight, gradient = segment.weight, segment.grad
        if not self._divides(segment):
            return weight.clone()
        if gradient.element_size() == weight.element_size():
            return gradient.view(weight.dtype).copy_(weight)
        return weight.to("cpu", copy=True)

    def _divides(self, segment: Segment) -> bool:
        """Whether each rank owns a piece of each run, not all of them."""
        return isinstance(self._collectives[segment.name], ShardedSum)

    def _gathered(
        self, segment: Segment, own: Sequence[Tensor], rank: int | None, allocate: Allocate
    ) -> Tensor | None:
        """All ranks' values of a segment on the host; None on a rank that is not to have them."""
        assert self._group is not None
        world_size, whole = dist.get_world_size(self._group), None
        if rank is None or rank == dist.get_rank(self._group):
            whole = allocate(segment.numel, self._layout.device.type == "cuda")
        # CHUNK counts the elements of all ranks, which arrive together.
        step = max(1, CHUNK // world_size)
        for run, tensor in zip(segment.runs, own, strict=True):
            rows = None if whole is None else whole[run.start : run.end].view(world_size, -1)
            for start in range(0, len(tensor), step):
                part = tensor[start : start + step]
                received = None if rows is None else part.new_empty(world_size, len(part))
                if rank is not None:
                    parts = None if received is None else list(received.unbind())
                    work = dist.gather(part, parts, group=self._group, group_dst=rank, async_op=True)
                    works.run(work, part)
                elif received is not None:
                    works.wait_for(start_gather(received.view(-1), part, self._group), received)
                if rows is not None and received is not None:
                    for row, values in zip(rows, received, strict=True):  # contiguous, so without a wait
                        row[start : start + step].copy_(values, non_blocking=True)
        return whole
