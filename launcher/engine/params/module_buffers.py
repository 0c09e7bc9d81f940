"""A model's buffers (BatchNorm statistics and the like) as one transaction per step.

Owns their snapshot, their roll-back after a skipped step, and their values in evaluations, of all ranks.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

import launcher.engine.async_work as async_work
from launcher.engine.errors import UnusableError
from launcher.engine.names import named_buffers, named_modules
from launcher.engine.precision.op_lists import HALF, widen


class Buffers:
    """All buffers of a model, moved into one flat tensor per dtype so that each operation is one copy.

    Half-precision buffers become fp32 under every policy: statistics over many steps need it. `flat` has all
    of them; `statistics` those of `flat` that are running statistics, such as those of BatchNorm.
    """

    def __init__(self, model: nn.Module, group: async_work.Group) -> None:
        self._group = group
        # Of a buffer with several names one that says so is enough.
        statistics = {
            id(each) for m in model.modules() for key, each in m._buffers.items() if is_statistic(key)
        }
        by_kind: dict[tuple[torch.dtype, bool], list[Tensor]] = {}
        for buffer in named_buffers(model).values():
            dtype = torch.float32 if buffer.dtype in HALF else buffer.dtype
            kind = dtype, dtype.is_floating_point and id(buffer) in statistics
            by_kind.setdefault(kind, []).append(buffer)
        flat = {kind: _flatten(buffers, kind[0]) for kind, buffers in by_kind.items()}
        self.flat = list(flat.values())
        self.statistics = [each for (_, is_statistics), each in flat.items() if is_statistics]
        floats = [each for each in self.flat if each.is_floating_point()]
        self._others = [each for each in floats if not any(each is other for other in self.statistics)]
        self._before = [torch.empty_like(each) for each in self.flat]
        for module in model.modules():
            if module._buffers:
                _BUFFERS_OF[module] = weakref.ref(self)
                if _snapshot not in module._load_state_dict_post_hooks.values():
                    module.register_load_state_dict_post_hook(_snapshot)  # type: ignore[no-untyped-call]
        # Under which name in which module each is registered: a forward pass may register another one there.
        self._registered = [
            (f"{prefix}.{key}".lstrip("."), module, key, buffer)
            for prefix, module in named_modules(model)
            for key, buffer in module._buffers.items()
            if buffer is not None
        ]

    def tensors(self) -> list[Tensor]:
        """Everything held here, the snapshot included."""
        return [*self.flat, *self._before]

    def snapshot(self) -> None:
        """Remember the present values: the state to return to if the coming step is skipped.

        Called at the end of a step, after load_state_dict() of the model, and in `average`.
        """
        for before, flat in zip(self._before, self.flat, strict=True):
            before.copy_(flat)

    def restore_if(self, skipped: Tensor | bool) -> None:
        """Return to the snapshot where `skipped` (0-dim if it is on the device) is true; after `collect`."""
        if isinstance(skipped, Tensor):
            for before, flat in zip(self._before, self.flat, strict=True):
                torch.where(skipped, before, flat, out=flat)
        elif skipped:
            self.restore()

    def restore(self) -> None:
        """Return to the snapshot, even if a forward pass has replaced a buffer."""
        for _, module, key, buffer in self._registered:
            module._buffers[key] = buffer
        for before, flat in zip(self._before, self.flat, strict=True):
            flat.copy_(before)

    def average(self) -> None:
        """Replace running statistics by their mean over the ranks, other floats by those of rank 0.

        A collective: all ranks call it. Called before an evaluation, so that BatchNorm statistics are those
        of all samples (variances nearly: their mean leaves out how the means of the ranks differ), and all
        ranks evaluate the same model. Not called before a checkpoint, which keeps
        each rank's own: saving must not change the run. A buffer that is no statistic (a queue, a codebook, a
        mask) has a mean that no rank ever had: as DistributedDataParallel does, it takes rank 0's.
        """
        if self._group is not None:
            for flat in self.statistics:
                total = flat.double()  # exact for equal values: averaging twice changes nothing
                async_work.all_reduce(total, self._group)
                flat.copy_(total / dist.get_world_size(self._group))
            for flat in self._others:
                async_work.broadcast(flat.view(torch.uint8), self._group)  # as bytes: bit for bit
        self.snapshot()

    def collect(self) -> None:
        """Copy buffers that a forward pass has replaced back into flat memory: `self.mean = ...` does so.

        Raises UnusableError for another shape or dtype.
        """
        for name, module, key, buffer in self._registered:
            new = module._buffers.get(key)
            if new is buffer:
                continue
            # A half-precision forward pass makes half values of statistics that are fp32.
            fits = new is not None and new.shape == buffer.shape and widen(new).dtype == buffer.dtype
            if new is None or not fits:
                raise UnusableError(
                    f"buffer {name} ({buffer.dtype}, {tuple(buffer.shape)}) was replaced by "
                    f"{None if new is None else (new.dtype, tuple(new.shape))}. Only a buffer's values "
                    "may change: register it with its final shape and dtype."
                )
            buffer.copy_(new.detach())
            module._buffers[key] = buffer


# A model is copied and pickled with its hooks, which must not keep the snapshot of the original.
_BUFFERS_OF: weakref.WeakKeyDictionary[nn.Module, weakref.ref[Buffers]] = weakref.WeakKeyDictionary()


def _snapshot(module: nn.Module, incompatible_keys: object) -> None:
    """Remember what load_state_dict() has loaded: a skipped step would undo it."""
    if (reference := _BUFFERS_OF.get(module)) is not None and (buffers := reference()) is not None:
        buffers.snapshot()


def is_statistic(name: str) -> bool:
    """Whether a buffer of this name is a running statistic, whose mean over the ranks is that of all samples.

    torch's batch and instance norms have running_mean and running_var; others follow that convention.
    """
    return name.rpartition(".")[2].startswith("running_")


def _flatten(buffers: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """One flat tensor with the values of all, of which they become views."""
    flat = torch.cat([buffer.detach().reshape(-1).to(dtype) for buffer in buffers])
    parts = torch.split(flat, [buffer.numel() for buffer in buffers])
    for buffer, values in zip(buffers, parts, strict=True):
        buffer.data = values.view(buffer.shape)
    return flat
