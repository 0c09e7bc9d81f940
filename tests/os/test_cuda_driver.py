"""The refusal of a driver that does not work with torch, and the count of GPUs without torch."""

import ctypes
import subprocess
from importlib import metadata
from pathlib import Path

import pytest
import torch

from launcher.errors import PreflightError
from launcher.launch import worker_count
from launcher.os.cuda_driver import refuse_missing_kernels, refuse_unusable_driver


def test_a_gpu_without_kernels_is_refused_with_the_build_that_has_them(monkeypatch) -> None:
    def fail(*args, **kwargs):
        raise RuntimeError("CUDA error: no kernel image is available for execution on the device")

    monkeypatch.setattr(torch, "ones", fail)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla V100-SXM2-16GB")
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: ["sm_75", "sm_80"])
    with pytest.raises(PreflightError) as refused:
        refuse_missing_kernels(1, torch.device("cuda", 0))
    assert "no kernels for its GPU, Tesla V100-SXM2-16GB (compute capability 7.0), only for sm_75" in str(
        refused.value
    )
    assert "cu126" in str(refused.value)
    refuse_missing_kernels(1, torch.device("cpu"))


LIBCUDA = """
void _exit(int code);
int cuInit(unsigned flags) {{ return {fails}; }}
int cuDeviceGetCount(int *count) {{ *count = {gpus}; return 0; }}
int cuDeviceGet(int *device, int number) {{ *device = number; return 0; }}
int cuDeviceGetUuid(unsigned char *uuid, int device) {{
    for (int i = 0; i < 16; i++) uuid[i] = 0;
    uuid[14] = device / 256, uuid[15] = device % 256;
    return 0;
}}
int cuGetErrorString(int error, const char **text) {{ *text = "system not yet initialized"; return 0; }}
int cuDriverGetVersion(int *version) {{ *version = {version}; return 0; }}
"""


def install_driver(monkeypatch, folder: Path, fails: object, gpus: int = 2, version: int = 13000) -> None:
    """A library in the place of the driver's answers as the driver does."""
    library = folder / "libcuda.so"
    source = LIBCUDA.format(fails=fails, gpus=gpus, version=version)
    subprocess.run(
        ["cc", "-shared", "-fPIC", "-x", "c", "-o", library, "-"], input=source, text=True, check=True
    )
    real = ctypes.CDLL
    monkeypatch.setattr(ctypes, "CDLL", lambda name: real(str(library) if "libcuda" in name else name))
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(metadata, "version", lambda name: "2.13.0")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    worker_count.visible_gpus.cache_clear()


@pytest.mark.parametrize(
    ("fails", "gpus", "version", "built_for", "refused"),
    [
        (0, 2, 12040, "13.0", True),
        (0, 2, 13000, "13.2", False),  # any driver of the same major version will do
        (0, 2, 13000, "12.6", False),
        (0, 0, 12040, "13.0", False),  # none there, or hidden by CUDA_VISIBLE_DEVICES
        (100, 2, 12040, "13.0", False),  # CUDA_ERROR_NO_DEVICE
        (0, 2, 12040, "", False),  # a torch for the CPU
    ],
)
def test_a_driver_too_old_for_torch_does_not_lead_to_the_cpu(
    monkeypatch, tmp_path, fails, gpus, version, built_for, refused
) -> None:
    install_driver(monkeypatch, tmp_path, fails, gpus, version)
    monkeypatch.setattr(torch.version, "cuda", built_for or None)
    if not refused:
        refuse_unusable_driver(0, torch.device("cpu"))
        return
    with pytest.raises(PreflightError) as error:
        refuse_unusable_driver(0, torch.device("cpu"))
    assert "is built for CUDA 13.0, but the driver of the 2 GPUs here supports only CUDA 12.4" in str(
        error.value
    )


def test_a_driver_that_does_not_start_is_not_taken_for_no_gpu(monkeypatch, tmp_path) -> None:
    """By the worker, which would train on the CPU. The parent, which sees none, starts one."""
    install_driver(monkeypatch, tmp_path, 802)
    assert worker_count.count_gpus() == 0
    with pytest.raises(PreflightError, match="does not start: error 802, system not yet initialized"):
        refuse_unusable_driver(3, torch.device("cpu"))
    with monkeypatch.context() as hidden:  # as its text advises
        hidden.setenv("CUDA_VISIBLE_DEVICES", "")
        refuse_unusable_driver(3, torch.device("cpu"))


@pytest.mark.parametrize(("code", "gpus", "found"), [(0, 300, 300), (0, 0, 0), (100, 2, 0)])
def test_the_parent_counts_the_gpus_of_a_driver_that_starts(monkeypatch, tmp_path, code, gpus, found) -> None:
    install_driver(monkeypatch, tmp_path, code, gpus)
    assert worker_count.count_gpus() == len({*worker_count.visible_gpus()}) == found
    assert all(name.startswith("GPU-00000000-0000-") for name in worker_count.visible_gpus())
