"""Which GPUs of this node are measured: those of the run's ranks, found by UUID.

Owns the way from a rank's device to NVML's handle. NVML ignores CUDA_VISIBLE_DEVICES and numbers GPUs by PCI
bus, CUDA by speed: a local rank or a CUDA index says nothing about NVML's index, only the UUID does.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType

MAX_SLICES = 8  # MIG slices of one GPU: at most 7 today


@dataclass(frozen=True)
class Rank:
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
    ranks: tuple[Rank, ...]
    is_sliced: bool  # used through MIG: other slices' processes are none of the run's business


@dataclass(frozen=True)
class _Entry:
    """A name by which CUDA knows a GPU or a slice of it."""

    uuid: str
    index: int
    handle: object  # of the whole GPU
    gpu_uuid: str


def gpus_of(nvml: ModuleType, ranks: Sequence[Rank], environ: Mapping[str, str]) -> list[Gpu]:
    """The GPUs of those ranks that run on this node, in rank order.

    If no rank uses a GPU: those that CUDA_VISIBLE_DEVICES shows. A slice (MIG) counts as its GPU, because
    power, clocks and temperature are those of the whole.
    """
    entries = list(_entries(nvml))
    if all(rank.gpu is None for rank in ranks):
        return _grouped((entry, None) for entry in visible(entries, environ.get("CUDA_VISIBLE_DEVICES")))
    by_uuid = {_bare(entry.uuid): entry for entry in entries}
    found = ((by_uuid.get(_bare(rank.gpu)), rank) for rank in ranks if rank.gpu is not None)
    return _grouped((entry, rank) for entry, rank in found if entry is not None)


def visible(entries: Sequence[_Entry], variable: str | None) -> list[_Entry]:
    """What a value of CUDA_VISIBLE_DEVICES shows: numbers, UUIDs or beginnings of UUIDs, GPUs or slices.

    As in CUDA, an entry that names nothing ends the list. Numbers are NVML's: CUDA's own under
    CUDA_DEVICE_ORDER=PCI_BUS_ID, and wherever all GPUs are equal.
    """
    whole = [entry for entry in entries if entry.uuid == entry.gpu_uuid]
    if variable is None:
        return whole
    shown = []
    for word in map(str.strip, variable.split(",")):
        if word.isdecimal():
            named = [entry for entry in whole if entry.index == int(word)]
        elif word.startswith(("GPU-", "MIG-")):
            named = [entry for entry in entries if entry.uuid.lower().startswith(word.lower())]
        else:
            break
        if len(named) != 1:
            break
        shown += named
    return shown


def _bare(uuid: str) -> str:
    return uuid.lower().removeprefix("gpu-").removeprefix("mig-")


def _grouped(found: Iterable[tuple[_Entry, Rank | None]]) -> list[Gpu]:
    """One `Gpu` for each physical GPU, in the order in which they are first named."""
    groups: dict[str, list[tuple[_Entry, Rank | None]]] = {}
    for entry, rank in found:
        groups.setdefault(entry.gpu_uuid, []).append((entry, rank))
    return [
        Gpu(
            index=members[0][0].index,
            uuid=uuid,
            handle=members[0][0].handle,
            ranks=tuple(rank for _, rank in members if rank is not None),
            is_sliced=any(entry.uuid != uuid for entry, _ in members),
        )
        for uuid, members in groups.items()
    ]


def _entries(nvml: ModuleType) -> Iterator[_Entry]:
    """Every GPU of the node, and every slice. One that does not answer is left out."""
    for index in range(nvml.nvmlDeviceGetCount()):
        with contextlib.suppress(nvml.NVMLError):
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            uuid = nvml.nvmlDeviceGetUUID(handle)
            yield _Entry(uuid, index, handle, uuid)
            yield from _slices(nvml, index, handle, uuid)


def _slices(nvml: ModuleType, index: int, handle: object, uuid: str) -> Iterator[_Entry]:
    with contextlib.suppress(nvml.NVMLError, AttributeError):  # most GPUs know no MIG, nor do old libraries
        if not nvml.nvmlDeviceGetMigMode(handle)[0]:
            return
        for number in range(MAX_SLICES):
            with contextlib.suppress(nvml.NVMLError_NotFound):
                part = nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, number)
                yield _Entry(nvml.nvmlDeviceGetUUID(part), index, handle, uuid)
