"""Finds what became non-finite first: one forward or backward pass, observed module by module.

Owns the hooks of that one pass, and always removes them. Runs only on request, after a failure, and changes
neither weights nor buffers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from launcher.engine.flat.names import named_buffers, named_modules, named_parameters
from launcher.engine.uncompiled import uncompiled

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


@dataclass(frozen=True)
class Diagnosis:
    """Result of one observed forward pass.

    `origin` is the first module with a non-finite output from finite inputs; `first` the first with a
    non-finite output, whatever its inputs. `largest` names the module with the largest finite output, as a
    measure of how close the rest was to overflow.
    """

    origin: ModuleFinding | None
    first: ModuleFinding | None
    parameters: tuple[str, ...]  # those that hold a value that is not finite
    largest: tuple[str, float] | None

    @property
    def finding(self) -> ModuleFinding | None:
        return self.origin or self.first


@dataclass(frozen=True)
class BackwardDiagnosis:
    """Result of one observed backward pass. A module stands for the gradient of its output.

    `module` is the first in backward order whose gradient was not finite, with its type and kind, None if all
    were; `largest` the one with the largest gradient among those that were finite before it.
    """

    module: tuple[str, str, Kind] | None
    largest: tuple[str, float] | None
    parameters: tuple[str, ...]  # those whose own gradient was not finite


def diagnose(model: nn.Module, run: Callable[[], object]) -> Diagnosis:
    """Observe one forward pass. Buffers that it updates (BatchNorm statistics) are restored.

    `run` does the forward pass, in whatever context it needs. Modules are ordered by the end of their calls,
    so an inner module is named before its parent.
    """
    observer = _Observer()
    with torch.no_grad(), buffers_kept(model), uncompiled(), ExitStack() as hooks:
        for name, module in named_modules(model):
            for hook in (
                module.register_forward_pre_hook(observer.enter, with_kwargs=True),
                module.register_forward_hook(partial(observer.leave, name), with_kwargs=True),
            ):
                hooks.callback(hook.remove)
        run()
    bad = tuple(nonfinite_parameters(model))
    return Diagnosis(observer.origin, observer.first, bad, observer.largest)


def diagnose_backward(model: nn.Module, run: Callable[[], Mapping[str, Tensor]]) -> BackwardDiagnosis:
    """Observe one backward pass: `run` does a forward pass, then returns the gradients by parameter name.

    Buffers that it updates are restored.
    """
    observer = _BackwardObserver()
    with torch.enable_grad(), buffers_kept(model), uncompiled(), ExitStack() as hooks:
        for name, module in named_modules(model):
            hooks.callback(module.register_forward_hook(partial(observer.watch, name)).remove)
        gradients = run()
    bad = tuple(name for name, gradient in gradients.items() if not _finite(gradient))
    return BackwardDiagnosis(observer.module, observer.largest, bad)


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


@dataclass
class _Observer:
    """Observes the start and end of every module call. Inputs are read first: a module may overwrite them."""

    origin: ModuleFinding | None = None
    first: ModuleFinding | None = None
    largest: tuple[str, float] | None = None
    # Of the inputs of each call that has not ended, whether they are finite, and their range.
    _open: list[tuple[bool, tuple[float, float] | None]] = field(default_factory=list)
    _ended: int = 0

    def enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        tensors = list(_floats((args, kwargs)))
        self._open.append((all(map(_finite, tensors)), _range(tensors)))

    def leave(self, name: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        outputs = list(_floats(output))
        finite, span = self._open.pop()
        bad = next((tensor for tensor in outputs if not _finite(tensor)), None)
        if bad is None:
            self._compare(name, _range(outputs))
        elif self.origin is None:
            finding = ModuleFinding(
                name,
                type(module).__name__,
                _kind(bad),
                self._ended,
                finite,
                span,
                _rows(bad),
                len(bad) if bad.ndim else 1,
            )
            self.first = self.first or finding
            self.origin = finding if finite else None
        self._ended += 1

    def _compare(self, name: str, ends: tuple[float, float] | None) -> None:
        if ends is not None:
            size = max(map(abs, ends))
            if self.largest is None or size > self.largest[1]:
                self.largest = (name, size)


@dataclass
class _BackwardObserver:
    """Registers a hook on every module's output; autograd calls them in backward order."""

    module: tuple[str, str, Kind] | None = None
    largest: tuple[str, float] | None = None

    def watch(self, name: str, module: nn.Module, inputs: Any, output: Any) -> None:
        for tensor in _floats(output):
            if tensor.requires_grad:
                tensor.register_hook(partial(self._record, name, module))  # type: ignore[no-untyped-call]

    def _record(self, name: str, module: nn.Module, gradient: Tensor) -> None:
        if self.module is not None:
            return
        if not _finite(gradient):
            self.module = (name, type(module).__name__, _kind(gradient))
        elif (size := float(gradient.abs().max())) > (self.largest or ("", 0.0))[1]:
            self.largest = (name, size)


def _kind(tensor: Tensor) -> Kind:
    return "nan" if bool(tensor.isnan().any()) else "inf"


def _floats(value: Any) -> Iterator[Tensor]:
    """The non-empty floating-point tensors within a nested value."""
    if isinstance(value, Tensor):
        if value.is_floating_point() and value.numel():
            yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _floats(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _floats(item)


def _finite(tensor: Tensor) -> bool:
    return bool(tensor.isfinite().all())


def _range(tensors: list[Tensor]) -> tuple[float, float] | None:
    finite = [tensor[tensor.isfinite()] for tensor in tensors]
    ends = [part.aminmax() for part in finite if part.numel()]
    if not ends:
        return None
    return min(float(low) for low, _ in ends), max(float(high) for _, high in ends)


def _rows(tensor: Tensor) -> tuple[int, ...]:
    if tensor.ndim == 0:
        return (0,)
    bad = ~tensor.isfinite().flatten(1).all(1) if tensor.ndim > 1 else ~tensor.isfinite()
    return tuple(bad.nonzero().flatten()[:MAX_ROWS].tolist())
