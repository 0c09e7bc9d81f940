"""The stand-in for libnvidia-ml.so.1, compiled once, and found where nvidia-ml-py looks: by the loader."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the stand-in, for LD_LIBRARY_PATH of a new process."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        pytest.skip("needs a C compiler for the stand-in of libnvidia-ml.so.1")
    folder = tmp_path_factory.mktemp("nvml")
    source = Path(__file__).with_name("standin.c")
    name = "libnvidia-ml.so.1"
    options = ["-shared", "-fPIC", "-w", f"-Wl,-soname,{name}"]
    subprocess.run([compiler, *options, "-o", str(folder / name), str(source)], check=True, timeout=60)
    return folder
