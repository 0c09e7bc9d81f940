"""Names what of a user's model a run cannot train: the module that was given other shapes, lost parameters.

Owns the search for them in a traceback and in the model. Changes nothing, and calls no module.
"""

from __future__ import annotations

import re
from traceback import walk_tb
from typing import Any

from torch import Tensor, nn

from launcher.errors import listed

SHAPES = re.compile(
    r"shapes cannot be multiplied|size mismatch|must match (the size|except|in)|Sizes of tensors|"
    r"[Ee]xpected .*(input|dim|channels|elements|weight)|Given (groups|normalized_shape|input size)|"
    r"invalid for input of size|running_mean should|same number of dimensions|match the broadcast shape|"
    r"Kernel size can't be greater|must be equal to (input|hidden)_size"
)  # of errors of torch about the shapes of their tensors
SHOWN = 5  # lines, or parameters


def unregistered_parameters(loss: Tensor, model: nn.Module) -> str:
    """What to warn of where `loss` depends on parameters that `model` does not hold; else empty.

    Walks the whole graph: 1 us for each operation.
    """
    own = set(map(id, model.parameters()))
    nodes: list[Any] = [loss.grad_fn]
    seen: set[Any] = set()
    found: list[str] = []
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        nodes += [parent for parent, _ in node.next_functions]
        # Only AccumulateGrad has one. Inputs that require grad, as for a gradient penalty, are no parameters.
        leaf = getattr(node, "variable", None)
        if isinstance(leaf, nn.Parameter) and id(leaf) not in own:
            found.append(str(list(leaf.shape)))
    if not found:
        return ""
    return (
        f"the loss depends on {len(found)} parameters that the model does not hold, of the shapes "
        f"{listed(found, SHOWN)}: they are never trained, and in no checkpoint. Make the module with them "
        "a submodule of what build_model returns (a plain list of modules registers none). If they are fixed "
        "on purpose, call requires_grad_(False) on it."
    )


def failing_module_inputs(error: BaseException) -> str:
    """`module 0, ReLU(), was given [32, 2]`: the innermost call of a module that the error left."""
    frames = [frame for frame, _ in walk_tb(error.__traceback__) if frame.f_code.co_name == "_call_impl"]
    # Of nn.Module: self, *args, **kwargs.
    calls = [frame.f_locals for frame in frames if isinstance(frame.f_locals.get("self"), nn.Module)]
    if not calls:
        return ""
    model, module = calls[0]["self"], calls[-1]["self"]
    name = next((name for name, each in model.named_modules() if each is module), "")
    shapes = [str(list(each.shape)) for each in calls[-1].get("args", ()) if isinstance(each, Tensor)]
    title = f"module {name}" if name else "the model"
    kind = f"{type(module).__name__}({module.extra_repr()})"
    return f"{title}, {kind}, was given {' and '.join(shapes) or 'no tensor'}"
