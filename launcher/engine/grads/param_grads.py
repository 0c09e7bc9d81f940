"""`p.grad` of the parameters, which is the user's outside of a step.

Owns its removal while a step receives gradients, and backward passes that are not part of a step.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager

from torch import Tensor, nn

from launcher.engine.errors import check_loss


@contextmanager
def grads_set_aside(parameters: Collection[nn.Parameter]) -> Iterator[None]:
    """Set `p.grad` to None on entry, and restore it on exit.

    Gradients of a pass that raises are dropped; one that does not raise must remove its own.
    """
    held = [(p, grad) for p in parameters if (grad := p.grad) is not None]
    for p, _ in held:
        p.grad = None
    try:
        yield
    except BaseException:
        for p in parameters:
            p.grad = None
        raise
    finally:
        for p, grad in held:
            p.grad = grad


def dry_backward(parameters: Mapping[str, nn.Parameter], loss: Tensor, seed: Tensor) -> dict[str, Tensor]:
    """Gradients by name from a backward pass of `seed * loss` that is not part of a step.

    `seed`: fp32, 0-dim. Not with `autograd.grad`, under which re-entrant activation checkpointing refuses to
    run.
    """
    check_loss(loss, 0)
    with grads_set_aside(parameters.values()):
        loss.backward(seed)  # type: ignore[no-untyped-call]
        found = {name: p.grad for name, p in parameters.items() if p.grad is not None}
        for p in parameters.values():
            p.grad = None
    return {name: gradient for name, gradient in found.items() if gradient.numel()}
