"""Checks of the GPUs of a machine: driver, kernels, state of each card, and what it does under load.

Owns their thresholds. NVML is asked without CUDA; what needs CUDA runs in the process of its check.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from itertools import permutations
from types import ModuleType
from typing import Any

from launcher.doctor.findings import FAILURE, NOTE, Check, Finding, judged
from launcher.errors import counted
from launcher.process.torch_build import ask_driver, dotted, refuse_missing_kernels, refuse_unusable_driver
from launcher.telemetry.gpu.conditions import FAULTS
from launcher.telemetry.gpu.devices import Gpu, gpus_of
from launcher.telemetry.gpu.readings import REASONS, GpuLostError, NvmlReader

GB = 1e9
GEMM_SIZE, GEMM_S = 4096, 0.7  # 134 MB of matrices; long enough for the clocks to rise from idle
LOW_CLOCK = 0.7  # of the highest: below, power or heat limits the card more than a full load does
IN_USE = 0.05  # of a card's memory: a desktop takes less
# Of a lane of PCIe in one direction, by generation, with its encoding (PCI Express Base Specification).
LANE_BYTES_PER_S = {1: 0.25e9, 2: 0.5e9, 3: 0.985e9, 4: 1.97e9, 5: 3.94e9, 6: 7.56e9}
TENSOR_CORES, BF16 = (7, 0), (8, 0)  # the first compute capability that has them


def checks(gpus: int) -> list[Check]:
    """All checks of this file. `gpus` are visible."""
    broken = "The driver does not answer: see dmesg for Xid errors, and nvidia-smi."
    found = [Check("torch", kernels, 90.0, broken)]
    if gpus:
        found.append(Check("NVML", states, 20.0, broken))
        found.append(Check("GPU under load", under_load, 60.0 + 5.0 * gpus, broken))
    return found


def kernels() -> Iterator[Finding]:
    """Whether this torch runs on these GPUs. Raises PreflightError where it does not."""
    import torch

    driver = ask_driver()
    on_gpu = torch.cuda.is_available()
    refuse_unusable_driver(0, torch.device("cuda" if on_gpu else "cpu"))
    for index in range(torch.cuda.device_count()):
        refuse_missing_kernels(index, torch.device("cuda", index))
    if on_gpu:
        nccl = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
        yield Finding("CUDA", f"torch's {torch.version.cuda}, driver's {dotted(driver.supported)}")
        yield Finding("NCCL", nccl)
    elif driver.num_gpus:
        advice = "Install a build of torch for CUDA: remove .venv, and scripts/run sets it up again."
        value = f"{counted(driver.num_gpus, 'GPU')}, but torch {torch.__version__} is built for the CPU"
        yield judged("GPU", value, advice)
    elif (shown := os.environ.get("CUDA_VISIBLE_DEVICES", "-1")) not in ("", "-1"):
        advice = "Unset it, or give numbers or UUIDs that nvidia-smi -L lists."
        yield judged("GPU", f"CUDA_VISIBLE_DEVICES={shown} shows none", advice)
    else:
        yield Finding("GPU", "none: workers train on the CPU, which emulates fp16, for trying out and tests")


def states() -> Iterator[Finding]:
    """What NVML says of each visible GPU at rest."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        yield judged("NVML", str(error), "GPUs are not watched; in a container add the utility capability.")
        return
    with suppress(pynvml.NVMLError):
        yield Finding("driver", str(pynvml.nvmlSystemGetDriverVersion()))
    for gpu in gpus_of(pynvml, [], os.environ):
        try:
            yield from state(pynvml, gpu)
        except GpuLostError as error:
            yield judged(f"GPU {gpu.index}", str(error), "It must be reset or replaced: see dmesg.", FAILURE)


def state(nvml: ModuleType, gpu: Gpu) -> Iterator[Finding]:
    """Name, memory, other processes, memory errors, persistence and NVLinks of one GPU.

    Raises GpuLostError.
    """
    reader, label = NvmlReader(nvml, gpu.handle), f"GPU {gpu.index}"
    ask = partial(_ask, nvml, gpu)
    memory, processes = ask("MemoryInfo"), reader.processes() or []
    value = f"{ask('Name')}, {memory.free / GB:.1f} of {memory.total / GB:.1f} GB free" if memory else "deaf"
    in_use = memory is not None and memory.used > IN_USE * memory.total
    others = f"{counted(len(processes), 'other process', 'es')}" if processes else "Something"
    advice = f"{others} of this GPU takes time and memory: nvidia-smi." if processes or in_use else ""
    yield judged(label, value, advice)
    errors = reader.counters().get("ecc_errors", 0.0)
    if errors:
        advice = "Values in its memory may be wrong: reset it, and replace it if they come again."
        yield judged(f"{label} memory", counted(round(errors), "uncorrected ECC error"), advice, FAILURE)
    _, uncorrectable, pending, failed = ask("RemappedRows") or (0, 0, 0, 0)
    if pending or failed:
        value = "a row remapping has failed" if failed else f"{counted(uncorrectable, 'row')} to be remapped"
        advice = "Replace it." if failed else "Reset it (nvidia-smi --gpu-reset) to replace the row."
        yield judged(f"{label} memory", value, advice, FAILURE if failed else NOTE)
    if ask("PersistenceMode") == 0:
        advice = "The driver is loaded anew for each run, which takes seconds: sudo nvidia-smi -pm 1."
        yield judged(f"{label} persistence", "off", advice)
    links = [ask("NvLinkState", link) for link in range(getattr(nvml, "NVML_NVLINK_MAX_LINKS", 18))]
    if any(up is not None for up in links):
        down = f"{links.count(0)} of its NVLinks are down: see nvidia-smi nvlink -s." if 0 in links else ""
        yield judged(f"{label} NVLink", f"{links.count(1)} links up", down)


def _ask(nvml: ModuleType, gpu: Gpu, function: str, *arguments: object) -> Any:
    """What NVML answers about a GPU; None where it does not."""
    with suppress(nvml.NVMLError, AttributeError):
        return getattr(nvml, f"nvmlDeviceGet{function}")(gpu.handle, *arguments)


def slowest_link(nvml: ModuleType) -> float:
    """Bytes per second, one way, of the slowest PCIe link of the visible GPUs; 0 where NVML does not say."""
    with suppress(nvml.NVMLError):
        nvml.nvmlInit()
        limits = [NvmlReader(nvml, gpu.handle).limits for gpu in gpus_of(nvml, [], os.environ)]
        lanes = [(int(most.get("pcie_gen", 0)), most.get("pcie_width", 0.0)) for most in limits]
        return min((LANE_BYTES_PER_S.get(gen, 0.0) * width for gen, width in lanes), default=0.0)
    return 0.0


def under_load() -> Iterator[Finding]:
    """Clocks, reasons for lower ones, and the link to the host of each GPU while it multiplies matrices."""
    import pynvml
    import torch

    pynvml.nvmlInit()
    by_uuid = {gpu.uuid.removeprefix("GPU-"): gpu for gpu in gpus_of(pynvml, [], os.environ)}
    for index in range(torch.cuda.device_count()):
        about = torch.cuda.get_device_properties(index)
        matrix = torch.ones(GEMM_SIZE, GEMM_SIZE, dtype=torch.float16, device=f"cuda:{index}")
        matrix @ matrix  # loads cuBLAS
        torch.cuda.synchronize(index)
        began, count = time.perf_counter(), 0
        while time.perf_counter() < began + GEMM_S:
            for _ in range(10):
                matrix @ matrix
            count += 10
            torch.cuda.synchronize(index)
        rate = 2 * GEMM_SIZE**3 * count / (time.perf_counter() - began)
        for _ in range(20):  # still busy while NVML is asked
            matrix @ matrix
        gpu = by_uuid.get(str(about.uuid).removeprefix("GPU-"))
        yield from _arithmetic(index, about, rate)
        if gpu is not None:
            yield from loaded(pynvml, gpu)
    yield from peers(torch.cuda.device_count(), torch.cuda.can_device_access_peer)


def peers(gpus: int, can_access: Callable[[int, int], bool]) -> Iterator[Finding]:
    """How many GPUs can copy to each other directly."""
    ways = list(permutations(range(gpus), 2))
    direct = sum(can_access(*way) for way in ways)
    if ways:
        value = f"{direct} of {counted(len(ways), 'way')} between GPUs"
        yield Finding("peer access", value + ("" if direct else ": copies go through the host's memory"))


def _arithmetic(index: int, about: Any, rate: float) -> Iterator[Finding]:
    capability = about.major, about.minor
    has = [f"compute capability {dotted(capability)}", f"{rate / 1e12:.0f} TFLOP/s in fp16"]
    if capability < BF16:
        has.append("no bf16 (torch emulates it: slower than fp32)")
    slow = "Without tensor cores fp16 saves memory and bytes on the wire, but hardly time."
    yield judged(f"GPU {index} arithmetic", ", ".join(has), slow if capability < TENSOR_CORES else "")


def loaded(nvml: ModuleType, gpu: Gpu) -> Iterator[Finding]:
    """The clocks and the link of a GPU that is busy now."""
    reader = NvmlReader(nvml, gpu.handle)
    now, most = reader.momentary(), reader.limits
    label = f"GPU {gpu.index}"
    highest = _ask(nvml, gpu, "MaxClockInfo", nvml.NVML_CLOCK_SM) or 0
    reasons = [name for name, bit in REASONS.items() if int(now.get("reasons", 0)) & bit]
    faults = sorted({*reasons} & {*FAULTS})
    why = f" ({', '.join(reasons)})" if reasons else ""
    value = f"{now.get('sm_clock_mhz', 0):.0f} of {highest} MHz{why}"
    low = highest and now.get("sm_clock_mhz", highest) < LOW_CLOCK * highest
    advice = "Check its cooling, its power supply and nvidia-smi -q -d PERFORMANCE." if faults or low else ""
    yield judged(f"{label} clock", value, advice)
    if "pcie_gen" in now and "pcie_width" in now:
        is_less = any(now[key] < most.get(key, 0) for key in ("pcie_gen", "pcie_width"))
        value = f"generation {now['pcie_gen']:.0f} x{now['pcie_width']:.0f}"
        could = f"generation {most.get('pcie_gen', 0):.0f} x{most.get('pcie_width', 0):.0f}"
        advice = f"It could have {could}: reseat it; check slot, riser and BIOS." if is_less else ""
        yield judged(f"{label} PCIe", value, advice)
