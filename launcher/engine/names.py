"""The names of a model's parameters, buffers and modules, as the engine reports and saves them.

torch's names without the component `_orig_mod` that `torch.compile` adds, so that a state fits both the
compiled and the plain model. Prefixes of other wrappers are part of the name.
"""

from __future__ import annotations

from torch import Tensor, nn

_WRAPPED = "_orig_mod"  # the one child of a module that torch.compile made


def named_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters by name, in the order of registration; a tied one has the first of its names."""
    return {plain_name(name): p for name, p in model.named_parameters()}


def all_names(model: nn.Module) -> dict[str, list[str]]:
    """All names of each parameter by the first of them; a tied parameter has several."""
    found: dict[nn.Parameter, list[str]] = {}
    for name, p in model.named_parameters(remove_duplicate=False):
        found.setdefault(p, []).append(plain_name(name))
    return {names[0]: names for names in found.values()}


def named_buffers(model: nn.Module) -> dict[str, Tensor]:
    """The buffers by name, in the order of registration; a shared one has the first of its names."""
    return {plain_name(name): buffer for name, buffer in model.named_buffers()}


def named_modules(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Name and module. A module that torch.compile wraps has the name of its wrapper, which comes first."""
    return [(plain_name(name), module) for name, module in model.named_modules()]


def plain_name(name: str) -> str:
    """The name that a part of a model, or a key of its state_dict, has in the plain model."""
    return ".".join(component for component in name.split(".") if component != _WRAPPED)
