"""A device that is not the CPU and computes nothing: `meta`, with an answer to whoever reads a value.

Owns the count of those reads: on a GPU each of them waits for the device. A tensor on the wrong device fails
here as it would there. Collectives are carried out on stand-ins of zeros.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

META = torch.device("meta")
ROOT = str(Path(__file__).parents[1] / "launcher")
aten = torch.ops.aten
# They have no kernel for `meta`; on CUDA they read the rate and the verdict on the device.
FUSED = (aten._fused_sgd_.tensor_lr, aten._fused_adamw_.tensor_lr)
SCALAR, COPY, TO = aten._local_scalar_dense.default, aten.copy_.default, aten._to_copy.default


class MetaDevice(TorchDispatchMode):
    """While it is active tensors on `meta` can be read: as zeros, or as `answers` say for a line of code.

    `answers` maps a prefix of `where` (`engine/result.py`) to a value, or to a list of the first ones.
    `reads` holds for each read the last line of the launcher on the stack: `engine/result.py read:12`.
    `uploads` likewise holds what came from the host's pageable memory, for which the host waits too.
    """

    def __init__(self, answers: Mapping[str, float | list[float]] | None = None) -> None:
        super().__init__()
        self._answers = dict(answers or {})
        self.reads: list[str] = []
        self.uploads: list[str] = []
        self.calls = 0  # of operations on this device

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func.namespace == "c10d":
            return self._communicate(func, args, kwargs)
        first = args[0][0] if args and func in FUSED else args[0] if args else None
        self.calls += isinstance(first, Tensor) and first.is_meta
        if func in FUSED and first.is_meta:
            return _refuse_what_cuda_would(first, args, kwargs)
        if func is SCALAR and first.is_meta:
            return self._read(first).item()
        if func is TO and first.is_meta and kwargs.get("device", META) != META:
            told = self._told(first) if kwargs.get("non_blocking") else self._read(first)
            return told.to(kwargs.get("dtype") or first.dtype)
        if func is COPY and args[1].is_meta and not first.is_meta:
            return first.copy_(self._read(args[1]).expand_as(first))
        if (func is COPY and first.is_meta and not args[1].is_meta) or (
            func is TO and not first.is_meta and kwargs.get("device") == META
        ):
            self.uploads.append(_where())
        if func is aten.equal.default and first.is_meta:
            self._read(first)
            return True
        if func is aten.nonzero.default and first.is_meta:
            self._read(first)
            return first.new_empty(0, first.ndim, dtype=torch.int64)
        if func is aten.index.Tensor and first.is_meta and args[1][0].dtype == torch.bool:
            self._read(first)  # of the mask, which decides on the size
            return first.new_empty(0)
        return func(*args, **kwargs)

    def _communicate(self, func: Any, args: Any, kwargs: Any) -> Any:
        """What came of it for zeros, its tensors on this device again; a wait is no read."""
        result = func(*tree_map_only(Tensor, _stand_in, args), **tree_map_only(Tensor, _stand_in, kwargs))
        return tree_map_only(Tensor, lambda tensor: tensor.to(META), result)

    def _read(self, tensor: Tensor) -> Tensor:
        self.reads.append(_where())
        return self._told(tensor)

    def _told(self, tensor: Tensor) -> Tensor:
        """What the host gets as the values of this tensor."""
        values, where = torch.zeros(tensor.numel(), dtype=tensor.dtype), _where()
        for prefix, answer in self._answers.items():
            first = answer if isinstance(answer, list) else [answer] * tensor.numel()
            if where.startswith(prefix) and len(first) <= tensor.numel():
                values[: len(first)] = torch.tensor(first)
        return values.reshape(tensor.shape)


def _where() -> str:
    """The innermost line of the launcher, or of the caller of torch where none is on the stack."""
    stack = traceback.extract_stack()
    frame = next((frame for frame in reversed(stack) if frame.filename.startswith(ROOT)), stack[-5])
    return f"{frame.filename.removeprefix(ROOT + '/')} {frame.name}:{frame.lineno}"


def _refuse_what_cuda_would(first: Tensor, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """AssertionError for what torch's fused kernels check there: FusedSgdKernel.cu, fused_adam_utils.cuh."""
    per_element = 3 if len(args) == 3 else 4  # those behind: max_exp_avg_sqs, and the number of the step
    for tensors in args[:per_element]:
        for one, tensor in zip(args[0], tensors, strict=len(tensors) > 0):
            assert (tensor.dtype, tensor.device, tensor.shape) == (torch.float32, META, one.shape)
            assert tensor.is_contiguous()
            assert tensor.numel()
    scalars = [kwargs["lr"], kwargs["found_inf"], *(args[5] if len(args) > 3 else [])]
    assert {(scalar.dtype, scalar.device) for scalar in scalars} == {(torch.float32, META)}


def _stand_in(tensor: Tensor) -> Tensor:
    return torch.zeros(tensor.shape, dtype=tensor.dtype) if tensor.is_meta else tensor


@contextmanager
def fake_group(world_size: int) -> Iterator[dist.ProcessGroup]:
    """Rank 0 of so many, of which the others are there by name only; nothing is sent."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
    try:
        group = dist.group.WORLD
        assert group is not None
        yield group
    finally:
        dist.destroy_process_group()
