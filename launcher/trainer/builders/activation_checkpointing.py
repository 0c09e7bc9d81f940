"""Blocks that recompute their activations in the backward pass instead of keeping them.

Owns which modules these are, and what must not happen twice: an update of running statistics. Dropout draws
the same numbers in both passes, because torch.utils.checkpoint restores its generators.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from launcher.engine.precision.fp32_modules import present_arithmetic
from launcher.errors import ConfigError


def checkpoint_activations(model: nn.Module) -> None:
    """Have the blocks of the model recompute their activations. Raises ConfigError as `checkpointed_blocks`.

    Names of modules and weights stay as they are. Passes without gradients, and copies of the model, keep no
    activations and recompute nothing.
    """
    for block in checkpointed_blocks(model):
        # Where torch's Module.compile() puts its call, and for the same reason: the hooks of the block run
        # within it, so that a block of precision.fp32_modules is recomputed in fp32, too.
        block._compiled_call_impl = partial(_call, block)


def checkpointed_blocks(model: nn.Module) -> list[nn.Module]:
    """The outermost modules that repeat, as registered. Raises ConfigError if there are none.

    They are entries of an nn.ModuleList or nn.Sequential, have children, and share their class with another
    one. A plain nn.Sequential is one only if its children have none. A layer alone keeps little but its
    input, which stays; a model that is recomputed as a whole would need the memory of all its activations
    again.
    """
    entries = set(_entries(model))
    counts = Counter(map(type, entries))
    repeated = {entry for entry in entries if counts[type(entry)] > 1}
    if not repeated:
        raise ConfigError(
            f"train.activation_checkpointing=true: the model {type(model).__name__} has no repeated blocks. "
            "They are two or more modules of one class, with children, in an nn.ModuleList or nn.Sequential. "
            "Use train.activation_checkpointing=false, or a smaller data.micro_batch_size."
        )
    return list(dict.fromkeys(_outermost(model, repeated)))


def _entries(model: nn.Module) -> Iterator[nn.Module]:
    """The entries of lists of modules that may be blocks."""
    for parent in model.modules():
        if isinstance(parent, nn.ModuleList | nn.Sequential):
            for entry in parent.children():
                inner = list(entry.children())
                # A list of blocks rather than one.
                holds_blocks = type(entry) is nn.Sequential and any(list(each.children()) for each in inner)
                is_list = isinstance(entry, nn.ModuleList | nn.ModuleDict)
                if inner and not (holds_blocks or is_list):
                    yield entry


def _outermost(module: nn.Module, repeated: set[nn.Module]) -> Iterator[nn.Module]:
    for child in module.children():
        if child in repeated:
            yield child
        else:
            yield from _outermost(child, repeated)


def _call(block: nn.Module, *args: Any, **kwargs: Any) -> Any:
    call: Callable[..., Any] = block._call_impl
    if not torch.is_grad_enabled():
        return call(*args, **kwargs)
    return checkpoint(call, *args, use_reentrant=False, context_fn=partial(_contexts, block), **kwargs)


def _contexts(block: nn.Module) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Those of the forward pass, which calls this at its start, and of its repetition.

    A module around the block may compute in fp32, and is not called again in the repetition.
    """
    return nullcontext(), _repetition(block, present_arithmetic())


@contextmanager
def _repetition(block: nn.Module, arithmetic: AbstractContextManager[object]) -> Iterator[None]:
    """Compute in `arithmetic`, and restore the block's buffers on exit.

    BatchNorm has counted these samples already.
    """
    before = [(buffer, buffer.clone()) for buffer in block.buffers()]
    try:
        with arithmetic:
            yield
    finally:
        for buffer, value in before:
            buffer.data.copy_(value)  # .data: the graph of the pass refers to them, and only the values stay
