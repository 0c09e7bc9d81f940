"""Checks of the GPUs of a machine: driver, kernels, and the state of each card.

Owns their thresholds. NVML is asked without CUDA; what needs CUDA runs in the process of its check.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from types import ModuleType
from typing import Any

from launcher.doctor.findings import FAILURE, Check, Finding, judged
from launcher.errors import counted
from launcher.os.cuda_driver import ask_driver, dotted, refuse_missing_kernels, refuse_unusable_driver
from launcher.telemetry.gpu.devices import Gpu, visible_gpus
from launcher.telemetry.gpu.readings import NvmlReader

GB = 1e9
IN_USE = 0.05  # of a card's memory: a desktop takes less
TENSOR_CORES, BF16 = (7, 0), (8, 0)  # the first compute capability that has them


def checks(gpus: int) -> list[Check]:
    """All checks of this file. `gpus` are visible."""
    broken = "The driver does not answer: see dmesg for Xid errors, and nvidia-smi."
    found = [Check("torch", kernels, 90.0, broken)]
    return [*found, Check("NVML", states, 20.0, broken)] if gpus else found


def kernels() -> Iterator[Finding]:
    """Whether this torch runs on these GPUs. Raises PreflightError, or torch's own error, where not."""
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
        for index in range(torch.cuda.device_count()):
            yield arithmetic(index, torch.cuda.get_device_properties(index))
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
    for gpu in visible_gpus(pynvml):
        yield from state(pynvml, gpu)


def state(nvml: ModuleType, gpu: Gpu) -> Iterator[Finding]:
    """Name, memory, other processes and memory errors of one GPU."""
    reader, label = NvmlReader(nvml, gpu.handle), f"GPU {gpu.index}"
    ask = partial(_ask, nvml, gpu)
    memory, processes = ask("MemoryInfo"), ask("ComputeRunningProcesses") or []
    value = f"{ask('Name')}, {memory.free / GB:.1f} of {memory.total / GB:.1f} GB free" if memory else "deaf"
    in_use = memory is not None and memory.used > IN_USE * memory.total
    others = f"{counted(len(processes), 'other process', 'es')}" if processes else "Something"
    advice = f"{others} of this GPU takes time and memory: nvidia-smi." if processes or in_use else ""
    yield judged(label, value, advice)
    errors = reader.counters().get("ecc_errors", 0.0)
    if errors:
        advice = "Values in its memory may be wrong: reset it, and replace it if they come again."
        yield judged(f"{label} memory", counted(round(errors), "uncorrected ECC error"), advice, FAILURE)


def _ask(nvml: ModuleType, gpu: Gpu, function: str) -> Any:
    """What NVML answers about a GPU; None where it does not."""
    with suppress(nvml.NVMLError, AttributeError):
        return getattr(nvml, f"nvmlDeviceGet{function}")(gpu.handle)


def arithmetic(index: int, about: Any) -> Finding:
    """What a GPU is and whether it computes fp16 fast; `about` are torch's properties of it."""
    capability = about.major, about.minor
    emulates = "" if capability >= BF16 else ", no bf16 (torch emulates it: slower than fp32)"
    slow = "Without tensor cores fp16 saves memory and bytes sent, but hardly time."
    value = f"compute capability {dotted(capability)}{emulates}"
    return judged(f"GPU {index} arithmetic", value, slow if capability < TENSOR_CORES else "")
