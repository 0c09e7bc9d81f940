"""What `pip install` puts into another environment: everything that a run needs, and nothing stale."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SHIPPED = ("pyproject.toml", "README.md", "launcher", "conf", "recipes")
LEFT_OUT = shutil.ignore_patterns("__pycache__")


def clean_environ() -> dict[str, str]:
    """The environment without what would lead Python back to this clone."""
    leading = ("PYTHONPATH", "VIRTUAL_ENV", "RANK", "WORLD_SIZE")
    environ = {key: value for key, value in os.environ.items() if key not in leading}
    return environ | {"OMP_NUM_THREADS": "1", "WANDB_MODE": "offline"}


def call(*words: str | Path, directory: Path, timeout_s: float = 240) -> str:
    """The command's output; its failure is the test's."""
    done = subprocess.run(
        [str(word) for word in words],
        cwd=directory,
        env=clean_environ(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


@pytest.fixture(scope="module")
def clone(tmp_path_factory) -> Path:
    """A copy of the sources, so that building leaves nothing in this clone."""
    directory = tmp_path_factory.mktemp("clone")
    for name in SHIPPED:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, directory / name, ignore=LEFT_OUT)
        else:
            shutil.copy(ROOT / name, directory / name)
    return directory


@pytest.fixture(scope="module")
def environment(tmp_path_factory) -> Path:
    """A second virtual environment that finds the dependencies of this one, but not this clone."""
    directory = tmp_path_factory.mktemp("environment")
    call(sys.executable, "-m", "venv", "--without-pip", directory, directory=directory)
    packages = next(directory.glob("lib/python*/site-packages"))
    (packages / "dependencies.pth").write_text(
        str(next(Path(sys.prefix).glob("lib/python*/site-packages"))) + "\n"
    )
    return directory


def install(environment: Path, *what: str | Path, directory: Path) -> Path:
    """Install without dependencies and return the environment's site-packages."""
    python = environment / "bin" / "python"
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", python)
    call(*pip, "install", "--quiet", "--no-deps", "--force-reinstall", *what, directory=directory)
    return next(environment.glob("lib/python*/site-packages"))


@pytest.mark.timeout(600)
def test_a_wheel_trains_far_from_the_clone(clone, environment, tmp_path) -> None:
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check")
    call(*pip, "wheel", "--quiet", "--no-deps", "-w", tmp_path, clone, directory=tmp_path)
    (wheel,) = tmp_path.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    for folder in ("conf", "recipes"):
        sources = {f"launcher/{file.relative_to(clone)}" for file in (clone / folder).rglob("*.*")}
        assert sources <= names
    assert {"launcher/py.typed", "launcher/data/images/digits.npz"} <= names
    assert {name.split("/")[0] for name in names} == {
        "launcher",
        f"{'-'.join(wheel.name.split('-')[:2])}.dist-info",
    }

    packages = install(environment, wheel, directory=tmp_path)
    where = "import launcher.config.groups as r; print(r.conf_dir(), r.recipes_dir())"
    found = call(environment / "bin" / "python", "-c", where, directory=tmp_path).split()
    assert found == [str(packages / "launcher" / "conf"), str(packages / "launcher" / "recipes")]

    assert "resnet152" in call(environment / "bin" / "launcher", "recipes", directory=tmp_path)
    torchrun = (
        environment / "bin" / "python",
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=2",
    )
    run = ("-m", "launcher", "recipe=resnet18", "train.max_steps=2", "run.dir=mine")
    call(*torchrun, *run, directory=tmp_path)
    assert (tmp_path / "mine" / "result.json").is_file()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_an_editable_install_reads_the_clone_and_copies_nothing(clone, environment, tmp_path) -> None:
    packages = install(environment, "-e", clone, directory=tmp_path)
    assert not (packages / "launcher").exists()
    choice = clone / "conf" / "recipe" / "added.yaml"
    choice.write_text("# @package _global_\n# Added after the installation.\n")
    assert "Added after the installation." in call(
        environment / "bin" / "launcher", "recipes", directory=tmp_path
    )
    choice.unlink()


def test_the_constraints_pin_every_dependency_that_is_installed() -> None:
    import tomllib
    from importlib.metadata import PackageNotFoundError, version

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed = [*project["dependencies"], *project["optional-dependencies"]["data"]]
    lines = (ROOT / "scripts" / "constraints.txt").read_text().splitlines()
    pins = dict(line.split("==") for line in lines if "==" in line)
    for requirement in [*needed, *project["optional-dependencies"]["dev"]]:
        name = requirement.split("[")[0].split(">")[0].split("<")[0].split("=")[0]
        assert name in pins, f"{name} is not pinned"
        try:
            installed = version(name)
        except PackageNotFoundError:
            continue
        if name != "torch":  # of which `scripts/test torch==...` installs another
            assert installed.split("+")[0] == pins[name]
    assert pins["torch"] == "2.13.0"


ABSENT = ("wandb", "hydra", "omegaconf", "yaml", "PIL", "tqdm", "filelock", "pynvml", "safetensors")
ENGINE_ALONE = f"""
import sys
for name in {ABSENT}:
    sys.modules[name] = None  # importing it raises ImportError
import torch
from launcher.engine import SGD, Policy, Stepper
stepper = Stepper(torch.nn.Linear(2, 2), SGD(lr=0.1), Policy.fp16())
with stepper.forward():
    loss = stepper.model(torch.ones(4, 2)).float().square().sum()
stepper.backward(loss, 4)
assert stepper.step().read().loss >= 0
"""


def test_the_engine_needs_torch_alone(tmp_path) -> None:
    call(
        sys.executable,
        "-c",
        f"import sys; sys.path.insert(0, {str(ROOT)!r}){ENGINE_ALONE}",
        directory=tmp_path,
    )


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["recipe=resnet18", "a b"], ["python", "-P", "-m", "launcher", "recipe=resnet18", "a b"]),
        (["watch", "outputs/a"], ["python", "-P", "-m", "launcher", "watch", "outputs/a"]),
        ([], ["python", "-P", "-m", "launcher"]),
        (["torchrun", "--nnodes=2", "-m", "launcher"], ["torchrun", "--nnodes=2", "-m", "launcher"]),
        (["python", "a b.py"], ["python", "a b.py"]),
    ],
)
def test_scripts_run_passes_every_word_on(tmp_path, words, expected) -> None:
    """To the launcher, which counts GPUs and workers itself, or to a program of the environment."""
    for name in ("scripts", ".venv/bin"):
        (tmp_path / name).mkdir(parents=True)
    run = tmp_path / "scripts" / "run"
    run.write_text((ROOT / "scripts" / "run").read_text())
    (tmp_path / "scripts" / "environment.sh").write_text("set_up_environment() { :; }\n")
    for name in ("python", "torchrun"):
        file = tmp_path / ".venv" / "bin" / name
        file.write_text(f"#!/bin/sh\nprintf '%s\\n' {name} \"$@\"\n")
        file.chmod(0o755)
    done = subprocess.run(["bash", run, *words], capture_output=True, text=True)
    assert done.stderr == ""
    assert done.stdout.splitlines() == expected
