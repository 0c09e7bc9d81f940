"""One pass over flat memory that scales the gradient, updates the masters and rounds the weights.

Owns the optimizer's states and the form of the pass: compiled, or as calls of torch's fused kernel chunk by
chunk, so that the widened gradient takes a fixed amount of memory. A skipped step changes nothing; on a GPU
the kernels read the skip flag, not the host. Parameter groups are further calls within the pass, one per
stretch of adjacent parameters with the same rates. Factors per element would be more memory to read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from launcher.engine.flat.allocation import flat_zeros
from launcher.engine.flat.groups import Rates
from launcher.engine.flat.layout import Piece, Stretches
from launcher.engine.optim.fused import Optimizer, Scalars, tensor_of
from launcher.engine.state import refuse_misfits
from launcher.engine.wire.shards import Shards

Collect = Callable[[Sequence[Tensor]], dict[str, Tensor]]  # Shards.collect
CHUNK = 1 << 19  # elements on a CPU: 2 MB of widened gradient stay in cache; smaller ones cost more calls
DEVICE_CHUNK = 1 << 25  # elements on a GPU: 128 MB, less than the activations that are free by then


@dataclass(frozen=True)
class _Batch:
    """Parts of pieces that one call of a fused kernel updates; `states` by state, then by part.

    `scratch` takes the widened gradients on a CPU, where mapping new memory costs more than the pass.
    """

    parts: list[Piece]
    states: list[list[Tensor]]
    scratch: list[Tensor]


@dataclass(frozen=True)
class _Share:
    """What is updated at the same rates; `states` by piece, then by state.

    `optimizer` has the weight decay of these for a fused kernel, which takes it as a number.
    """

    optimizer: Optimizer
    rates: int
    pieces: list[Piece]
    states: list[list[Tensor]]
    batches: list[_Batch]


class Updater:
    """Runs an optimizer over pieces. Holds the optimizer's states, flat, fp32, zero at the start.

    `compiled` turns the pass into one kernel with torch.compile (Triton on CUDA, C++ on a CPU). Both forms
    give the same values within rounding. With `stretches` each stretch is a call of its own within the pass.
    `on_host`: whether the host reads the skip flag; None: on a CPU.
    """

    def __init__(
        self,
        pieces: Sequence[Piece],
        optimizer: Optimizer,
        compiled: bool,
        rates: tuple[Rates, ...] = (),
        stretches: Sequence[Stretches] = (),
        on_host: bool | None = None,
    ) -> None:
        self.optimizer = optimizer
        self.pieces = list(pieces)
        self.states = [  # by piece, then by state
            [flat_zeros(len(piece.weight), torch.float32, piece.weight.device) for _ in optimizer.states]
            for piece in self.pieces
        ]
        device = self.pieces[0].weight.device
        self._on_cpu = device.type == "cpu"
        self._on_host = self._on_cpu if on_host is None else on_host
        self._set_groups(rates, device)
        whole: list[Stretches] = [{0: [slice(0, len(piece.weight))]} for piece in self.pieces]
        self._shares = self._shared_out(rates or (Rates(),), stretches or whole)
        self._compiled: Callable[..., None] | None = None
        if compiled:
            # One kernel for all lengths: the pieces of a sharded optimizer are many and unequal. Under
            # dynamic=True the optimizer's constants would be loaded and converted for every vector.
            for share in self._shares:
                for piece, states in zip(share.pieces, share.states, strict=True):
                    for tensor in (*piece.tensors(), *states):
                        torch._dynamo.maybe_mark_dynamic(tensor, 0)
            self._compiled = torch.compile(_whole if self._on_host else _predicated)
        # On a GPU each of their operations on one number would be a kernel; a host computes them as fast.
        self._factors_of: Callable[..., tuple[Tensor, ...]] = type(optimizer).factors
        if compiled and not self._on_host:
            self._factors_of = torch.compile(self._factors_of)

    def _set_groups(self, rates: tuple[Rates, ...], device: torch.device) -> None:
        """What groups make of a step's rate: computed for all at once, in as many operations as for one."""
        self._scales: Tensor | None = None  # [groups] fp64; None without groups
        self._decays: Tensor | None = None  # [groups] fp64; None where it is the optimizer's in all groups
        own = self.optimizer.weight_decay
        decays = [own if each.weight_decay is None else each.weight_decay for each in rates]
        if rates:
            scales = [each.lr_scale for each in rates]
            self._scales = torch.tensor(scales, dtype=torch.float64).to(device)
        if any(decay != own for decay in decays):
            self._decays = torch.tensor(decays, dtype=torch.float64).to(device)

    def _shared_out(self, groups: Sequence[Rates], stretches: Sequence[Stretches]) -> list[_Share]:
        """All elements, by rates."""
        shares = []
        for index, rates in enumerate(groups):
            pieces, states = [], []
            for piece, own, found in zip(self.pieces, self.states, stretches, strict=True):
                for part in found.get(index, []):
                    pieces.append(piece.part(part))
                    states.append([state[part] for state in own])
            if pieces:  # a rank may own nothing of a group
                decay = rates.weight_decay
                optimizer = self.optimizer if decay is None else replace(self.optimizer, weight_decay=decay)
                batches = _batches(pieces, states, CHUNK if self._on_cpu else DEVICE_CHUNK)
                shares.append(_Share(optimizer, index, pieces, states, batches))
        return shares

    def step(self, scalars: Scalars) -> None:
        """Apply one update to all pieces, or write nothing if `scalars.skip` is true."""
        if self._on_host and scalars.skip:
            return
        with torch.no_grad():
            if self._compiled is None:
                self._run_fused(scalars)
            else:
                self._run_compiled(self._compiled, scalars)

    def _run_fused(self, scalars: Scalars) -> None:
        own = [scalars if self._on_host else scalars.for_fused_kernel(wide_rate=self._on_cpu)]
        if self._scales is not None:
            rates = scalars.lr * self._scales
            own = [replace(own[0], lr=lr) for lr in (rates if self._on_cpu else rates.float()).unbind()]
        for share in self._shares:
            for batch in share.batches:
                _fused(share.optimizer, batch, own[share.rates])

    def _run_compiled(self, run: Callable[..., None], scalars: Scalars) -> None:
        scalars = scalars.on(self.pieces[0].weight.device)
        if self._scales is None:
            own = [replace(scalars, factors=self._factors_of(self.optimizer, scalars))]
        else:
            whole = replace(scalars, lr=scalars.lr * self._scales, weight_decay=self._decays)
            factors = self._factors_of(self.optimizer, whole)
            columns = (factor.expand(len(self._scales)).unbind() for factor in factors)
            own = [replace(scalars, factors=factors) for factors in zip(*columns, strict=True)]
        for share in self._shares:
            for piece, states in zip(share.pieces, share.states, strict=True):
                run(self.optimizer, piece, states, own[share.rates])

    def named_states(self, collect: Collect) -> dict[str, Tensor]:
        """fp32 values by `state/parameter`, by way of `collect`: a collective where they are sharded."""
        return {
            f"{state}/{name}": value
            for position, state in enumerate(self.optimizer.states)
            for name, value in collect([states[position] for states in self.states]).items()
        }

    def loading(self, shards: Shards, named: Mapping[str, Tensor], updated: bool) -> Callable[[], None]:
        """What takes these states, by `state/parameter`. Raises ValueError for those of another optimizer."""
        expected = {
            f"{state}/{name}": form for state in self.optimizer.states for name, form in shards.forms.items()
        }
        refuse_misfits("optimizer states", expected, named)

        def load() -> None:
            for position, state in enumerate(self.optimizer.states):
                values = {name: named[f"{state}/{name}"] for name in shards.forms}
                shards.spread(values, [states[position] for states in self.states])

        return load

    def tensors(self) -> list[Tensor]:
        """All states."""
        return [state for states in self.states for state in states]


def _batches(pieces: Sequence[Piece], states: Sequence[list[Tensor]], chunk: int) -> list[_Batch]:
    """All elements in order, cut into batches of `chunk` elements."""
    batches: list[_Batch] = []
    room = 0
    on_cpu = pieces[0].weight.device.type == "cpu"
    numel = min(chunk, sum(piece.weight.numel() for piece in pieces))
    scratch = torch.empty(numel, dtype=torch.float32) if on_cpu else None
    for piece, own in zip(pieces, states, strict=True):
        start, numel = 0, piece.weight.numel()
        while start < numel:
            if not room:
                batches.append(_Batch([], [[] for _ in own], []))
                room = chunk
            part = slice(start, min(start + room, numel))
            batches[-1].parts.append(piece.part(part))
            for tensors, state in zip(batches[-1].states, own, strict=True):
                tensors.append(state[part])
            length = part.stop - start
            if scratch is not None:
                batches[-1].scratch.append(scratch[chunk - room : chunk - room + length])
            start, room = part.stop, room - length
    return batches


def _fused(optimizer: Optimizer, batch: _Batch, scalars: Scalars) -> None:
    """One batch by torch's fused kernel. In a skipped step half weights are rewritten unchanged.

    On a GPU 32 bytes of memory per parameter for SGD with momentum, 40 for AdamW: 6 to widen, 20 or 28 to
    update, 6 to round. The compiled pass takes 20 and 28. The `grad_scale` of torch's kernels takes 4 more,
    since they write the gradients back, and gives other bits, since they divide by it. On a V100, with the
    batches of scripts/scale.md, 12 bytes are 0.4 % of a step of ResNet-50 and 2.6 % of one of BERT-base, as
    computed: for runs too short to compile, and without Triton, that is worth no kernel of our own.
    """
    grads = _widened(batch, scalars.multiplier)
    masters = [part.exact() for part in batch.parts]
    optimizer.fused(masters, grads, batch.states, scalars)
    halves = [(part.weight, m) for part, m in zip(batch.parts, masters, strict=True) if part.half]
    if halves:
        torch._foreach_copy_([weight for weight, _ in halves], [master for _, master in halves])


def _widened(batch: _Batch, multiplier: Tensor | float) -> list[Tensor]:
    """The clipped mean gradient, fp32, in separate memory."""
    if not batch.scratch:
        # A 1-dim factor: with a 0-dim fp32 one the product would be computed in fp16, and overflow.
        factor = tensor_of(multiplier).view(1)
        return [torch.mul(part.grad, factor) for part in batch.parts]
    torch._foreach_copy_(batch.scratch, [part.grad for part in batch.parts])
    torch._foreach_mul_(batch.scratch, multiplier)
    return batch.scratch


def _whole(optimizer: Optimizer, piece: Piece, states: list[Tensor], scalars: Scalars) -> None:
    """The update as expressions for torch.compile. The step is known to be applied."""
    grad = piece.grad.float() * scalars.multiplier  # widened first: a product in fp16 would overflow
    master = piece.exact()
    optimizer.update(master, grad, states, scalars)
    if piece.half:
        piece.weight.copy_(master)


def _predicated(optimizer: Optimizer, piece: Piece, states: list[Tensor], scalars: Scalars) -> None:
    """The same without reading the skip flag on the host: a skipped step writes the old values back.

    For torch.compile, which keeps none of these copies in memory.
    """
    grad = piece.grad.float() * scalars.multiplier
    old = piece.exact()
    new = old.clone()
    moved = [state.clone() for state in states]
    optimizer.update(new, grad, moved, scalars)
    skip = tensor_of(scalars.skip)
    for state, after in zip(states, moved, strict=True):
        state.copy_(torch.where(skip, state, after))
    new = torch.where(skip, old, new)
    if piece.master is not None:
        piece.master.copy_(new)
    if piece.half:
        piece.weight.copy_(new)
