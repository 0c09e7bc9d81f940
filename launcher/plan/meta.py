"""A pass of a model on tensors without values, with its memory counted.

Owns the device `meta` as a stand-in for a CPU or a GPU, and what torch lacks there: collectives, the fused
updates, attention without the matrix of all pairs, and half arithmetic as a GPU has it. Tensors on `meta` are
used rather than FakeTensorMode: to the end of the first backward pass, a ResNet-50 took 0.8 s of CPU time on
`meta` and 7.0 s under FakeTensorMode (once each, on a loaded machine). Bytes are counted here rather than by
torch's MemTracker, whose package imports DTensor and inductor: a quarter of the time of a plan.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from launcher.engine.precision.emulation import RoundedArithmetic, Rounding
from launcher.engine.precision.op_lists import (
    FLOATS,
    FP32_INSIDE,
    LOWER_PRECISION_FP,
    PROMOTE,
    map_tensors,
    round_to,
)

META = torch.device("meta")
aten = torch.ops.aten
READ, TO = aten._local_scalar_dense.default, aten._to_copy.default
# They have no kernel for `meta`. They update in place and allocate nothing.
FUSED = (aten._fused_sgd_.tensor_lr, aten._fused_adamw_.tensor_lr)
attention = torch.nn.functional.scaled_dot_product_attention


NEEDED = "it reads the value of a tensor"
MOST_CONDITIONS = 1000  # of one pass: more are those of a loop that waits for one to become true


class DataDependentError(Exception):
    """A model or a loss reads a value, which a tensor on `meta` has not."""


class AllocationTracker(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Bytes of the storages that were made while it is active and still live, and their peak since `restart`.

    One that is not entered as a context counts nothing, and steps take as long as in a run.
    A value of a tensor on `meta` is read as 1, several as zeros, but for the context `without_values`. The
    engine reads counts of samples and what the ranks agree on. A model may only ask whether something is
    true: with another value it would run another way.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._answers = True
        self.conditions = 0  # that were answered since `without_values`
        self._counted: set[int] = set()  # storages, by address
        self.bytes: Counter[torch.device] = Counter()  # now
        self.peak: Counter[torch.device] = Counter()

    @contextmanager
    def without_values(self) -> Iterator[None]:
        """Raise DataDependentError for a read. A truth value is False, MOST_CONDITIONS times at most."""
        self._answers, self.conditions = False, 0
        try:
            yield
        finally:
            self._answers = True

    def restart(self) -> None:
        """Forget the peak."""
        self.peak = self.bytes.copy()

    def __torch_dispatch__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> object:
        if func.namespace == "c10d":
            return _communicate(func, args, kwargs or {})
        first = args[0][0] if args and func in FUSED else args[0] if args else None
        if isinstance(first, Tensor) and first.is_meta:
            if func in FUSED:
                return None
            if func is READ:
                return self._answer(first)
            if func is TO and (kwargs or {}).get("device", META) != META:
                if self._answers:
                    return torch.zeros(first.shape, dtype=first.dtype)
                raise DataDependentError(NEEDED)
        found = SHAPES.get(func, func)(*args, **kwargs or {})
        map_tensors(self._count, found)
        return found

    def _count(self, tensor: Tensor) -> None:
        if tensor.layout != torch.strided:
            return  # a sparse one has no storage
        storage, device = tensor.untyped_storage(), tensor.device
        if storage._cdata in self._counted:
            return
        self._counted.add(storage._cdata)
        self.bytes[device] += storage.nbytes()
        self.peak[device] = max(self.peak[device], self.bytes[device])
        # A storage keeps its Python object as long as it lives, whichever tensors share it.
        weakref.finalize(storage, self._release, storage._cdata, device, storage.nbytes())

    def _release(self, address: int, device: torch.device, size: int) -> None:
        self._counted.remove(address)
        self.bytes[device] -= size

    def _answer(self, tensor: Tensor) -> bool | float:
        if self._answers:
            return torch.ones((), dtype=tensor.dtype).item()
        self.conditions += 1
        if tensor.dtype != torch.bool or self.conditions > MOST_CONDITIONS:
            raise DataDependentError(NEEDED)
        # "Has the mask no padding?", "is any not finite?": no is the usual answer, and takes most memory.
        return False


def _normed(x: Tensor, *arguments: object) -> tuple[Tensor, Tensor, Tensor]:
    """Return what `native_batch_norm` does: the output, and the mean and deviation of each channel."""
    mean, deviation = (x.new_empty(x.shape[1], dtype=torch.float32) for _ in range(2))
    return torch.empty_like(x), mean, deviation


def _normed_backward(grad: Tensor, x: Tensor, weight: Tensor | None, *rest: Any) -> list[Tensor | None]:
    """Return what `native_batch_norm_backward` does: those of the gradients that `rest` asks for."""
    like = [x, *2 * [x.new_empty(x.shape[1]) if weight is None else weight]]
    return [torch.empty_like(each) if asked else None for each, asked in zip(like, rest[-1], strict=True)]


# On `meta` torch runs these as 20 to 30 operations of Python each, which were half the time of a pass.
SHAPES = {
    aten.native_batch_norm.default: _normed,
    aten.native_batch_norm_backward.default: _normed_backward,
}


def _communicate(func: Any, args: Any, kwargs: Any) -> object:
    """A collective on stand-ins that are never filled; its tensors are on `meta` again."""

    def stand_in(tensor: Tensor) -> Tensor:
        return torch.empty(tensor.shape, dtype=tensor.dtype) if tensor.is_meta else tensor

    args, kwargs = map_tensors(stand_in, (args, kwargs))
    return map_tensors(lambda tensor: tensor.to(META), func(*args, **kwargs))


class OnMeta(TorchFunctionMode):
    """Makes what asks for a GPU on `meta`, and attention as kernels have it that keep no matrix of pairs."""

    def __torch_function__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> object:
        kwargs = kwargs or {}
        if func is attention and not _drops(*args, **kwargs):
            return _attention(*args, **kwargs)
        if func is torch.Tensor.cuda:
            return args[0].to(META)
        if func is torch.device:  # of a kind and a number, or a number, which is that of a GPU
            asked = _without_gpu([*args, *kwargs.values()][0], may_be_number=True)
            return META if asked is META else func(*args, **kwargs)
        if func is torch.Tensor.to:
            args = (args[0], *(_without_gpu(value, may_be_number=True) for value in args[1:2]), *args[2:])
        given = {name: _without_gpu(value, name == "device") for name, value in kwargs.items()}
        return func(*map(_without_gpu, args), **given)


def _without_gpu(value: object, may_be_number: bool = False) -> object:
    if isinstance(value, str | torch.device):
        return META if str(value).split(":")[0] == "cuda" else value
    return META if may_be_number and isinstance(value, int) and not isinstance(value, bool) else value


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Compute `scaled_dot_product_attention` by the kernel that saves one number per row and no matrix."""
    if enable_gqa:
        key, value = (t.repeat_interleave(query.shape[-3] // t.shape[-3], -3) for t in (key, value))
    flash = aten._scaled_dot_product_flash_attention_for_cpu.default
    found: Tensor = flash(query, key, value, dropout_p, is_causal, attn_mask=attn_mask, scale=scale)[0]
    return found


def _half(dtype: torch.dtype, value: Tensor) -> Tensor:
    return value.to(dtype) if value.dtype in FLOATS else value


class Arithmetic(RoundedArithmetic):
    """The precision context of a forward pass on `meta`: emulated as on a CPU, or that of a GPU."""

    def __init__(self, dtype: torch.dtype, of_gpu: bool) -> None:
        super().__init__(dtype, META.type)
        self._mode = _OfGpu(dtype, META.type) if of_gpu else _Emulated(dtype, META.type)


class _Emulated(Rounding):
    def __torch_function__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> object:
        if func is attention and not _drops(*args, **(kwargs or {})):  # with dropout a CPU keeps the matrix
            # As any product: inputs rounded and held in fp32.
            args, kwargs = map_tensors(partial(round_to, torch.float16), (args, kwargs or {}))
            with torch._C.DisableTorchFunction():
                return _attention(*args, **kwargs).half()
        return super().__torch_function__(func, types, args, kwargs)


def _drops(*args: object, dropout_p: float = 0.0, **kwargs: object) -> bool:
    return bool(dropout_p or args[4:5] not in ((), (0.0,)))


class _OfGpu(Rounding):
    """Products take and save half tensors; what autocast computes in fp32 saves widened copies."""

    def __torch_function__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> object:
        kwargs = kwargs or {}
        if (
            not torch.is_autocast_enabled(self.device_type)
            or func not in LOWER_PRECISION_FP | FP32_INSIDE | PROMOTE
        ):
            return super().__torch_function__(func, types, args, kwargs)
        dtype = torch.get_autocast_dtype(self.device_type)
        if func in LOWER_PRECISION_FP:
            args, kwargs = map_tensors(partial(_half, dtype), (args, kwargs))
        with torch._C.DisableTorchFunction():
            return (_attention if func is attention else func)(*args, **kwargs)
