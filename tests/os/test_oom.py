"""Too little memory and too little room, as Python, torch and the system say it, through the front door."""

from __future__ import annotations

import errno
import os
from functools import partial
from pathlib import Path

import pytest
import torch

from launcher.distributed.exit_records import exit_record
from launcher.errors import ConfigError, OutOfMemoryError, StorageError
from launcher.os.oom import NO_ROOM, oom_text, to_resource_error
from tests.faults.parent import Parent, write_recipe

FILES = ["env.json", "config.yaml", "overrides.txt", "status.json", "result.json"]


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize(
    ("build", "said"),
    [
        ("torch.empty(10**15)", "DefaultCPUAllocator"),
        ("bytearray(10**18)", "in build. Hold fewer or smaller samples"),
    ],
)
def test_too_little_memory_is_exit_4_with_what_to_lower(tmp_path: Path, build: str, said: str) -> None:
    write_recipe(tmp_path, in_build=build)
    with Parent(tmp_path, "launch.max_restarts=3") as parent:
        assert parent.end() == 4
        assert said in parent.stderr
        assert "error: the recipe's build_model ran out of memory at " in parent.stderr
        assert "data.micro_batch_size" not in parent.stderr, "it comes before the first step"
        assert "Traceback" not in parent.stderr
        result = parent.json("result.json")
        assert (result["state"], result["exit"]) == ("failed", 4)


def leave_no_inode_for(name: str) -> None:
    """The system's own call refuses the last rename, as a file system without a free inode does."""
    real = os.replace

    def full(source: str | Path, target: str | Path) -> None:
        if os.path.basename(target) == name:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(target))
        real(source, target)

    os.replace = full  # type: ignore[assignment]


@pytest.mark.sampled(every=2, first=1)
@pytest.mark.parametrize("name", FILES)
def test_no_room_for_a_file_of_the_run_is_exit_8(tmp_path: Path, name: str) -> None:
    write_recipe(tmp_path)
    with Parent(tmp_path, "train.max_steps=2", prepare=partial(leave_no_inode_for, name)) as parent:
        assert parent.end() == 8
        assert name in parent.stderr
        assert "No space left on device" in parent.stderr
        assert "Traceback" not in parent.stderr


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
