"""Installs this project and the given extras with uv into the environment of the Python that runs it.

Chooses the build of torch from the output of nvidia-smi or from TORCH_BACKEND. pip installs uv, which reads
none of pip's settings: it is given the indexes, links and certificates that pip is configured with.
"""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

Capability = tuple[int, int]  # CUDA's compute capability: (7, 0) is a V100

ROOT = Path(__file__).resolve().parents[1]
CONSTRAINTS = ROOT / "scripts" / "constraints.txt"
PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check")
BUILD_FILE = Path(sys.prefix) / "torch-backend"  # written after a complete installation
DEFAULT = "default"  # the build in the package index: of torch 2.11 to 2.14 that for CUDA 13
# uv's name of the build for older drivers and GPUs, and the oldest of both that the default one runs on. From
# torch's support matrix: pytorch#175253, #178665, #190355.
OLDER_BUILD, OLDEST_DRIVER, OLDEST_GPU = "cu126", 580, (7, 5)
NEWEST_OF_OLDER = (9, 0)  # the newest GPU for which cu126 has kernels
# pip's option: uv's variable for it
UV_NAMES = {
    "index-url": "UV_DEFAULT_INDEX",
    "extra-index-url": "UV_INDEX",
    "find-links": "UV_FIND_LINKS",
    "no-index": "UV_NO_INDEX",
    "trusted-host": "UV_INSECURE_HOST",
    "cert": "SSL_CERT_FILE",
}


def main(extras: list[str]) -> int:
    backend, reason = torch_backend(os.environ)
    print(f"torch build {backend}: {reason}", file=sys.stderr)
    # Twice: no warnings of settings that have nothing to do with uv.
    bring = subprocess.run([*PIP, "install", "--quiet", "--quiet", "-c", str(CONSTRAINTS), "uv"])
    if bring.returncode:
        return bring.returncode
    listing = subprocess.run([*PIP, "config", "list"], capture_output=True, text=True).stdout
    # In the clone, so that no other project's settings of uv apply.
    environ = uv_variables(pip_settings(listing)) | os.environ
    done = subprocess.run(command(extras, backend), cwd=ROOT, env=environ)
    if done.returncode == 0:
        BUILD_FILE.write_text(f"{backend}\n")
    return done.returncode


def command(extras: list[str], backend: str) -> list[str]:
    uv = [sys.executable, "-m", "uv", "pip", "install", "--quiet", "--python", sys.executable]
    words = [*uv, "-c", str(CONSTRAINTS), "-e", f"{ROOT}[{','.join(extras)}]"]
    if backend != DEFAULT:
        words.append(f"--torch-backend={backend}")
    if backend != (BUILD_FILE.read_text().strip() if BUILD_FILE.exists() else DEFAULT):
        words += ["--reinstall-package", "torch"]  # another build of the same version satisfies uv
    if sys.dont_write_bytecode:  # or each start of Python would compile torch again, which takes seconds
        words.append("--compile-bytecode")
    return words


def torch_backend(environ: Mapping[str, str]) -> tuple[str, str]:
    """uv's name of the torch build for this machine, or "default", and why."""
    if by_hand := environ.get("TORCH_BACKEND"):
        return by_hand, "asked for by TORCH_BACKEND"
    backend, reason = choose(*installed_gpus())
    return backend, f"{reason} (TORCH_BACKEND=... chooses another)"


def choose(driver: str | None, capabilities: Sequence[Capability]) -> tuple[str, str]:
    """The build for GPUs of these capabilities under the driver of this version, and why."""
    if not capabilities:
        return DEFAULT, "no NVIDIA GPU found"
    oldest, newest = min(capabilities), max(capabilities)
    found = f"driver {driver}, compute capability {oldest[0]}.{oldest[1]}"
    if newest > NEWEST_OF_OLDER:
        return (
            DEFAULT,
            f"{found}; {newest[0]}.{newest[1]} needs the build for CUDA 13, driver {OLDEST_DRIVER}",
        )
    if driver is not None and int(driver.split(".")[0]) < OLDEST_DRIVER:
        return OLDER_BUILD, f"{found}; the build for CUDA 13 needs driver {OLDEST_DRIVER}"
    if oldest < OLDEST_GPU:
        return OLDER_BUILD, f"{found}; the build for CUDA 13 has no kernels for it"
    return DEFAULT, found


def installed_gpus() -> tuple[str | None, list[Capability]]:
    """The driver's version and the compute capability of each GPU, as nvidia-smi reports them."""
    query = ("nvidia-smi", "--query-gpu=driver_version,compute_cap", "--format=csv,noheader")
    try:
        report = subprocess.run(query, capture_output=True, text=True, timeout=60).stdout
    except (OSError, subprocess.TimeoutExpired):
        return None, []
    # Lines such as "550.54.15, 7.0", one for each GPU; all other lines are messages.
    found = re.findall(r"^\s*(\d+[\d.]*)\s*,\s*(\d+)\.(\d+)\s*$", report, re.MULTILINE)
    return found[0][0] if found else None, [(int(major), int(minor)) for _, major, minor in found]


def pip_settings(config_list: str) -> dict[str, str]:
    """pip's options for `install`, from the output of `pip config list`."""
    settings: dict[str, str] = {}
    for source in ("global", "install", ":env:"):  # a later one overrides an earlier one, as in pip
        for option, value in re.findall(rf"^{source}\.([a-z-]+)=(.+)$", config_list, re.MULTILINE):
            settings[option] = ast.literal_eval(value)
    return settings


def uv_variables(settings: Mapping[str, str]) -> dict[str, str]:
    """uv's variables for pip's settings."""
    found = {name: " ".join(settings[each].split()) for each, name in UV_NAMES.items() if each in settings}
    if "UV_FIND_LINKS" in found:
        words = found["UV_FIND_LINKS"].split()
        paths = [word if "://" in word else str(Path(word).expanduser().absolute()) for word in words]
        found["UV_FIND_LINKS"] = ",".join(paths)
    if "UV_INDEX" in found:
        found["UV_INDEX_STRATEGY"] = "unsafe-best-match"  # as pip does: the best version of any index
    return found


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
