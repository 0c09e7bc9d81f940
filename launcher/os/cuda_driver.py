"""Whether this torch, the driver and the GPUs fit, so that a run does not train on the CPU by mistake.

Owns what CUDA's driver is asked without torch. Imports no torch until it is asked about it.
"""

from __future__ import annotations

import ctypes
import os
import uuid
from typing import TYPE_CHECKING, NamedTuple

from launcher.errors import PreflightError, counted

if TYPE_CHECKING:
    import torch

Capability = tuple[int, int]  # CUDA's compute capability: (7, 0) is a V100
NO_DEVICE = 100  # the one CUresult by which the driver says that there is no GPU, or that all are hidden
HIDE = "To train on the CPU, hide the GPUs: CUDA_VISIBLE_DEVICES= in the environment."


def refuse_unusable_driver(rank: int, device: torch.device) -> None:
    """Raise PreflightError where a torch for CUDA sees no GPU because the driver fails, or is too old for it.

    Otherwise torch only warns, and the job trains on the CPU.
    """
    import torch

    if device.type == "cuda" or torch.version.cuda is None:
        return
    found = ask_driver()
    if found.error and os.environ.get("CUDA_VISIBLE_DEVICES") not in ("", "-1"):  # which hide the GPUs
        raise PreflightError(
            f"rank {rank}: CUDA's driver is installed here but does not start: {found.error}. See dmesg and "
            f"nvidia-smi. The run would train on the CPU. {HIDE}"
        )
    if found.num_gpus and found.supported[0] < int(torch.version.cuda.split(".")[0]):
        raise PreflightError(
            f"rank {rank}: torch {torch.__version__} is built for CUDA {torch.version.cuda}, but the driver "
            f"of the {counted(found.num_gpus, 'GPU')} here supports only CUDA {dotted(found.supported)}. "
            "Update the driver, or install a build of torch for that CUDA "
            f"(https://pytorch.org/get-started). {HIDE}"
        )


def refuse_missing_kernels(rank: int, device: torch.device) -> None:
    """Raise PreflightError where this torch has no kernels for the GPU, as its default build for a V100.

    Otherwise the first kernel of the run fails, and again after each restart.
    """
    import torch

    if device.type != "cuda":
        return
    try:
        torch.ones(1, device=device).add_(1).item()
    except RuntimeError as error:
        if "no kernel image" not in str(error):
            raise
        capability = dotted(torch.cuda.get_device_capability(device))
        raise PreflightError(
            f"rank {rank}: torch {torch.__version__} has no kernels for its GPU, "
            f"{torch.cuda.get_device_name(device)} (compute capability {capability}), only for "
            f"{', '.join(torch.cuda.get_arch_list())}. Install another build of torch: for GPUs below 7.5 "
            f"cu126, above 9.0 that for CUDA 13 and its driver (https://pytorch.org/get-started). {HIDE}"
        ) from error


class Driver(NamedTuple):
    """What CUDA's driver answers: why it fails, or its GPUs and the newest CUDA that it supports."""

    error: str = ""
    supported: tuple[int, int] = (0, 0)
    uuids: tuple[str, ...] = ()  # of the GPUs, as CUDA_VISIBLE_DEVICES takes them

    @property
    def num_gpus(self) -> int:
        return len(self.uuids)


def ask_driver() -> Driver:
    """Initialise CUDA in this process, without torch. Where no driver is installed there are 0 GPUs."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return Driver()
    count, version = ctypes.c_int(0), ctypes.c_int(0)
    error = driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count))
    if error == NO_DEVICE:
        return Driver()
    if error:
        text = ctypes.c_char_p()
        driver.cuGetErrorString(error, ctypes.byref(text))
        return Driver(f"error {error}, {(text.value or b'unknown').decode()}")
    driver.cuDriverGetVersion(ctypes.byref(version))  # 12040 is CUDA 12.4
    uuids = tuple(_uuid(driver, number) for number in range(count.value))
    return Driver("", (version.value // 1000, version.value % 1000 // 10), uuids)


def _uuid(driver: ctypes.CDLL, number: int) -> str:
    device, found = ctypes.c_int(0), (ctypes.c_ubyte * 16)()
    driver.cuDeviceGet(ctypes.byref(device), number)
    driver.cuDeviceGetUuid(ctypes.byref(found), device)
    return f"GPU-{uuid.UUID(bytes=bytes(found))}"


def dotted(capability: Capability) -> str:
    return ".".join(map(str, capability))
