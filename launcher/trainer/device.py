"""Switches and memory of a process."""

from __future__ import annotations

import gc
import os
import warnings

import torch

from launcher.config.schema import Config
from launcher.os import allocator


def set_backend_flags(config: Config, device: torch.device) -> None:
    """Process-wide switches of torch that the config names."""
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # default: one per core, in each rank
    if torch.are_deterministic_algorithms_enabled() != config.train.deterministic:
        # Called only if needed: it imports the compiler, which takes a second and keeps the process group
        # alive, so that other ranks would not notice at once that this one has failed.
        torch.use_deterministic_algorithms(config.train.deterministic)
    if config.train.deterministic:  # torch refuses matrix products on CUDA without it
        # One of the two values that torch accepts: 24 MiB more on the GPU, where ":16:8" may be slower.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    if device.type == "cpu":
        allocator.tune_malloc()
    if torch.cuda.is_available():
        torch.set_float32_matmul_precision("high" if config.train.tf32 else "highest")
        torch.backends.cudnn.allow_tf32 = config.train.tf32
        # Matrix products accumulate in fp32.
        torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
        # Benchmarks once per process and shape. There are few shapes: micro-batches are of equal size.
        torch.backends.cudnn.benchmark = not config.train.deterministic
        # It advises flatten_parameters(), which would take the weights out of the Stepper's flat memory.
        warnings.filterwarnings("ignore", "RNN module weights are not part of single contiguous chunk")


def free_memory(device: torch.device) -> None:
    """Return what a failed pass held, so that smaller pieces find room."""
    # First: tensors in reference cycles hold blocks that the cache could not return.
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
