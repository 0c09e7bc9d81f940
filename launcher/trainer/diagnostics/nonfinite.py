"""Finds what became non-finite first: one forward or backward pass, observed module by module.

Owns the hooks of that one pass, and always removes them. Runs only after a step that was not finite, and
changes neither weights nor buffers.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from launcher.engine.names import named_modules, named_parameters
from launcher.engine.precision.op_lists import map_tensors
from launcher.evaluation.evaluate import unchanged

Kind = Literal["nan", "inf"]


@dataclass(frozen=True)
class ModuleFinding:
    """A module whose output, or at which a gradient, was not finite."""

    name: str  # without torch.compile's prefixes; "" is the model itself
    type: str
    kind: Kind  # nan where the tensor holds both
    position: int  # in this pass: calls of modules that had ended before it, or gradients
    inputs_finite: bool = False
    largest_input: float = 0.0  # the largest magnitude among its finite inputs


def diagnose(model: nn.Module, run: Callable[[], object]) -> ModuleFinding | None:
    """Observe one forward pass: the first module that makes values that are not finite from finite ones.

    Without one, the first whose output is not finite, whatever its inputs. `run` does the forward pass, in
    whatever context it needs. Modules are ordered by the end of their calls, so an inner module is named
    before its parent. Buffers that the pass updates (BatchNorm statistics) are restored.
    """
    found: list[ModuleFinding] = []
    ended = itertools.count()
    # Of the inputs of each call that has not ended, whether they are finite, and the largest magnitude.
    calls: list[tuple[bool, float]] = []

    def enter(module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        tensors = list(_floats((args, kwargs)))  # read first: a module may overwrite them
        calls.append((all(map(_finite, tensors)), max(map(_largest, tensors), default=0.0)))

    def leave(name: str, module: nn.Module, args: object, kwargs: object, output: object) -> None:
        number, (finite, largest) = next(ended), calls.pop()
        bad = next((tensor for tensor in _floats(output) if not _finite(tensor)), None)
        if bad is not None:
            found.append(ModuleFinding(name, type(module).__name__, _kind(bad), number, finite, largest))

    with torch.no_grad(), unchanged(model), ExitStack() as hooks:
        for name, module in named_modules(model):
            hooks.callback(module.register_forward_pre_hook(enter, with_kwargs=True).remove)
            hooks.callback(module.register_forward_hook(partial(leave, name), with_kwargs=True).remove)
        run()
    return next((each for each in found if each.inputs_finite), next(iter(found), None))


class BackwardWatch:
    """The hooks of one backward pass, and what they have found.

    `origin`: the first module whose outputs had finite gradients and whose inputs had not. `source`: the
    first module whose output had such a gradient, after `origin` if there is one: it makes what `origin`
    reads, or, without an `origin`, what the model's own code between modules reads.
    """

    def __init__(self) -> None:
        self.origin: ModuleFinding | None = None
        self.source: ModuleFinding | None = None
        self._calls, self._seen = itertools.count(), itertools.count()
        self._open: list[int] = []  # calls of modules that have not ended
        self._bad_outputs: set[int] = set()  # calls

    def enter(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Replace the inputs by views, whose gradients are those of this module and of no other reader."""
        call = next(self._calls)
        self._open.append(call)

        def seen(gradient: Tensor) -> None:
            number = next(self._seen)
            if self.origin is None and call not in self._bad_outputs and not _finite(gradient):
                self.origin = ModuleFinding(name, type(module).__name__, _kind(gradient), number)
                self.source = None  # that of a part of this module

        def viewed(value: Tensor) -> Tensor:
            if not value.requires_grad:
                return value
            view = value.view_as(value)
            view.register_hook(seen)  # type: ignore[no-untyped-call]
            return view

        return map_tensors(viewed, args), map_tensors(viewed, kwargs)

    def leave(self, name: str, module: nn.Module, args: object, output: object) -> None:
        call = self._open.pop()

        def seen(gradient: Tensor) -> None:
            number = next(self._seen)
            if not _finite(gradient):
                self._bad_outputs.add(call)
                if self.source is None:
                    self.source = ModuleFinding(name, type(module).__name__, _kind(gradient), number)

        for tensor in _floats(output):
            if tensor.requires_grad:
                tensor.register_hook(seen)  # type: ignore[no-untyped-call]


def diagnose_backward(model: nn.Module, run: Callable[[], object]) -> BackwardWatch:
    """Observe one forward and backward pass, `run`. Buffers that it updates are restored."""
    watch = BackwardWatch()
    with torch.enable_grad(), unchanged(model), ExitStack() as hooks:
        for name, module in named_modules(model):
            # Before the hook that widens the inputs of a module in fp32: what becomes half again is seen.
            enter = module.register_forward_pre_hook(
                partial(watch.enter, name), with_kwargs=True, prepend=True
            )
            hooks.callback(enter.remove)
            hooks.callback(module.register_forward_hook(partial(watch.leave, name)).remove)
        run()
    return watch


def nonfinite_parameters(model: nn.Module) -> list[str]:
    """Names of the parameters that hold inf or nan, as the model computes with them."""
    return [name for name, p in named_parameters(model).items() if not _finite(p.detach())]


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


def _largest(tensor: Tensor) -> float:
    return float(tensor.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0).abs().max())
