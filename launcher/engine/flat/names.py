"""The names of a model's parameters, buffers and modules, as the engine reports and saves them.

torch's names without the `_orig_mod` prefix that `torch.compile` adds, so that a state fits both the compiled
and the plain model. Prefixes of other wrappers are part of the name.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

from torch import Tensor, nn

_WRAPPED = "_orig_mod"  # the one child of a module that torch.compile made


def named_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters by name, in the order of registration; a tied one has the first of its names."""
    plain = plain_names(model)
    return {plain(name): p for name, p in model.named_parameters()}


def all_names(model: nn.Module) -> dict[str, list[str]]:
    """All names of each parameter by the first of them; a tied parameter has several."""
    plain = plain_names(model)
    firsts = {id(p): plain(name) for name, p in model.named_parameters()}
    found: dict[str, list[str]] = {name: [] for name in firsts.values()}
    for name, p in model.named_parameters(remove_duplicate=False):
        found[firsts[id(p)]].append(plain(name))
    return found


def named_buffers(model: nn.Module) -> dict[str, Tensor]:
    """The buffers by name, in the order of registration; a shared one has the first of its names."""
    plain = plain_names(model)
    return {plain(name): buffer for name, buffer in model.named_buffers()}


def named_modules(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Name and module. A module that torch.compile wraps has the name of its wrapper, which comes first."""
    plain = plain_names(model)
    return [(plain(name), module) for name, module in model.named_modules()]


def plain_names(model: nn.Module) -> Callable[[str], str]:
    """A function from names within `model`, or keys of its state_dict, to those of the plain model."""
    wrappers = [name for name, m in model.named_modules(remove_duplicate=False) if _is_compiled(m)]
    # Inner ones first: removing an outer prefix would change the names that begin with it.
    wrapped = [f"{name}.{_WRAPPED}".lstrip(".") for name in reversed(wrappers)]

    def plain(name: str) -> str:
        for prefix in wrapped:
            if name == prefix or name.startswith(prefix + "."):
                wrapper = prefix.removesuffix(_WRAPPED)  # "" or "layer."
                name = (wrapper + name[len(prefix) + 1 :]).removesuffix("." if name == prefix else "")
        return name

    return plain


def _is_compiled(module: nn.Module) -> bool:
    """Whether torch.compile made `module`. Does not import the compiler."""
    compiler = sys.modules.get("torch._dynamo.eval_frame")
    return compiler is not None and isinstance(module, compiler.OptimizedModule)
