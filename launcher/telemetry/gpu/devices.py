"""Which GPUs of this node are measured: those of the run's ranks, found by UUID.

Owns the way from a rank's device to NVML's handle. NVML ignores CUDA_VISIBLE_DEVICES and numbers GPUs by PCI
bus, CUDA by speed: a local rank or a CUDA index says nothing about NVML's index, only the UUID does.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import ModuleType


@dataclass(frozen=True)
class RankDevice:
    """What NVML needs to know of a rank."""

    number: int
    gpu: str | None  # UUID of its CUDA device, with or without "GPU-"; None on a CPU


@dataclass(frozen=True)
class Gpu:
    """A physical GPU that the run uses, with the ranks on it."""

    index: int  # NVML's, as nvidia-smi shows it
    uuid: str
    handle: object
    ranks: tuple[RankDevice, ...] = ()


def gpus_of(nvml: ModuleType, ranks: Sequence[RankDevice], environ: Mapping[str, str]) -> list[Gpu]:
    """The GPUs of those ranks that run on this node, in rank order.

    If no rank uses a GPU: those that CUDA_VISIBLE_DEVICES shows. Slices of a GPU (MIG) are not measured.
    """
    all_gpus = list(_all_gpus(nvml))
    if all(rank.gpu is None for rank in ranks):
        return _grouped((gpu, ()) for gpu in visible(all_gpus, environ.get("CUDA_VISIBLE_DEVICES")))
    by_uuid = {_bare(gpu.uuid): gpu for gpu in all_gpus}
    found = ((by_uuid.get(_bare(rank.gpu)), rank) for rank in ranks if rank.gpu is not None)
    return _grouped((gpu, (rank,)) for gpu, rank in found if gpu is not None)


def visible(all_gpus: Sequence[Gpu], variable: str | None) -> list[Gpu]:
    """What a value of CUDA_VISIBLE_DEVICES shows: numbers, UUIDs or beginnings of UUIDs.

    As in CUDA, an entry that names nothing ends the list. Numbers are NVML's: CUDA's own under
    CUDA_DEVICE_ORDER=PCI_BUS_ID, and wherever all GPUs are equal.
    """
    if variable is None:
        return list(all_gpus)
    shown = []
    for word in map(str.strip, variable.split(",")):
        if word.isdecimal():
            named = [gpu for gpu in all_gpus if gpu.index == int(word)]
        else:
            is_uuid = word.startswith("GPU-")
            named = [gpu for gpu in all_gpus if is_uuid and gpu.uuid.lower().startswith(word.lower())]
        if len(named) != 1:
            break
        shown += named
    return shown


def _bare(uuid: str) -> str:
    return uuid.lower().removeprefix("gpu-")


def _grouped(found: Iterable[tuple[Gpu, tuple[RankDevice, ...]]]) -> list[Gpu]:
    """One `Gpu` for each physical GPU, in the order in which they are first named."""
    groups: dict[str, Gpu] = {}
    for gpu, ranks in found:
        before = groups.get(gpu.uuid, gpu)
        groups[gpu.uuid] = replace(before, ranks=(*before.ranks, *ranks))
    return list(groups.values())


def _all_gpus(nvml: ModuleType) -> Iterator[Gpu]:
    """Every GPU of the node. One that does not answer is left out."""
    for index in range(nvml.nvmlDeviceGetCount()):
        with contextlib.suppress(nvml.NVMLError):
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            yield Gpu(index, nvml.nvmlDeviceGetUUID(handle), handle)
