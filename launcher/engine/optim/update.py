"""The update of masters and weights over flat memory, by torch's fused kernels.

Owns the optimizer's states. One pass in chunks: widen a chunk of the gradient to fp32 and multiply it, call
the kernel, round the masters to the half weights. The gradient is never written back unscaled, which fp16
storage would flush. A skipped step changes nothing: a host that knows returns, on a GPU the kernels read the
flag. On a CPU set THP_MEM_ALLOC_ENABLE=1 before torch is imported: updates stream faster through huge pages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from launcher.engine.grads.zero1 import Zero1
from launcher.engine.optim.optimizers import KernelScalars, Optimizer
from launcher.engine.params.flat_buffers import Shard
from launcher.engine.params.flat_params import GroupSlices
from launcher.engine.params.param_groups import GroupOptions
from launcher.engine.state import check_forms

Collect = Callable[[Sequence[Tensor]], dict[str, Tensor]]  # Zero1.gather_full
CHUNK = 1 << 19  # elements on a CPU: 2 MB of widened gradient stay in cache; smaller ones cost more calls
DEVICE_CHUNK = 1 << 25  # elements on a GPU: 128 MB, less than the activations that are free by then


class StepScalars(NamedTuple):
    """What a step has decided for its update: numbers of the host, or 0-dim tensors on the device.

    `multiplier` (fp32) turns the reduced gradient into the clipped mean gradient; `lr` is fp64; `applied`
    counts the applied steps, this one included; `skip` forbids writing.
    """

    multiplier: Any
    lr: Any
    applied: Any
    skip: Any


@dataclass
class _Batch:
    """What one call of a kernel updates: slices of shards that have the same learning rate and decay.

    `states` by state, then by part. `widened` takes the gradients in fp32 on a CPU, where mapping new memory
    costs more than the pass; it is empty on a GPU.
    """

    optimizer: Optimizer  # with the weight decay of these parts
    group: int  # index of their learning rate
    scratch: Tensor | None  # [chunk] fp32, shared by all batches; None on a GPU
    states: list[list[Tensor]]
    parts: list[Shard] = field(default_factory=list)
    widened: list[Tensor] = field(default_factory=list)
    numel: int = 0

    def add(self, part: Shard, states: Sequence[Tensor]) -> None:
        """Update this part, too, which has these states."""
        end = self.numel + len(part.weight)
        if self.scratch is not None:
            self.widened.append(self.scratch[self.numel : end])
        self.parts.append(part)
        for tensors, state in zip(self.states, states, strict=True):
            tensors.append(state)
        self.numel = end

    def update(self, multiplier: Tensor | float, scalars: KernelScalars) -> None:
        """Write masters, states and weights; weights unchanged in a step that the kernel skips."""
        masters = [part.main_params() for part in self.parts]
        self.optimizer.update(masters, self._mean_gradients(multiplier), self.states, scalars)
        half = [(part.weight, master) for part, master in zip(self.parts, masters, strict=True) if part.half]
        if half:
            torch._foreach_copy_([weight for weight, _ in half], [master for _, master in half])

    def _mean_gradients(self, multiplier: Tensor | float) -> list[Tensor]:
        """The clipped mean gradients, fp32, in separate memory.

        Not by the kernels' `grad_scale`: they would write the gradients back, and divide instead.
        """
        if isinstance(multiplier, Tensor):
            # A 1-dim factor: with a 0-dim fp32 one the product would be computed in fp16, and overflow.
            factor = multiplier.view(1)
            return [torch.mul(part.grad, factor) for part in self.parts]
        torch._foreach_copy_(self.widened, [part.grad for part in self.parts])
        torch._foreach_mul_(self.widened, multiplier)
        return self.widened


class Updater:
    """Runs an optimizer over shards. Holds the optimizer's states, flat, fp32, zero at the start.

    Parameter groups (`options`) are slices of adjacent elements, by shard, each of which is in a call of its
    own within the pass.
    """

    def __init__(
        self,
        shards: Sequence[Shard],
        optimizer: Optimizer,
        options: Sequence[GroupOptions] = (),
        group_slices: Sequence[GroupSlices] = (),
    ) -> None:
        self.optimizer = optimizer
        self.shards = list(shards)
        device = self.shards[0].weight.device
        self.states = [  # by shard, then by state
            [torch.zeros(len(shard.weight), dtype=torch.float32, device=device) for _ in optimizer.states]
            for shard in self.shards
        ]
        options = options or (GroupOptions(),)
        self._lr_scales = [each.lr_scale for each in options]
        # On the device the rates of all groups are computed at once, in as many kernels as for one.
        self._scales_on_device: Tensor | None = None  # None where there is one group, with the rate itself
        if self._lr_scales != [1.0]:
            self._scales_on_device = torch.tensor(self._lr_scales, dtype=torch.float64).to(device)
        whole: list[GroupSlices] = [{0: [slice(0, len(shard.weight))]} for shard in self.shards]
        self._batches = [
            batch
            for group, own in enumerate(options)
            for batch in self._batches_of(group, own, group_slices or whole)
        ]

    def _batches_of(
        self, group: int, options: GroupOptions, group_slices: Sequence[GroupSlices]
    ) -> Iterator[_Batch]:
        """All elements of a group in order, in batches of up to a chunk."""
        optimizer, on_cpu = self.optimizer, self.shards[0].weight.is_cpu
        if options.weight_decay is not None:
            optimizer = replace(optimizer, weight_decay=options.weight_decay)
        numel = sum(each.stop - each.start for slices in group_slices for each in slices.get(group, []))
        chunk = min(numel, CHUNK if on_cpu else DEVICE_CHUNK)
        scratch = torch.empty(chunk, dtype=torch.float32) if on_cpu else None
        batch = _Batch(optimizer, group, scratch, [[] for _ in optimizer.states])
        for shard, states, slices in zip(self.shards, self.states, group_slices, strict=True):
            for elements in slices.get(group, []):
                start = elements.start
                while start < elements.stop:  # a part ends with its slice, or where the batch is full
                    part = slice(start, min(start + chunk - batch.numel, elements.stop))
                    batch.add(shard.part(part), [state[part] for state in states])
                    start = part.stop
                    if batch.numel == chunk:
                        yield batch
                        batch = _Batch(optimizer, group, scratch, [[] for _ in optimizer.states])
        if batch.parts:
            yield batch

    def step(self, scalars: StepScalars) -> None:
        """Apply one update to all shards, or write nothing if `scalars.skip` is true."""
        if scalars.skip is True:
            return
        by_group = self._kernel_scalars(scalars)
        for batch in self._batches:
            batch.update(scalars.multiplier, by_group[batch.group])

    def _kernel_scalars(self, scalars: StepScalars) -> list[KernelScalars]:
        """Return what each group's kernel reads. A GPU's takes the rate in fp32, a CPU's in fp64."""
        if not isinstance(scalars.lr, Tensor):
            return [KernelScalars(scalars.lr * scale, scalars.applied, None) for scale in self._lr_scales]
        rates = scalars.lr.view(1)
        if self._scales_on_device is not None:
            rates = scalars.lr * self._scales_on_device
        applied, found_inf = scalars.applied.float(), scalars.skip.float()
        own = rates if rates.is_cpu else rates.float()
        return [KernelScalars(rate, applied, found_inf) for rate in own.unbind()]

    def named_states(self, collect: Collect) -> dict[str, Tensor]:
        """fp32 values by `state/parameter`, by way of `collect`: a collective where they are sharded."""
        return {
            f"{state}/{name}": value
            for position, state in enumerate(self.optimizer.states)
            for name, value in collect([states[position] for states in self.states]).items()
        }

    def prepare_load(self, zero1: Zero1, named: Mapping[str, Tensor], updated: bool) -> Callable[[], None]:
        """What takes these states, by `state/parameter`. Raises ValueError for those of another optimizer."""
        expected = {
            f"{state}/{name}": form for state in self.optimizer.states for name, form in zero1.forms.items()
        }
        check_forms("optimizer states", expected, named)

        def load() -> None:
            for position, state in enumerate(self.optimizer.states):
                zero1.scatter(named, [states[position] for states in self.states], f"{state}/")

        return load

    def tensors(self) -> list[Tensor]:
        """All states."""
        return [state for states in self.states for state in states]
