"""The engine's error and warning, and checks of what a step is given.

Owns the rules for a loss and its count, and how an error lists names.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Sequence
from fnmatch import fnmatchcase
from numbers import Real

import torch
from torch import Tensor

NEAREST = 3  # names that an error suggests


class UnusableError(ValueError):
    """Raised for input that the engine cannot train; the text states the value, the rule and the fix."""


class EngineWarning(UserWarning):
    """Issued for a training loop that runs, but probably not as its author intended."""


def check_loss(loss_sum: Tensor, count: float | Tensor) -> None:
    """Raise UnusableError unless `loss_sum` can be the sum of `count` losses."""
    if loss_sum.dtype != torch.float32 or loss_sum.ndim != 0:
        raise UnusableError(
            f"the loss is {loss_sum.dtype} of shape {tuple(loss_sum.shape)}; it must be fp32, 0-dim. Take "
            "logits.float() before the loss (a scaled fp16 loss would overflow), and sum over the samples."
        )
    if not loss_sum.requires_grad:
        raise UnusableError("the loss has no graph: compute it from the model, outside torch.no_grad().")
    check_count(count)


def check_count(count: float | Tensor) -> None:
    """Raise UnusableError unless `count` is a number of samples or tokens. Reads only CPU tensors."""
    if isinstance(count, Tensor):
        if count.numel() != 1:
            raise UnusableError(
                f"backward() was given a count of shape {tuple(count.shape)}; it must be one number of "
                "samples or tokens. Give count.sum()."
            )
        if count.device.type != "cpu":
            return  # reading it would wait for the device
        count = count.item()
    if not (isinstance(count, Real) and not isinstance(count, bool) and 0 <= count < math.inf):
        raise UnusableError(f"backward() was given {count!r} samples; it must be a number of at least 0.")


def check_backward(calls: int, failed: bool, micro_batches: int) -> None:
    """Raise RuntimeError for a backward() after one that `failed`, or after `micro_batches` of them."""
    if failed:
        raise RuntimeError(
            "a backward() of this step raised an error, so its gradients are incomplete. Call abandon() "
            "or step(), which both drop this step on all ranks, and then repeat it."
        )
    if calls == micro_batches:
        raise RuntimeError(
            f"backward() was called more than {micro_batches} times before step(). "
            f"Build the Stepper with micro_batches={micro_batches + 1} or more."
        )


def listed(names: Sequence[object], shown: int, separator: str = ", ") -> str:
    """The first `shown` of the names, and how many more there are."""
    more = f" and {len(names) - shown:,} more" if len(names) > shown else ""
    return separator.join(map(str, names[:shown])) + more


def require_match(pattern: str, names: Sequence[str], kind: str, where: str = "") -> None:
    """Raise UnusableError, with the nearest names, for a pattern of `fnmatch` that matches none of them."""
    if any(fnmatchcase(name, pattern) for name in names):
        return
    near = difflib.get_close_matches(pattern.replace("*", "").strip("."), names, NEAREST, cutoff=0.0)
    raise UnusableError(
        f"{where}the pattern {pattern!r} matches none of the {len(names)} {kind}. Nearest: "
        f"{', '.join(near) or 'none'}. A pattern has to match the whole name; `*` stands for any characters."
    )
