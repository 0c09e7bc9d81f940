"""Finds what became non-finite first: one forward pass, observed module by module.

Owns the hooks of that one pass, and always removes them. Runs only after a step that was not finite, and
changes neither weights nor buffers.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn

from launcher.engine.names import named_buffers, named_modules, named_parameters
from launcher.trainer.device import uncompiled

Kind = Literal["nan", "inf"]
MAX_ROWS = 64  # rows of an output that are listed; more would not help


@dataclass(frozen=True)
class ModuleFinding:
    """A module whose output was not finite.

    `input_range` is the smallest and largest finite input, None if there was none. `rows` are the first
    positions along the output's first dimension that hold such a value, out of `num_rows`: the samples, if
    that is the batch dimension.
    """

    name: str  # without torch.compile's prefixes; "" is the model itself
    type: str
    kind: Kind  # nan where the output holds both
    position: int  # calls of modules that had ended before it, in this pass
    inputs_finite: bool
    input_range: tuple[float, float] | None
    rows: tuple[int, ...]
    num_rows: int


@dataclass
class Diagnosis:
    """Result of one observed forward pass.

    `origin` is the first module with a non-finite output from finite inputs; `first` the first with a
    non-finite output, whatever its inputs.
    """

    origin: ModuleFinding | None = None
    first: ModuleFinding | None = None
    parameters: tuple[str, ...] = ()  # those that hold a value that is not finite

    @property
    def finding(self) -> ModuleFinding | None:
        return self.origin or self.first


def diagnose(model: nn.Module, run: Callable[[], object]) -> Diagnosis:
    """Observe one forward pass. Buffers that it updates (BatchNorm statistics) are restored.

    `run` does the forward pass, in whatever context it needs. Modules are ordered by the end of their calls,
    so an inner module is named before its parent.
    """
    found, ended = Diagnosis(), itertools.count()
    # Of the inputs of each call that has not ended, whether they are finite, and their range.
    calls: list[tuple[bool, tuple[float, float] | None]] = []

    def enter(module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        tensors = list(_floats((args, kwargs)))  # read first: a module may overwrite them
        calls.append((all(map(_finite, tensors)), _range(tensors)))

    def leave(name: str, module: nn.Module, args: object, kwargs: object, output: object) -> None:
        number, (finite, span) = next(ended), calls.pop()
        bad = next((tensor for tensor in _floats(output) if not _finite(tensor)), None)
        if bad is not None and found.origin is None:
            kind, num_rows = type(module).__name__, len(bad) if bad.ndim else 1
            rows = _rows(bad, num_rows)
            finding = ModuleFinding(name, kind, _kind(bad), number, finite, span, rows, num_rows)
            found.first = found.first or finding
            found.origin = finding if finite else None

    with torch.no_grad(), buffers_kept(model), uncompiled(), ExitStack() as hooks:
        for name, module in named_modules(model):
            hooks.callback(module.register_forward_pre_hook(enter, with_kwargs=True).remove)
            hooks.callback(module.register_forward_hook(partial(leave, name), with_kwargs=True).remove)
        run()
    found.parameters = tuple(nonfinite_parameters(model))
    return found


def nonfinite_parameters(model: nn.Module) -> list[str]:
    """Names of the parameters that hold inf or nan, as the model computes with them."""
    return [name for name, p in named_parameters(model).items() if not bool(p.detach().isfinite().all())]


@contextmanager
def buffers_kept(model: nn.Module) -> Iterator[None]:
    """Restore the values of the model's buffers on exit."""
    before = {name: buffer.detach().clone() for name, buffer in named_buffers(model).items()}
    try:
        yield
    finally:
        with torch.no_grad():
            for name, buffer in named_buffers(model).items():
                buffer.copy_(before[name])


def _kind(tensor: Tensor) -> Kind:
    return "nan" if bool(tensor.isnan().any()) else "inf"


def _floats(value: object) -> Iterator[Tensor]:
    """The non-empty floating-point tensors within a nested value."""
    if isinstance(value, Tensor):
        if value.is_floating_point() and value.numel():
            yield value
    elif isinstance(value, Mapping | list | tuple):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from _floats(item)


def _finite(tensor: Tensor) -> bool:
    return bool(tensor.isfinite().all())


def _range(tensors: list[Tensor]) -> tuple[float, float] | None:
    finite = [tensor[tensor.isfinite()] for tensor in tensors]
    ends = [part.aminmax() for part in finite if part.numel()]
    if not ends:
        return None
    return min(float(low) for low, _ in ends), max(float(high) for _, high in ends)


def _rows(tensor: Tensor, num_rows: int) -> tuple[int, ...]:
    bad = ~tensor.isfinite().reshape(num_rows, -1).all(1)
    return tuple(bad.nonzero().flatten()[:MAX_ROWS].tolist())
