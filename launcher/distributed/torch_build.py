"""Which build of torch runs on which GPU: the choice at set-up, and a check before the first step.

Owns the table of builds. Imports only the standard library, because set-up runs before torch is installed.
"""

from __future__ import annotations

import ctypes
import re
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from launcher.errors import PreflightError

if TYPE_CHECKING:
    import torch

Capability = tuple[int, int]  # CUDA's compute capability: (7, 0) is a V100
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
    raise PreflightError(
        f"rank {rank}: torch {torch.__version__} has no kernels for its GPU, {name} (compute capability "
        f"{dotted(own)}), only for {', '.join(architectures)}. "
        + _advice(choose(None, [torch.cuda.get_device_capability(gpu) for gpu in gpus]), torch.__version__)
    )


def refuse_old_driver(rank: int, device: torch.device) -> None:
    """Raise PreflightError where this rank has GPUs and a torch for CUDA, but a driver too old for it.

    Otherwise torch only warns, and the job trains on the CPU.
    """
    import torch

    if device.type == "cuda" or torch.version.cuda is None:
        return
    num_gpus, supported = _ask_driver()
    if num_gpus and supported[0] < int(torch.version.cuda.split(".")[0]):
        other = install_command(sys.executable, torch.__version__, BUILDS[-1].backend)
        raise PreflightError(
            f"rank {rank}: torch {torch.__version__} is built for CUDA {torch.version.cuda}, but the driver "
            f"of the {num_gpus} GPU(s) here supports only CUDA {dotted(supported)}. Update the driver, or, "
            f"where it supports CUDA 12, install another build: {other}. "
            "To train on the CPU, hide the GPUs: CUDA_VISIBLE_DEVICES= in the environment."
        )


def _ask_driver() -> tuple[int, tuple[int, int]]:
    """The number of GPUs that this process may use, and the newest CUDA that their driver supports."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0, (0, 0)
    count, version = ctypes.c_int(0), ctypes.c_int(0)
    for failed in (driver.cuInit(0), driver.cuDeviceGetCount(ctypes.byref(count))):
        if failed:
            return 0, (0, 0)
    driver.cuDriverGetVersion(ctypes.byref(version))  # 12040 is CUDA 12.4
    return count.value, (version.value // 1000, version.value % 1000 // 10)


def _advice(choice: Choice, torch_version: str) -> str:
    if not choice.fits:
        return f"{choice.reason}. Train on GPUs of one generation: CUDA_VISIBLE_DEVICES selects them."
    return (
        f"Install a build that has them (it needs driver {choice.build.driver} or newer): "
        f"{install_command(sys.executable, torch_version, choice.build.backend)}"
    )


def dotted(capability: Capability) -> str:
    return ".".join(map(str, capability))
