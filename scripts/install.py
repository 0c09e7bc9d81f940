"""Installs this project and the given extras into the environment of the Python that runs it.

Chooses the build of torch from the output of nvidia-smi or from TORCH_BACKEND. Installs with uv and pip's
settings. Installs uv with pip where it is missing, and uses pip where uv is unavailable or fails.
"""

from __future__ import annotations

import ast
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from launcher.os.torch_build import Capability, choose  # noqa: E402

CONSTRAINTS = ROOT / "scripts" / "constraints.txt"
VENV = Path(sys.prefix)
PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check")
BUILD_FILE = VENV / "torch-backend"  # written after a complete installation
DEFAULT = "default"  # the build in the package index
OLDEST_UV = (0, 7, 14)  # the first with a stable --torch-backend
PROXY = ("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy")
# pip's option: uv's variables for it
UV_NAMES = {
    "index-url": ("UV_DEFAULT_INDEX",),
    "extra-index-url": ("UV_INDEX",),
    "find-links": ("UV_FIND_LINKS",),
    "trusted-host": ("UV_INSECURE_HOST",),
    "cert": ("SSL_CERT_FILE",),
    "client-cert": ("SSL_CLIENT_CERT",),
    "timeout": ("UV_HTTP_TIMEOUT",),
    "default-timeout": ("UV_HTTP_TIMEOUT",),
    "proxy": PROXY,
}
OLD_NAMES = {"UV_DEFAULT_INDEX": "UV_INDEX_URL", "UV_INDEX": "UV_EXTRA_INDEX_URL"}


def main(extras: list[str]) -> int:
    backend, reason = torch_backend(os.environ)
    print(f"torch build {backend}: {reason}", file=sys.stderr)
    last = BUILD_FILE.read_text().strip() if BUILD_FILE.exists() else DEFAULT
    failure = with_uv(extras, backend, replace=backend != last)
    if failure is not None:
        print(f"{failure}: installing with pip, which takes minutes", file=sys.stderr)
        if with_pip(extras, backend, replace=backend != last) != 0:
            return 1
    BUILD_FILE.write_text(f"{backend}\n")
    return 0


def torch_backend(environ: Mapping[str, str]) -> tuple[str, str]:
    """uv's name of the torch build for this machine, or "default", and why."""
    if by_hand := environ.get("TORCH_BACKEND"):
        return by_hand, "asked for by TORCH_BACKEND"
    choice = choose(*installed_gpus())
    return choice.build.backend or DEFAULT, f"{choice.reason} (TORCH_BACKEND=... chooses another)"


def installed_gpus() -> tuple[str | None, list[Capability]]:
    """The driver's version and the compute capability of each GPU, as nvidia-smi reports them."""
    query = ("nvidia-smi", "--query-gpu=driver_version,compute_cap", "--format=csv,noheader")
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return None, []
    return parse_gpus(done.stdout)


def parse_gpus(report: str) -> tuple[str | None, list[Capability]]:
    """From lines such as "550.54.15, 7.0", one for each GPU; all other lines are messages."""
    found = re.findall(r"^\s*(\d+[\d.]*)\s*,\s*(\d+)\.(\d+)\s*$", report, re.MULTILINE)
    driver = found[0][0] if found else None
    return driver, [(int(major), int(minor)) for _, major, minor in found]


def with_uv(extras: list[str], backend: str, replace: bool) -> str | None:
    """Install with uv. Returns the reason of a failure, or None."""
    uv = find_uv()
    if uv is None:
        return "uv is unavailable"
    settings = pip_settings(subprocess.run([*PIP, "config", "list"], capture_output=True, text=True).stdout)
    words = [uv, "pip", "install", "--quiet", "--python", sys.executable, *requirements(extras)]
    if backend != DEFAULT:
        words.append(f"--torch-backend={backend}")
    if replace:
        words += ["--reinstall-package", "torch"]
    if sys.dont_write_bytecode:  # or each start of Python would compile torch again, which takes seconds
        words.append("--compile-bytecode")
    if settings.get("no-index", "").lower() in ("1", "true", "yes", "on"):
        words.append("--no-index")
    # In the clone, so that no other project's settings apply.
    done = subprocess.run(words, cwd=ROOT, env=os.environ | uv_variables(settings, os.environ))
    return f"uv failed with exit code {done.returncode}" if done.returncode else None


def find_uv() -> str | None:
    """uv of the environment or of the PATH, otherwise one installed by pip into the environment."""
    own = VENV / "bin" / "uv"
    for candidate in (str(own), shutil.which("uv")):
        if candidate and uv_version(candidate) >= OLDEST_UV:
            return candidate
    # One retry: without an index, pip installs everything from find-links.
    bring = (*PIP, "install", "--quiet", "--retries", "1", "-c", str(CONSTRAINTS), "uv")
    brought = subprocess.run(bring, capture_output=True).returncode == 0
    return str(own) if brought and uv_version(str(own)) >= OLDEST_UV else None


def uv_version(uv: str) -> tuple[int, ...]:
    try:
        said = subprocess.run([uv, "--version"], capture_output=True, text=True, timeout=60).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ()
    found = re.match(r"uv (\d+)\.(\d+)\.(\d+)", said)
    return tuple(map(int, found.groups())) if found else ()


def pip_settings(config_list: str) -> dict[str, str]:
    """pip's options for `install`, from the output of `pip config list`."""
    settings: dict[str, str] = {}
    for source in ("global", "install", ":env:"):  # a later one overrides an earlier one, as in pip
        for option, value in re.findall(rf"^{source}\.([a-z-]+)=(.+)$", config_list, re.MULTILINE):
            settings[option] = ast.literal_eval(value)
    return settings


def uv_variables(settings: Mapping[str, str], environ: Mapping[str, str]) -> dict[str, str]:
    """uv's variables for pip's settings, without those that the user has set for uv."""
    variables = {}
    for option, names in UV_NAMES.items():
        for name in names if option in settings else ():
            if name not in PROXY and (environ.get(name) or environ.get(OLD_NAMES.get(name, name))):
                continue
            variables[name] = as_uv_reads_it(option, settings[option])
    if "UV_INDEX" in variables and not environ.get("UV_INDEX_STRATEGY"):
        variables["UV_INDEX_STRATEGY"] = "unsafe-best-match"  # as pip does: the best version of any index
    return variables


def as_uv_reads_it(option: str, value: str) -> str:
    words = value.split()
    if option == "find-links":
        return ",".join(word if "://" in word else str(Path(word).expanduser().absolute()) for word in words)
    return " ".join(words)


def with_pip(extras: list[str], backend: str, replace: bool) -> int:
    """Install with pip and return its exit code."""
    if replace:  # a torch of the same version satisfies pip, whatever its build
        subprocess.run([*PIP, "uninstall", "--quiet", "--yes", "torch"], capture_output=True)
    named = [] if backend in (DEFAULT, "auto") else [f"{pinned_torch()}+{backend}"]
    failed = subprocess.run([*PIP, "install", "--quiet", *requirements(extras), *named]).returncode
    if failed and named:
        print(
            f"error: pip finds {named[0]} only in an index or find-links with that build. Install uv "
            f"({sys.executable} -m pip install uv), or set TORCH_BACKEND={DEFAULT}.",
            file=sys.stderr,
        )
    return failed


def pinned_torch() -> str:
    found = re.search(r"^torch==[\w.]+$", CONSTRAINTS.read_text(), re.MULTILINE)
    assert found is not None, f"{CONSTRAINTS} pins no torch"
    return found.group()


def requirements(extras: list[str]) -> list[str]:
    return ["-c", str(CONSTRAINTS), "-e", f"{ROOT}[{','.join(extras)}]"]


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:  # end with the signal, so that the shell stops too
        print("interrupted: the next command sets up again from the start", file=sys.stderr)
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
