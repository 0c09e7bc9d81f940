"""Half-precision arithmetic for processors that have none.

Operations keep the classes of `torch.autocast`: matrix products take half inputs, accumulate in fp32 and
give half outputs; reductions, exponentials, norms and losses compute in fp32. Here the inputs are widened,
the operation runs in fp32 and the result is rounded once, so the rounding is that of native half arithmetic,
at the speed of fp32. Autograd sees the casts, so gradients are rounded at the same places.

`torch.compile` traces the casts too, and removes fp32 -> fp16 -> fp32 as a no-op unless its option
`emulate_precision_casts` is set.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from types import EllipsisType, FunctionType
from typing import Any, Self

import torch
import torch._functorch.config
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

import launcher.engine.precision.op_lists as op_lists
from launcher.engine.precision.op_lists import HALF, any_fp32, map_tensors, widen

# A type of device that no model of ours is on. Its autocast flag casts nothing here; it says "emulated half
# arithmetic is on" where the flag of the device itself is off or does not exist: nn.RNN accepts inputs of
# another dtype than its weights only where some autocast is on, and devices like meta have none. A flag of
# torch and not a thread-local of ours, because autograd hands it to its threads, where checkpoints recompute.
MARK = "xpu"


class RoundedArithmetic:
    """Context in which torch functions round to half as hardware with such arithmetic does.

    Autocast of the device is on, to `dtype`, for the Python code that runs in it, and off within the
    functions that `Rounding` computes. So `torch.autocast` and `custom_fwd` in a model act as under native
    arithmetic: nothing is rounded where they turn autocast off, and the dtype that they ask for is rounded
    to. With dtype=fp32 everything is computed in fp32 instead, whatever they ask for.
    """

    def __init__(self, dtype: torch.dtype, device_type: str = "cpu") -> None:
        self._dtype, self.device_type = dtype, device_type
        self._mode = Rounding(dtype, device_type)
        self._outer: list[tuple[bool, torch.dtype, Any]] = []

    def __enter__(self) -> Self:
        # What torch.autocast and config.patch() do, without their objects and checks of arguments, which cost
        # a tenth of the step of a tiny network.
        device_type, config = self._mode.device_type, torch._functorch.config
        on, dtype = torch.is_autocast_enabled(device_type), torch.get_autocast_dtype(device_type)
        self._outer.append((on, dtype, config.backward_pass_autocast))
        torch.set_autocast_enabled(device_type, self._dtype != torch.float32)
        torch.set_autocast_dtype(device_type, self._dtype)
        torch.autocast_increment_nesting()
        # torch.compile would trace the backward pass with autocast on, and so multiply in half. Set even if
        # no compiler is loaded yet: a model may be compiled for the first time within this context.
        config.backward_pass_autocast = "off"
        self._mode.__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        self._mode.__exit__(*exception)
        device_type = self._mode.device_type
        on, dtype, torch._functorch.config.backward_pass_autocast = self._outer.pop()
        if torch.autocast_decrement_nesting() == 0:
            torch.clear_autocast_cache()  # of weights, which a step changes
        torch.set_autocast_enabled(device_type, on)
        torch.set_autocast_dtype(device_type, dtype)


class Rounding(TorchFunctionMode):
    """The mode of `RoundedArithmetic`, which leaves autocast as it is.

    By itself it is the context of a backward pass, whose repeated forward passes turn autocast on themselves.
    """

    def __init__(self, dtype: torch.dtype, device_type: str) -> None:
        super().__init__()
        self._wide = dtype == torch.float32
        self.device_type = _with_autocast(device_type)
        self._outer: list[bool] = []

    def __enter__(self) -> Self:
        self._outer.append(torch.is_autocast_enabled(MARK))
        torch.set_autocast_enabled(MARK, True)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *exception: object) -> None:
        super().__exit__(*exception)  # type: ignore[no-untyped-call]
        torch.set_autocast_enabled(MARK, self._outer.pop())

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func not in op_lists.CHANGED or kwargs.get("out") is not None:  # the latter as in autocast
            return func(*args, **kwargs)
        on = torch.is_autocast_enabled(self.device_type)
        if not on and not self._wide and func not in op_lists.BACKWARD:
            # An fp32 island of the model, a backward pass, or compiled code, which already contains the
            # rounding: it calls torch.convolution on fp32 buffers and reads as many bytes of the result.
            return func(*args, **kwargs)
        if func in op_lists.COMPOSITES:
            return self._with_mode_inside(func, args, kwargs)
        if func is torch.Tensor.__getitem__ and _is_view(args[1]):
            return func(*args, **kwargs)  # a view, which can be written to
        dtype = torch.float32 if self._wide else torch.get_autocast_dtype(self.device_type)
        narrow = partial(op_lists.narrow_fp32, dtype)
        torch.set_autocast_enabled(self.device_type, False)  # else torch's kernels would compute in half
        try:  # not a method of its own, which torch.compile would take for a function to compile
            if func in op_lists.LOWER_PRECISION_FP:
                args, kwargs = map_tensors(partial(op_lists.round_to, dtype), (args, kwargs))
                return map_tensors(narrow, func(*args, **kwargs))
            if func in op_lists.BACKWARD:
                return self._with_mode_inside(func, args, kwargs)
            if func is checkpoint:  # only the compiler gets here; it would trace the body without this mode
                torch._dynamo.graph_break(
                    "emulated half arithmetic leaves activation checkpointing uncompiled"
                )
                return func(*args, **kwargs)
            if func in op_lists.FP32_INSIDE or func in op_lists.GATHERS:
                first = kwargs["input"] if "input" in kwargs else next(filter(op_lists.is_tensor, args))
                half = first.dtype in HALF
            else:
                half = func in op_lists.PROMOTE and not any_fp32((args, kwargs))
            args, kwargs = map_tensors(widen, (args, kwargs))
            out = func(*args, **kwargs)
            return map_tensors(narrow, out) if half and kwargs.get("dtype") is None else out
        finally:
            torch.set_autocast_enabled(self.device_type, on)

    def _with_mode_inside(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Call a function that is written in Python, with this mode on within it."""
        with self:
            return _WITHOUT_CHECK[func](*args, **kwargs)


def _is_view(index: Any) -> bool:
    """Whether indexing a tensor by `index` gives a view: by numbers and slices, not by tensors and lists."""
    parts = index if isinstance(index, tuple) else (index,)
    return all(part is None or isinstance(part, (int, slice, EllipsisType)) for part in parts)


@cache  # two of these modes are made in each step
def _with_autocast(device_type: str) -> str:
    """The type of device whose autocast flag says what is computed in half on this one."""
    return device_type if torch.amp.is_autocast_available(device_type) else MARK


def _without_check(composite: Any) -> FunctionType:
    """A copy of the function without its check for an active mode.

    Torch's Python functions begin with that check and pass themselves to the mode; what they call then runs
    with the mode disabled. In this copy the check returns False, so the mode sees the calls within.
    """
    names = dict(composite.__globals__)
    for check in ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic"):
        if check in names:
            names[check] = lambda *tensors: False
    copy = FunctionType(composite.__code__, names, composite.__name__, composite.__defaults__)
    copy.__kwdefaults__ = composite.__kwdefaults__
    return copy


_WITHOUT_CHECK = {function: _without_check(function) for function in op_lists.COMPOSITES | op_lists.BACKWARD}
