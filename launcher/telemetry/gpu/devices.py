"""Which GPUs of this node are measured: those of the run's ranks, found by UUID.

Owns the way from a rank's device to NVML's handle. NVML ignores CUDA_VISIBLE_DEVICES and numbers GPUs by PCI
bus, CUDA by speed: a local rank or a CUDA index says nothing about NVML's index, only the UUID does.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import ModuleType

MAX_SLICES = 8  # MIG slices of one GPU: at most 7 today


@dataclass(frozen=True)
class RankDevice:
    """What NVML needs to know of a rank."""

    number: int
    gpu: str | None  # UUID of its CUDA device, with or without "GPU-" or "MIG-"; None on a CPU
    pid: int


@dataclass(frozen=True)
class Gpu:
    """A physical GPU that the run uses, with the ranks on it."""

    index: int  # NVML's, as nvidia-smi shows it
    uuid: str
    handle: object
    ranks: tuple[RankDevice, ...] = ()
    is_sliced: bool = False  # used through MIG: other slices' processes are none of the run's business


Named = tuple[str, Gpu]  # the UUID by which CUDA knows a GPU or a slice of it, and the whole GPU


def gpus_of(nvml: ModuleType, ranks: Sequence[RankDevice], environ: Mapping[str, str]) -> list[Gpu]:
    """The GPUs of those ranks that run on this node, in rank order.

    If no rank uses a GPU: those that CUDA_VISIBLE_DEVICES shows. A slice (MIG) counts as its GPU, because
    power, clocks and temperature are those of the whole.
    """
    entries = list(_entries(nvml))
    if all(rank.gpu is None for rank in ranks):
        return _grouped((gpu, ()) for gpu in visible(entries, environ.get("CUDA_VISIBLE_DEVICES")))
    by_uuid = {_bare(uuid): gpu for uuid, gpu in entries}
    found = ((by_uuid.get(_bare(rank.gpu)), rank) for rank in ranks if rank.gpu is not None)
    return _grouped((gpu, (rank,)) for gpu, rank in found if gpu is not None)


def visible(entries: Sequence[Named], variable: str | None) -> list[Gpu]:
    """What a value of CUDA_VISIBLE_DEVICES shows: numbers, UUIDs or beginnings of UUIDs, GPUs or slices.

    As in CUDA, an entry that names nothing ends the list. Numbers are NVML's: CUDA's own under
    CUDA_DEVICE_ORDER=PCI_BUS_ID, and wherever all GPUs are equal.
    """
    whole = [gpu for _, gpu in entries if not gpu.is_sliced]
    if variable is None:
        return whole
    shown = []
    for word in map(str.strip, variable.split(",")):
        if word.isdecimal():
            named = [gpu for gpu in whole if gpu.index == int(word)]
        elif word.startswith(("GPU-", "MIG-")):
            named = [gpu for uuid, gpu in entries if uuid.lower().startswith(word.lower())]
        else:
            break
        if len(named) != 1:
            break
        shown += named
    return shown


def _bare(uuid: str) -> str:
    return uuid.lower().removeprefix("gpu-").removeprefix("mig-")


def _grouped(found: Iterable[tuple[Gpu, tuple[RankDevice, ...]]]) -> list[Gpu]:
    """One `Gpu` for each physical GPU, in the order in which they are first named."""
    groups: dict[str, Gpu] = {}
    for gpu, ranks in found:
        before = groups.get(gpu.uuid, gpu)
        is_sliced = before.is_sliced or gpu.is_sliced
        groups[gpu.uuid] = replace(before, ranks=(*before.ranks, *ranks), is_sliced=is_sliced)
    return list(groups.values())


def _entries(nvml: ModuleType) -> Iterator[Named]:
    """Every GPU of the node, and every slice. One that does not answer is left out."""
    for index in range(nvml.nvmlDeviceGetCount()):
        with contextlib.suppress(nvml.NVMLError):
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            gpu = Gpu(index, nvml.nvmlDeviceGetUUID(handle), handle)
            yield gpu.uuid, gpu
            yield from _slices(nvml, replace(gpu, is_sliced=True))


def _slices(nvml: ModuleType, gpu: Gpu) -> Iterator[Named]:
    with contextlib.suppress(nvml.NVMLError, AttributeError):  # most GPUs know no MIG, nor do old libraries
        if not nvml.nvmlDeviceGetMigMode(gpu.handle)[0]:
            return
        for number in range(MAX_SLICES):
            with contextlib.suppress(nvml.NVMLError_NotFound):
                part = nvml.nvmlDeviceGetMigDeviceHandleByIndex(gpu.handle, number)
                yield nvml.nvmlDeviceGetUUID(part), gpu
