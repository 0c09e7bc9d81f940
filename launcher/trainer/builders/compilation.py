"""The model as the training steps call it: plain, compiled as a whole, or compiled by block (train.compile).

Owns the search for blocks. Evaluations and the search for a failure's cause always run uncompiled.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, cast

import torch
from torch import nn

from launcher.config.rules import BLOCKS
from launcher.engine import Stepper
from launcher.errors import ConfigError

BLOCK = "They are two or more modules of one class, with children, in an nn.ModuleList or nn.Sequential."
GRAPHS_PER_BLOCK = 4  # for its first shape, for others, and with and without gradients


def compiled(how: str | bool, model: nn.Module, stepper: Stepper) -> nn.Module:
    """The model to train, keeping all rounding of half arithmetic that is emulated.

    By block, it is `model` itself, whose names stay as they are. Raises ConfigError as `repeated_blocks`.
    """
    if how is False:
        return model
    options: dict[str, Any] = {"emulate_precision_casts": stepper.emulation.used}
    if how is True:
        return cast(nn.Module, torch.compile(model, options=options))
    blocks = repeated_blocks(model)
    for block in blocks:
        block.compile(options=options)
    limits = torch._dynamo.config
    # Modules compiled in place share one cache of graphs. What exceeds its limit, 8, would run uncompiled.
    limits.recompile_limit = max(limits.recompile_limit, GRAPHS_PER_BLOCK * len(blocks))
    return model


def counted_kinds(blocks: Sequence[nn.Module]) -> str:
    """`4 x Block, 2 x Stage` of modules."""
    counts = Counter(type(block).__name__ for block in blocks)
    return ", ".join(f"{count} x {kind}" for kind, count in counts.items())


def repeated_blocks(model: nn.Module) -> list[nn.Module]:
    """The modules that train.compile=blocks compiles. Raises ConfigError if there are none."""
    blocks = find_repeated_blocks(model)
    if not blocks:
        raise ConfigError(
            f"train.compile={BLOCKS}: the model {type(model).__name__} has no repeated blocks. {BLOCK} Use "
            "train.compile=true, which compiles the whole model."
        )
    return blocks


def find_repeated_blocks(model: nn.Module) -> list[nn.Module]:
    """The outermost modules that repeat, as registered.

    They are entries of an nn.ModuleList or nn.Sequential, have children, and share their class with another
    one. A plain nn.Sequential is one only if its children have none.
    """
    entries = set(_entries(model))
    counts = Counter(map(type, entries))
    repeated = {entry for entry in entries if counts[type(entry)] > 1}
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
