"""Set-up of the environment: the build of torch, pip's settings for uv, and what an interruption leaves."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

from scripts import install

ROOT = Path(__file__).parents[2]
INSTALL = """
import pathlib, sys, time
place = pathlib.Path(sys.prefix)
if (place.parent / "slow").exists():
    (place / "half").touch()
    time.sleep(30)
with (place.parent / "calls").open("a") as calls:
    print(*sys.argv[1:], file=calls)
"""


class Clone:
    """What set-up needs of a clone, with a stand-in for the installation itself."""

    def __init__(self, root: Path) -> None:
        self.root = root
        (root / "scripts").mkdir(parents=True)
        for name in ("scripts/environment.sh", "scripts/constraints.txt", "pyproject.toml"):
            shutil.copy(ROOT / name, root / name)
        (root / "scripts" / "install.py").write_text(INSTALL)

    def start(self, extras: str = "data") -> subprocess.Popen[str]:
        script = f'set -euo pipefail; root={self.root}; source "$root/scripts/environment.sh"; '
        return subprocess.Popen(
            ["bash", "-c", f"{script}set_up_environment '{extras}'; echo ready"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def set_up(self, extras: str = "data") -> str:
        """Standard error."""
        process = self.start(extras)
        output, errors = process.communicate(timeout=60)
        assert (process.returncode, output) == (0, "ready\n"), errors
        return errors

    @property
    def calls(self) -> list[str]:
        return (self.root / "calls").read_text().splitlines()


@pytest.fixture
def clone(tmp_path) -> Clone:
    return Clone(tmp_path / "clone")


def test_it_is_set_up_once_and_again_after_a_change_and_elsewhere(clone) -> None:
    """Programs in .venv/bin name their Python by its old path."""
    assert "setting up" in clone.set_up("data dev")
    assert clone.set_up("data") == ""
    (clone.root / ".venv" / "by-hand").touch()
    with (clone.root / "pyproject.toml").open("a") as file:
        file.write("# changed\n")
    clone.set_up()
    assert clone.calls == ["data dev", "data"]
    assert (clone.root / ".venv" / "by-hand").exists()
    clone.root = clone.root.rename(clone.root.with_name("elsewhere"))
    clone.set_up()
    assert not (clone.root / ".venv" / "by-hand").exists()


@pytest.mark.slow
def test_an_interrupted_set_up_ends_by_the_signal_and_is_made_again_from_the_start(clone) -> None:
    half, slow = clone.root / ".venv" / "half", clone.root / "slow"
    slow.touch()
    process = clone.start()
    deadline = time.monotonic() + 30
    while not half.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGINT)
    output, errors = process.communicate(timeout=20)
    assert (process.returncode, output) == (-signal.SIGINT, ""), errors
    slow.unlink()
    clone.set_up()
    assert not half.exists()


def test_an_environment_that_is_a_link_to_that_of_another_clone_is_not_emptied(clone, tmp_path) -> None:
    (tmp_path / "theirs" / "bin").mkdir(parents=True)
    (clone.root / ".venv").symlink_to(tmp_path / "theirs")
    process = clone.start()
    assert ".venv is a link" in process.communicate(timeout=60)[1]
    assert process.returncode == 2
    assert (tmp_path / "theirs" / "bin").exists()


@pytest.mark.parametrize(
    ("report", "backend"),
    [
        ("550.54.15, 7.0\r\n550.54.15, 7.0", "cu126"),  # V100
        ("580.65.06, 7.0\n580.65.06, 9.0", "cu126"),
        ("525.60.13, 8.9", "cu126"),
        ("580.65.06, 9.0", "default"),
        ("570.86.10, 12.0", "default"),  # RTX 50: cu126 has no kernels for it
        ("NVIDIA-SMI has failed because it could not communicate with the NVIDIA driver.", "default"),
    ],
)
def test_the_build_of_torch_fits_the_gpus_that_nvidia_smi_reports(
    tmp_path, monkeypatch, report, backend
) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\ncat <<'END'\n{report}\nEND\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert install.torch_backend({})[0] == backend
    assert install.torch_backend({"TORCH_BACKEND": "cpu"})[0] == "cpu"


def test_another_build_of_torch_replaces_the_installed_one(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(install, "BUILD_FILE", tmp_path / "torch-backend")
    assert f"{ROOT}[data,dev]" in install.command(["data", "dev"], "default")
    other = {"--torch-backend=cu126", "--reinstall-package"}
    assert not other & set(install.command(["data"], "default"))
    assert other <= set(install.command(["data"], "cu126"))
    (tmp_path / "torch-backend").write_text("cu126\n")
    assert other & set(install.command(["data"], "cu126")) == {"--torch-backend=cu126"}


def test_pips_settings_reach_uv() -> None:
    listing = "\n".join(
        (
            ":env:.index-url='http://env.test'",
            "global.index-url='http://global.test'",
            "global.extra-index-url='http://a.test\\nhttp://b.test'",
            "install.find-links='/wheels file:///more'",
            "download.find-links='/elsewhere'",
            "global.quiet='1'",
        )
    )
    assert install.uv_variables(install.pip_settings(listing)) == {
        "UV_DEFAULT_INDEX": "http://env.test",  # of pip's sources the nearer one counts
        "UV_INDEX": "http://a.test http://b.test",
        "UV_INDEX_STRATEGY": "unsafe-best-match",
        "UV_FIND_LINKS": "/wheels,file:///more",
    }
