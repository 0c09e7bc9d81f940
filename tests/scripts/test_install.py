"""Set-up of the environment: the build of torch, pip's settings for uv, and what an interruption leaves."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pip
import pytest

from scripts.install import parse_gpus, pip_settings, uv_variables

ROOT = Path(__file__).parents[2]
V100 = "550.54.15, 7.0\n550.54.15, 7.0"
# Creates a virtual environment at once: without a pip of its own, but with the one of these tests.
PYTHON = """#!/bin/sh
[ "$1 $2" = "-m venv" ] || exec {python} "$@"
{python} -m venv --without-pip "$3" && echo {packages} >"$(echo "$3"/lib/python*/site-packages)/pip.pth"
"""
UV = """#!/bin/sh
[ "$1" = --version ] && echo "uv $UV_VERSION" && exit
echo "$@" >>{calls}
env >{calls}.environ
{then}
"""


class Clone:
    """What set-up needs of a clone, with a stand-in for uv and for nvidia-smi on the PATH."""

    def __init__(self, directory: Path) -> None:
        self.root, self.bin, self.calls = directory / "clone", directory / "bin", directory / "calls"
        self.bin.mkdir()
        (self.root / "scripts").mkdir(parents=True)
        for name in ("environment.sh", "install.py", "constraints.txt"):
            shutil.copy(ROOT / "scripts" / name, self.root / "scripts")
        shutil.copy(ROOT / "pyproject.toml", self.root)
        shutil.copytree(ROOT / "launcher" / "os", self.root / "launcher" / "os")
        shutil.copy(ROOT / "launcher" / "errors.py", self.root / "launcher")
        packages = Path(pip.__file__).parents[1]
        self.program("python", PYTHON.format(python=sys._base_executable, packages=packages))
        self.uv()

    def program(self, name: str, text: str) -> None:
        (self.bin / name).write_text(text)
        (self.bin / name).chmod(0o755)

    def uv(self, then: str = "exit 0") -> None:
        self.program("uv", UV.format(calls=self.calls, then=then))

    def gpus(self, report: str, exit_code: int = 0) -> None:
        self.program("nvidia-smi", f"#!/bin/sh\ncat <<'END'\n{report}\nEND\nexit {exit_code}\n")

    def start(self, extras: str = "data", **environ: str) -> subprocess.Popen[str]:
        script = f'set -euo pipefail; root={self.root}; source "$root/scripts/environment.sh"; '
        own = ("TORCH_BACKEND", "PYTHONDONTWRITEBYTECODE")
        inherited = {key: value for key, value in os.environ.items() if key not in own}
        environ = {"PYTHON": str(self.bin / "python"), "UV_VERSION": "0.13.9"} | environ
        environ |= {"PATH": f"{self.bin}:{os.environ['PATH']}", "PIP_RETRIES": "0"}
        return subprocess.Popen(
            ["bash", "-c", f"{script}set_up_environment '{extras}'; echo ready"],
            env=inherited | environ,
            cwd=self.bin,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def set_up(self, extras: str = "data", **environ: str) -> tuple[int, str]:
        """Exit code and standard error."""
        process = self.start(extras, **environ)
        output, errors = process.communicate(timeout=60)
        assert output == ("ready\n" if process.returncode == 0 else "")
        return process.returncode, errors

    def called(self) -> list[str]:
        """The words of each call of uv since the last look."""
        calls = self.calls.read_text().splitlines() if self.calls.exists() else []
        self.calls.unlink(missing_ok=True)
        return calls


@pytest.fixture
def clone(tmp_path) -> Clone:
    return Clone(tmp_path)


def test_the_build_of_torch_fits_the_gpus_and_the_reason_is_one_line(clone) -> None:
    clone.gpus(V100)
    code, errors = clone.set_up("data dev")
    assert code == 0, errors
    (call,) = clone.called()
    python = clone.root / ".venv" / "bin" / "python"
    assert call.startswith(f"pip install --quiet --python {python} -c {clone.root}/scripts/constraints.txt ")
    assert f"-e {clone.root}[data,dev]" in call
    assert "--torch-backend=cu126" in call
    _, line = errors.splitlines()
    assert line.startswith("torch build cu126: compute capability 7.0, driver 550.54.15; ")

    assert clone.set_up("data") == (0, "")  # set up
    assert clone.set_up("data dev", TORCH_BACKEND="cu126") == (0, "")
    assert clone.called() == []
    code, errors = clone.set_up("data", TORCH_BACKEND="cpu")  # another build replaces the installed one
    assert (code, errors.splitlines()[1]) == (0, "torch build cpu: asked for by TORCH_BACKEND")
    (call,) = clone.called()
    assert call.endswith("--torch-backend=cpu --reinstall-package torch")
    assert (clone.root / ".venv" / "torch-backend").read_text() == "cpu\n"


@pytest.mark.parametrize("value", ["", "1"])
def test_what_python_may_not_write_is_compiled_at_once(clone, value) -> None:
    code, errors = clone.set_up(PYTHONDONTWRITEBYTECODE=value)
    assert code == 0, errors
    assert ("--compile-bytecode" in clone.called()[0]) == bool(value)


def test_no_build_is_named_where_nvidia_smi_sees_no_gpu(clone) -> None:
    clone.gpus("NVIDIA-SMI has failed because it could not communicate with the NVIDIA driver.", 9)
    code, errors = clone.set_up()
    assert code == 0, errors
    assert "torch build default: no NVIDIA GPU found " in errors
    assert "--torch-backend" not in clone.called()[0]


def test_a_word_that_is_no_build_changes_nothing(clone) -> None:
    code, errors = clone.set_up(TORCH_BACKEND="cuda12")
    assert code == 2
    assert errors.startswith("error: TORCH_BACKEND=cuda12 is not a build of torch.")
    assert not (clone.root / ".venv").exists()


def test_pips_settings_reach_uv(clone, tmp_path) -> None:
    (tmp_path / "pip.conf").write_text("[global]\ntrusted-host = a.test\n[install]\nno-index = true\n")
    settings = {"PIP_CONFIG_FILE": str(tmp_path / "pip.conf"), "PIP_FIND_LINKS": "wheels file:///more"}
    code, errors = clone.set_up(**settings, PIP_EXTRA_INDEX_URL="http://b.test/simple")
    assert code == 0, errors
    assert clone.called()[0].endswith(" --no-index")
    environ = Path(f"{clone.calls}.environ").read_text().splitlines()
    assert f"UV_FIND_LINKS={clone.bin}/wheels,file:///more" in environ
    assert "UV_INSECURE_HOST=a.test" in environ
    assert "UV_INDEX=http://b.test/simple" in environ
    assert "UV_INDEX_STRATEGY=unsafe-best-match" in environ


@pytest.mark.slow
def test_pip_installs_where_uv_fails_and_its_failure_leaves_nothing_that_looks_set_up(
    clone,
) -> None:
    """pip is kept from every index here, so that it has to fail."""
    offline = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(clone.bin)}
    clone.uv("exit 3")
    code, errors = clone.set_up(**offline, TORCH_BACKEND="cu126")
    assert code == 1
    assert "uv failed with exit code 3: installing with pip, which takes minutes" in errors
    assert "error: pip finds torch==2.13.0+cu126 only in an index or find-links with that build" in errors
    assert not list((clone.root / ".venv").glob("set-up-for-*"))
    clone.uv()
    assert clone.set_up()[0] == 0


@pytest.mark.slow
def test_a_uv_that_is_too_old_is_not_asked(clone) -> None:
    code, errors = clone.set_up(PIP_NO_INDEX="1", PIP_FIND_LINKS=str(clone.bin), UV_VERSION="0.4.30")
    assert code == 1
    assert "uv is unavailable: installing with pip" in errors
    assert clone.called() == []


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("during", ["creation", "installation", "replacement"])
def test_an_interrupted_set_up_ends_by_the_signal_and_is_made_again_from_the_start(clone, during) -> None:
    if during == "replacement":
        assert clone.set_up()[0] == 0
        with (clone.root / "pyproject.toml").open("a") as file:
            file.write("# changed\n")
    half, python = clone.root / ".venv" / "half", clone.bin / "python"
    complete = python.read_text()
    if during == "creation":
        python.write_text(f"{complete}mkdir {half}; exec sleep 30\n")
    clone.uv(f"mkdir {half}; exec sleep 30")
    process = clone.start()
    deadline = time.monotonic() + 30
    while not half.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGINT)
    output, errors = process.communicate(timeout=20)
    assert (process.returncode, output) == (-signal.SIGINT, ""), errors
    assert ("interrupted: the next command sets up again from the start" in errors) == (during != "creation")

    clone.uv()
    python.write_text(complete)
    code, errors = clone.set_up()
    assert code == 0, errors
    assert not half.exists()
    assert not (clone.root / ".venv" / "unfinished").exists()


def test_a_clone_that_was_moved_is_set_up_anew_and_other_environments_are_kept(clone) -> None:
    """Programs in .venv/bin name their Python by its old path."""
    assert clone.set_up()[0] == 0
    stray = clone.root / ".venv" / "by-hand"
    stray.touch()
    with (clone.root / "pyproject.toml").open("a") as file:
        file.write("# changed\n")
    assert clone.set_up()[0] == 0
    assert stray.exists()
    clone.root = clone.root.rename(clone.root.with_name("elsewhere"))
    assert clone.set_up()[0] == 0
    assert not (clone.root / ".venv" / "by-hand").exists()


def test_an_environment_that_is_a_link_to_that_of_another_clone_is_not_emptied(clone) -> None:
    assert clone.set_up()[0] == 0
    theirs = clone.root / ".venv"
    before = sorted(theirs.rglob("*"))
    clone.root = clone.root.with_name("other")
    clone.root.mkdir()
    for name in ("scripts", "pyproject.toml"):
        (clone.root / name).symlink_to(theirs.with_name(name))
    (clone.root / ".venv").symlink_to(theirs)
    code, output = clone.set_up()
    assert code == 2
    assert f"{clone.root}/.venv is a link" in output
    assert sorted(theirs.rglob("*")) == before


@pytest.mark.parametrize(
    ("report", "found"),
    [
        (V100, ("550.54.15", [(7, 0), (7, 0)])),
        ("580.65.06, 7.0\r\n580.65.06, 12.0\r\n", ("580.65.06", [(7, 0), (12, 0)])),
        ("", (None, [])),
        ("No devices were found", (None, [])),
        ('Field "compute_cap" is not a valid field to query.', (None, [])),
        ("535.1, [N/A]\n535.1, 8.0", ("535.1", [(8, 0)])),
    ],
)
def test_reading_what_nvidia_smi_reports(report, found) -> None:
    assert parse_gpus(report) == found


def test_of_pips_sources_the_nearer_one_counts() -> None:
    listing = "\n".join(
        (
            ":env:.index-url='http://env.test'",
            "global.index-url='http://global.test'",
            "global.extra-index-url='http://a.test\\nhttp://b.test'",
            "install.extra-index-url='http://c.test'",
            "download.find-links='/elsewhere'",
        )
    )
    assert pip_settings(listing) == {
        "index-url": "http://env.test",
        "extra-index-url": "http://c.test",
    }


@pytest.mark.parametrize(
    ("settings", "environ", "variables"),
    [
        ({}, {}, {}),
        ({"index-url": "http://a"}, {}, {"UV_DEFAULT_INDEX": "http://a"}),
        ({"index-url": "http://a"}, {"UV_DEFAULT_INDEX": "http://b"}, {}),
        ({"index-url": "http://a"}, {"UV_INDEX_URL": "http://b"}, {}),
        (
            {"extra-index-url": "http://a\nhttp://b"},
            {},
            {"UV_INDEX": "http://a http://b", "UV_INDEX_STRATEGY": "unsafe-best-match"},
        ),
        (
            {"extra-index-url": "http://a"},
            {"UV_INDEX_STRATEGY": "first-index"},
            {"UV_INDEX": "http://a"},
        ),
        ({"find-links": "/a http://b"}, {}, {"UV_FIND_LINKS": "/a,http://b"}),
        ({"cert": "/c.pem"}, {}, {"SSL_CERT_FILE": "/c.pem"}),
        ({"cert": "/c.pem"}, {"SSL_CERT_FILE": "/d.pem"}, {}),
        ({"timeout": "60", "quiet": "1"}, {}, {"UV_HTTP_TIMEOUT": "60"}),
        (
            {"proxy": "p:1"},
            {"https_proxy": "q:1"},  # pip's own setting overrides it for pip, too
            dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy"), "p:1"),
        ),
    ],
)
def test_pips_settings_as_uvs_variables(settings, environ, variables) -> None:
    assert uv_variables(settings, environ) == variables
