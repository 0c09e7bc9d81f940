"""Which GPUs of this node are measured: those of the run's ranks, found by UUID.

NVML ignores CUDA_VISIBLE_DEVICES and numbers GPUs by PCI bus, CUDA by speed: a local rank or a CUDA index
says nothing about NVML's index, only the UUID does.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from types import ModuleType


@dataclass(frozen=True)
class Gpu:
    """A physical GPU, with the ranks of the run on it."""

    index: int  # NVML's, as nvidia-smi shows it
    uuid: str
    handle: object
    ranks: tuple[int, ...] = ()

    def __str__(self) -> str:
        ranks = f", rank {', '.join(map(str, self.ranks))}" if self.ranks else ""
        return f"GPU {self.index} ({self.uuid}{ranks})"


def gpus_of(nvml: ModuleType, uuids: Sequence[str | None]) -> list[Gpu]:
    """The GPUs of this node that ranks use, in rank order. Slices of a GPU (MIG) are not measured.

    `uuids` has the UUID of each rank's CUDA device, with or without "GPU-", and None for a rank on a CPU. If
    no rank uses a GPU: those that CUDA_VISIBLE_DEVICES shows.
    """
    ranks: dict[str, tuple[int, ...]] = {}
    for rank, uuid in enumerate(uuids):
        if uuid is not None:
            ranks[_bare(uuid)] = (*ranks.get(_bare(uuid), ()), rank)
    if not ranks:
        return visible_gpus(nvml)
    used = [gpu for gpu in _all_gpus(nvml) if _bare(gpu.uuid) in ranks]
    return sorted((replace(gpu, ranks=ranks[_bare(gpu.uuid)]) for gpu in used), key=lambda gpu: gpu.ranks)


def visible_gpus(nvml: ModuleType) -> list[Gpu]:
    """The GPUs that CUDA_VISIBLE_DEVICES names, by NVML's numbers or by UUID; all without the variable."""
    every, names = list(_all_gpus(nvml)), os.environ.get("CUDA_VISIBLE_DEVICES")
    if names is None:
        return every
    shown = {name.strip() for name in names.split(",")}
    return [gpu for gpu in every if {str(gpu.index), gpu.uuid} & shown]


def _bare(uuid: str) -> str:
    return uuid.lower().removeprefix("gpu-")


def _all_gpus(nvml: ModuleType) -> Iterator[Gpu]:
    """Every GPU of the node. One that does not answer is left out."""
    for index in range(nvml.nvmlDeviceGetCount()):
        with contextlib.suppress(nvml.NVMLError):
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            yield Gpu(index, nvml.nvmlDeviceGetUUID(handle), handle)
