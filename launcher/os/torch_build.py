"""Which build of torch runs on which GPU: the choice at set-up, and checks before the first step.

Owns the table of builds, and the versions in which the private names of torch that the launcher uses were
checked. Imports only the standard library, because set-up runs before torch is installed.
"""

from __future__ import annotations

import ctypes
import os
import re
import shlex
import sys
import uuid
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

from launcher.errors import PreflightError, counted

if TYPE_CHECKING:
    import torch

Capability = tuple[int, int]  # CUDA's compute capability: (7, 0) is a V100
# torch promises nothing about its private names. A test compares the calls of those that the launcher uses
# with their signatures in each version, which scripts/torch_private_names.py has read from wheels.
CHECKED = ("2.11", "2.12", "2.13", "2.14")
ARCHITECTURE = re.compile(r"(sm|compute)_(\d+)(\d)([af]?)")


@dataclass(frozen=True)
class Build:
    """One series of wheels of torch 2.11 to 2.14. `backend` is uv's name for it, None the index's default."""

    backend: str | None
    cuda: str
    driver: int  # the oldest major version that supports it
    lowest: Capability  # of the GPUs that it has kernels for
    highest: Capability

    @property
    def name(self) -> str:
        return f"{self.backend or 'default'} (CUDA {self.cuda})"

    def misses(self, driver: str | None, capabilities: Sequence[Capability]) -> str | None:
        """Why this build cannot run on such a machine; None if it can. A driver of None is new enough."""
        if driver is not None and int(driver.split(".")[0]) < self.driver:
            return f"driver {driver} is older than {self.driver}, which {self.name} needs"
        for capability in capabilities:
            if not self.lowest <= capability <= self.highest:
                return f"{self.name} has no kernels for compute capability {dotted(capability)}"
        return None


# From torch's support matrix (pytorch#175253, #178665, #190355; 2.15 is to come without cu126: #190385) and
# CUDA's compatibility of minor versions, by which a driver for any CUDA 12 runs a build for CUDA 12.6.
DEFAULT = Build(None, "13", 580, (7, 5), (99, 0))
BUILDS = (DEFAULT, Build("cu126", "12.6", 525, (5, 0), (9, 0)))
FIRST_WITHOUT_CU126 = (2, 15)

NO_DEVICE = 100  # the one CUresult by which the driver says that there is no GPU, or that all are hidden
CRASHED = -1  # in place of an answer
# Of the other ones of cuInit, with what to do.
CUDA_INIT_ERRORS = {
    CRASHED: "it ended the process that asked: see dmesg",
    2: "no memory is left: see which processes use the GPUs with nvidia-smi",
    34: "a stub of CUDA's toolkit was loaded in its place: remove its folder from LD_LIBRARY_PATH",
    46: "a GPU is unavailable: another process has it to itself, or it has failed (nvidia-smi, dmesg)",
    101: "a GPU cannot be used: see nvidia-smi and dmesg",
    304: "a call of the operating system failed: see the permissions of /dev/nvidia*",
    802: "the system is not ready: GPUs behind NVSwitch need the fabric manager (systemctl status "
    "nvidia-fabricmanager), of the same version as the driver",
    803: "the driver's library and its kernel module are of different versions: after an update of the "
    "driver reboot the machine, or start the container anew",
    804: "the library is a compatibility package, which this GPU does not support: remove cuda-compat",
    999: "an unknown error: see dmesg for a GPU that has failed; often a reboot helps",
}
HIDE = "To train on the CPU, hide the GPUs: CUDA_VISIBLE_DEVICES= in the environment."


@dataclass(frozen=True)
class Choice:
    """What to install, and why. `fits` is False if no build runs on all GPUs of the machine."""

    build: Build
    reason: str
    fits: bool = True


def choose(driver: str | None, capabilities: Sequence[Capability]) -> Choice:
    """The first build that runs on all GPUs of a machine, the default one if none does.

    Args:
        driver: the version that nvidia-smi reports, such as "550.54.15"; None if it is new enough.
        capabilities: the compute capability of each GPU.
    """
    if not capabilities:
        return Choice(DEFAULT, "no NVIDIA GPU found")
    kinds = ", ".join(dotted(each) for each in sorted(set(capabilities)))
    found = f"compute capability {kinds}" + (f", driver {driver}" if driver else "")
    against: list[str] = []
    for build in BUILDS:
        missing = build.misses(driver, capabilities)
        if missing is None:
            return Choice(build, "; ".join([found, *against]))
        against.append(missing)
    return Choice(DEFAULT, f"{found}; no build runs on all GPUs of this machine: {'; '.join(against)}", False)


def has_kernels(architectures: Sequence[str], capability: Capability) -> bool:
    """Whether a torch built for `architectures` (`torch.cuda.get_arch_list()`) runs on such a GPU.

    Machine code (sm_XY) runs within its major version from its minor version on, PTX (compute_XY) is compiled
    for any later GPU. A suffix "a" limits either to exactly that GPU, "f" to its major version.
    """
    known = [match.groups() for each in architectures if (match := ARCHITECTURE.fullmatch(each))]
    return not known or any(_runs_on(capability, *architecture) for architecture in known)


def _runs_on(capability: Capability, kind: str, major: str, minor: str, suffix: str) -> bool:
    built_for = int(major), int(minor)
    if suffix == "a":
        return built_for == capability
    within = kind == "compute" and not suffix
    return built_for <= capability and (within or built_for[0] == capability[0])


def install_command(python: str, torch_version: str, backend: str | None) -> str:
    """The shell command that puts another build of the same torch into the environment of `python`."""
    python, base = shlex.quote(python), torch_version.split("+")[0]
    release = tuple(int(part) for part in re.findall(r"\d+", base)[:2])
    wanted = f"torch=={base}" if backend is None or release < FIRST_WITHOUT_CU126 else "'torch<2.15'"
    which = f"--torch-backend={backend} " if backend else ""
    return (
        f"{python} -m pip install uv && {python} -m uv pip install --python {python} {which}"
        f"--reinstall-package torch {wanted}"
    )


def refuse_missing_kernels(rank: int, device: torch.device) -> None:
    """Raise PreflightError where the installed torch has no kernels for this rank's GPU.

    Otherwise the first kernel fails with "no kernel image is available for execution on the device".
    """
    import torch

    if device.type != "cuda":
        return
    architectures, own = torch.cuda.get_arch_list(), torch.cuda.get_device_capability(device)
    if has_kernels(architectures, own):
        return
    gpus = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    name = torch.cuda.get_device_name(device)
    choice = choose(None, [torch.cuda.get_device_capability(gpu) for gpu in gpus])
    advice = f"{choice.reason}. Train on GPUs of one generation: CUDA_VISIBLE_DEVICES selects them."
    if choice.fits:
        command = install_command(sys.executable, torch.__version__, choice.build.backend)
        advice = f"Install a build that has them (it needs driver {choice.build.driver} or newer): {command}"
    raise PreflightError(
        f"rank {rank}: torch {torch.__version__} has no kernels for its GPU, {name} (compute capability "
        f"{dotted(own)}), only for {', '.join(architectures)}. {advice}"
    )


def refuse_unusable_driver(rank: int, device: torch.device) -> None:
    """Raise PreflightError where a torch for CUDA sees no GPU because the driver fails, or is too old for it.

    Otherwise torch only warns, and the job trains on the CPU.
    """
    import torch

    if device.type == "cuda" or torch.version.cuda is None:
        return
    found = ask_driver()
    refuse_failed_driver(found, f"rank {rank}: ")
    if found.num_gpus and found.supported[0] < int(torch.version.cuda.split(".")[0]):
        other = install_command(sys.executable, torch.__version__, BUILDS[-1].backend)
        raise PreflightError(
            f"rank {rank}: torch {torch.__version__} is built for CUDA {torch.version.cuda}, but the driver "
            f"of the {counted(found.num_gpus, 'GPU')} here supports only CUDA {dotted(found.supported)}. "
            f"Update the driver, or, where it supports CUDA 12, install another build: {other}. {HIDE}"
        )


class Driver(NamedTuple):
    """What CUDA's driver answers: an error or 0, and if 0, its GPUs and the newest CUDA that it supports."""

    error: int = 0  # a CUresult
    num_gpus: int = 0
    supported: tuple[int, int] = (0, 0)
    uuids: tuple[str, ...] = ()  # of the GPUs, as CUDA_VISIBLE_DEVICES takes them


def ask_driver() -> Driver:
    """Initialise CUDA in this process, without torch. Where no driver is installed there are 0 GPUs."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return Driver()
    count, version = ctypes.c_int(0), ctypes.c_int(0)
    error = driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count))
    if error:
        return Driver(0 if error == NO_DEVICE else error)
    driver.cuDriverGetVersion(ctypes.byref(version))  # 12040 is CUDA 12.4
    uuids = tuple(_uuid(driver, number) for number in range(count.value))
    return Driver(0, count.value, (version.value // 1000, version.value % 1000 // 10), uuids)


def _uuid(driver: ctypes.CDLL, number: int) -> str:
    device, found = ctypes.c_int(0), (ctypes.c_ubyte * 16)()
    driver.cuDeviceGet(ctypes.byref(device), number)
    driver.cuDeviceGetUuid(ctypes.byref(found), device)
    return f"GPU-{uuid.UUID(bytes=bytes(found))}"


def refuse_failed_driver(found: Driver, who: str = "") -> None:
    """Raise PreflightError where the driver has failed, unless the user has hidden the GPUs from it."""
    if not found.error or os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return
    meaning = CUDA_INIT_ERRORS.get(
        found.error, "CUresult in the documentation of CUDA's driver says what that is"
    )
    raise PreflightError(
        f"{who}CUDA's driver is installed here but does not start: error {found.error}, {meaning}. The run "
        f"would train on the CPU. {HIDE}"
    )


def dotted(capability: Capability) -> str:
    return ".".join(map(str, capability))


@cache  # workers that are forked after the first call do not repeat the warning
def warn_if_unchecked(torch_version: str) -> None:
    """Warn, once per process and its forks, of a torch in which these names were not checked."""
    if ".".join(torch_version.split(".")[:2]) not in CHECKED:
        warnings.warn(
            f"torch {torch_version} is not among the versions that this launcher was checked with "
            f"({', '.join(CHECKED)}): private functions of torch that it uses may have changed. If a run "
            "ends with a TypeError or AttributeError, install one of these versions.",
            stacklevel=2,
        )
