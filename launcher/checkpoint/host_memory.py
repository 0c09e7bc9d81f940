"""Asynchronous copies of device tensors to host memory, in few large transfers.

Owns the reused host memory and the stream of the copies.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from launcher.engine.names import extent

ALIGNMENT_BYTES = 64  # a multiple of every element size, as offsets of bytes viewed as a wider dtype must be


@dataclass(frozen=True)
class Copies:
    """Tensors by name, views of a PinnedStagingBuffer. Their values are valid once `wait` returns."""

    tensors: dict[str, Tensor]
    ready: torch.cuda.Event | None = None
    _sources: tuple[Tensor, ...] = field(default=(), repr=False)  # kept alive until they are copied

    def wait(self) -> None:
        """Wait until the device has made the copies. Callable from any thread."""
        if self.ready is not None:
            self.ready.synchronize()


class PinnedStagingBuffer:
    """Memory for one set of copies at a time, pinned where they come from a GPU.

    It grows to the largest set and is reused, because pinning takes longer than a copy. torch rounds pinned
    blocks up to a power of two.
    """

    def __init__(self) -> None:
        self._bytes = torch.empty(0, dtype=torch.uint8)
        self._blocks: list[Tensor] = []  # of what was gathered, in the order of the calls of `allocate`
        self._given = 0  # of them, since the latest `copy`
        self._stream: torch.cuda.Stream | None = None

    def allocate(self, numel: int, pinned: bool) -> Tensor:
        """fp32 [numel] for values that belong to the next set of copies, and need no copy then."""
        number, self._given = self._given, self._given + 1
        if number == len(self._blocks):
            self._blocks.append(torch.empty(0))
        if len(self._blocks[number]) < numel:
            self._blocks[number] = torch.empty(0)  # freed first, so that both never exist at once
            self._blocks[number] = torch.empty(numel, dtype=torch.float32, pin_memory=pinned)
        return self._blocks[number][:numel]

    def copy(self, tensors: Mapping[str, Tensor]) -> Copies:
        """Copy tensors of any strides from any device. Overwrites the result of the previous call.

        Views of the same memory, such as those of a flat buffer, are copied as one block, of which the
        results are views. Copies from a GPU are asynchronous. Tensors in memory of `allocate` stay there.
        """
        self._given = 0
        blocks = {block.untyped_storage()._cdata for block in self._blocks}
        here = {name: t.detach() for name, t in tensors.items() if t.untyped_storage()._cdata in blocks}
        stretches = _stretches({name: tensor for name, tensor in tensors.items() if name not in here})
        gpu = next((s.flat.device for s in stretches if s.flat.is_cuda), None)
        self._reserve(sum(stretch.size_bytes for stretch in stretches), pinned=gpu is not None)
        homes = list(self._homes(stretches))
        ready = self._copy_on_side_stream(stretches, homes, gpu) if gpu is not None else None
        if gpu is None:
            for stretch, home in zip(stretches, homes, strict=True):
                home.copy_(stretch.flat)
        copied = here | {
            name: home.as_strided(view.shape, view.stride(), home.storage_offset() + offset)
            for stretch, home in zip(stretches, homes, strict=True)
            for name, view, offset in stretch.members()
        }
        sources = tuple(stretch.flat for stretch in stretches)
        return Copies({name: copied[name] for name in tensors}, ready, sources)

    def _reserve(self, size_bytes: int, pinned: bool) -> None:
        if len(self._bytes) < size_bytes:
            self._bytes = torch.empty(0, dtype=torch.uint8)  # freed first, so that both never exist at once
            self._bytes = torch.empty(size_bytes, dtype=torch.uint8, pin_memory=pinned)

    def _homes(self, stretches: list[_SharedStorageRange]) -> Iterator[Tensor]:
        """A flat tensor in this memory for each stretch, of its dtype and length."""
        start = 0
        for stretch in stretches:
            used = stretch.flat.numel() * stretch.flat.element_size()
            yield self._bytes[start : start + used].view(stretch.flat.dtype)
            start += stretch.size_bytes

    def _copy_on_side_stream(
        self, stretches: list[_SharedStorageRange], homes: list[Tensor], device: torch.device
    ) -> torch.cuda.Event:
        """Queue the copies after the work already queued, concurrent with later work."""
        self._stream = self._stream or torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._stream.wait_stream(torch.cuda.current_stream(device))
        # blocking: the thread that waits for it sleeps and does not spin beside the training.
        ready = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(self._stream):
            for stretch, home in zip(stretches, homes, strict=True):
                home.copy_(stretch.flat, non_blocking=True)
            ready.record()
        return ready


@dataclass(frozen=True)
class _SharedStorageRange:
    """The flat range from the first to the last element of tensors that share memory."""

    flat: Tensor
    views: dict[str, Tensor]

    @property
    def size_bytes(self) -> int:
        """Size in host memory, rounded up so that the next stretch is aligned."""
        used = self.flat.numel() * self.flat.element_size()
        return -(-used // ALIGNMENT_BYTES) * ALIGNMENT_BYTES

    def members(self) -> Iterator[tuple[str, Tensor, int]]:
        """Name, tensor and the offset of its first element."""
        start = int(self.flat.storage_offset())
        for name, view in self.views.items():
            yield name, view, int(view.storage_offset()) - start if view.numel() else 0


def _stretches(tensors: Mapping[str, Tensor]) -> list[_SharedStorageRange]:
    by_memory: dict[object, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        key = (tensor.untyped_storage()._cdata if tensor.numel() else None, tensor.dtype)
        by_memory.setdefault(key, {})[name] = tensor.detach()
    return [_stretch(views) for views in by_memory.values()]


def _stretch(views: dict[str, Tensor]) -> _SharedStorageRange:
    first = next(iter(views.values()))
    if not first.numel():
        return _SharedStorageRange(first.reshape(-1)[:0].cpu(), views)
    start = min(view.storage_offset() for view in views.values())
    end = max(view.storage_offset() + extent(view) for view in views.values())
    return _SharedStorageRange(first.as_strided((end - start,), (1,), start), views)
