"""Modules that compute in fp32 within a half forward pass: the cure where fp16's range is too small for them.

Owns the hooks of those modules. A module widens its floating-point inputs, all operations within it (and
within its children) compute in fp32, and its output stays fp32. Its weights keep the dtype of the policy:
what the optimizer updates and what is sent between ranks do not change.

A model may also select fp32 in its own code, by torch.autocast(device, enabled=False) or custom_fwd. Weights
are still half there, which torch's operations do not mix with fp32 inputs: cast them (weight.float()).
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn

from launcher.engine.errors import require_match
from launcher.engine.names import named_modules
from launcher.engine.precision.emulation import RoundedArithmetic
from launcher.engine.precision.op_lists import map_tensors, widen


def names_in_fp32(model: nn.Module) -> list[str]:
    """The modules that compute in fp32: as in the model in its copies, and with another Stepper, too."""
    return [name for name, module in named_modules(model) if _enter in module._forward_pre_hooks.values()]


def compute_in_fp32(model: nn.Module, patterns: Sequence[str]) -> list[str]:
    """Compute in fp32 in the modules whose names match; returns the names of those that did not yet.

    Patterns are those of `fnmatch`, case-sensitive: `*` matches any characters, dots included. Raises
    UnusableError for a pattern that matches nothing, before any module is changed.
    """
    modules = {name: module for name, module in named_modules(model) if name}
    for pattern in patterns:
        require_match(pattern, list(modules), "modules")
    present = names_in_fp32(model)
    matched = [name for name in modules if any(fnmatchcase(name, pattern) for pattern in patterns)]
    new = [name for name in matched if name not in present]
    for name in new:
        # Functions, not methods: a model is copied and pickled with its hooks and what they refer to.
        modules[name].register_forward_pre_hook(_enter, with_kwargs=True)
        modules[name].register_forward_hook(_leave, always_call=True)
    return new


_entered = threading.local()  # autograd repeats forward passes of checkpoints in its own threads


def _enter(module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> Any:
    # Autocast is off in it, and half weights, which fp32 kernels refuse, are widened where they are used.
    device_type = next(filter(torch.is_autocast_enabled, ("cuda", "cpu")), "cpu")
    context = RoundedArithmetic(torch.float32, device_type)
    context.__enter__()
    if not hasattr(_entered, "contexts"):
        _entered.contexts = []
    _entered.contexts.append(context)
    # Tensors in other containers, such as a library's own outputs, are widened where they are used.
    return map_tensors(widen, args), map_tensors(widen, kwargs)


def present_arithmetic() -> AbstractContextManager[object]:
    """A context to repeat later what is called now: fp32 within a module that computes so, else as it is."""
    if contexts := getattr(_entered, "contexts", []):
        # The outermost has seen the device whose autocast was on; within it none is.
        return RoundedArithmetic(torch.float32, contexts[0].device_type)
    return nullcontext()


def _leave(module: nn.Module, args: object, output: object) -> None:
    """Leave the fp32 context, also after an exception of the forward pass, which it need not see."""
    _entered.contexts.pop().__exit__(None, None, None)
