"""Too little memory and too little room, as Python, torch and the system say it, through the front door."""

from __future__ import annotations

import errno
import os

import pytest
import torch

from launcher.cli import main
from launcher.distributed.exit_records import exit_record
from launcher.errors import ConfigError, OutOfMemoryError, StorageError
from launcher.os.oom import NO_ROOM, oom_text, to_resource_error
from launcher.run_dir.atomic import read_json

RECIPE = """
import torch
from torch import nn
from launcher.recipe import Config, Recipe, TensorData, cross_entropy, recipe

@recipe("tiny")
def tiny(config: Config) -> Recipe:
    x = torch.randn(64, 2)
    label = (x[:, 0] > 0).long()
    data = TensorData({"image": x, "label": label})
    return Recipe(lambda: build(), data, data, cross_entropy, classes=("a", "b"))

def build():
    {build}
    return nn.Linear(2, 2)
"""
YAML = "# @package _global_\nrecipe: {name: tiny, uses: tiny}\n"


@pytest.fixture
def train(tmp_path, monkeypatch):
    """Train the tiny recipe for two steps in this process; returns the exit code."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own" / "recipe").mkdir(parents=True)
    (tmp_path / "own" / "recipe" / "tiny.yaml").write_text(YAML)

    def run(build="pass", *words):
        (tmp_path / "mine.py").write_text(RECIPE.replace("{build}", build))
        fixed = ["recipe=tiny", "recipes.path=mine.py", "--config-dir", "own", "tracker=none"]
        return main([*fixed, "train.max_steps=2", f"run.dir={tmp_path / 'run'}", *words])

    return run


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize(
    ("build", "said"),
    [
        ("torch.empty(10**15)", "DefaultCPUAllocator"),
        ("bytearray(10**18)", "in build. Hold fewer or smaller samples"),
    ],
)
def test_too_little_memory_is_exit_4_with_what_to_lower(train, tmp_path, capfd, build, said):
    assert train(build) == 4
    err = capfd.readouterr().err
    assert said in err
    assert "error: the recipe's build_model ran out of memory at " in err
    assert "data.micro_batch_size" not in err, "it comes before the first step"
    assert "Traceback" not in err
    result = read_json(tmp_path / "run" / "result.json")
    assert (result["state"], result["exit"]) == ("failed", 4)


FILES = ["env.json", "config.yaml", "overrides.txt", "status.json", "result.json"]


@pytest.mark.sampled(every=2, first=1)
@pytest.mark.parametrize("name", FILES)
def test_no_room_for_a_file_of_the_run_is_exit_8(train, tmp_path, capfd, monkeypatch, name):
    """The system's own call refuses the last rename, as a file system without a free inode does."""
    real = os.replace

    def full(source, target):
        if os.path.basename(target) == name:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(target))
        real(source, target)

    monkeypatch.setattr(os, "replace", full)
    code, err = train(), capfd.readouterr().err
    assert code == 8, err
    assert name in err
    assert "No space left on device" in err
    assert "Traceback" not in err


def of_nccl(last: str) -> torch.distributed.DistBackendError:
    """As ProcessGroupNCCL words what NCCL reports."""
    return torch.distributed.DistBackendError(
        "NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.cpp:94, unhandled cuda error (run "
        "with NCCL_DEBUG=INFO for details), NCCL version 2.28.9\nncclUnhandledCudaError: Call to CUDA "
        f"function failed.\nLast error:\n{last}"
    )


BY_LIBRARIES = [  # that allocate beside torch's allocator
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
    RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"),
    RuntimeError("cuFFT error: CUFFT_ALLOC_FAILED"),
    torch.AcceleratorError("CUDA error: out of memory\nSearch for `cudaErrorMemoryAllocation' in https://"),
    RuntimeError("Triton Error [CUDA]: out of memory"),
]
BY_NCCL = [of_nccl("Cuda failure 2 'out of memory'"), of_nccl("Failed to CUDA calloc async 6291456 bytes")]


@pytest.mark.parametrize("error", BY_NCCL)
def test_a_shortage_in_nccl_ends_the_run_because_its_communicator_has_failed(error) -> None:
    said = error.args[0].rpartition("\n")[2]
    assert str(to_resource_error(error, "rank 3")).startswith(f"rank 3 ran out of GPU memory: {said}. ")
    assert oom_text(error) == ""


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (MemoryError(), OutOfMemoryError),
        *((error, OutOfMemoryError) for error in (*BY_LIBRARIES, *BY_NCCL)),
        (OSError(errno.ENOMEM, os.strerror(errno.ENOMEM)), OutOfMemoryError),
        (RuntimeError("[enforce fail] . DefaultCPUAllocator: can't allocate memory"), OutOfMemoryError),
        (RuntimeError("std::bad_alloc"), OutOfMemoryError),
        *((OSError(number, os.strerror(number), "a/file"), StorageError) for number in sorted(NO_ROOM)),
    ],
)
def test_a_rank_that_lacks_something_leaves_with_its_exit_code(error, kind):
    found = to_resource_error(error, "rank 3")
    assert type(found) is kind
    assert str(found).startswith("rank 3 ")
    record = exit_record(3, error)
    assert (record.exit_code, record.error) == (kind.exit_code, str(found))


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("other"),
        OSError(errno.ENOENT, "none"),
        ConfigError("memory"),
        ValueError(),
        ValueError("CUDA error: out of memory"),  # a text that someone else quotes
        of_nccl("Cuda failure 700 'an illegal memory access was encountered'"),
    ],
)
def test_other_errors_are_none_of_these(error):
    assert to_resource_error(error, "rank 0") is None
