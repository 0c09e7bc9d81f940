"""Frees what the frames of a failure hold: the tensors of a pass, or a process group.

Imports no torch.
"""

from __future__ import annotations


def release(error: BaseException) -> None:
    """Free what is held by the frames that `error` and its causes have passed through and left.

    Their tracebacks are dropped: log the error before. To clear the frames would not do. CPython keeps the
    function of a frame, and with it the variables that it takes from around it. Lambdas and generator
    expressions are such functions, and before Python 3.12 comprehensions: a forward pass that failed within
    `[layer(x) for layer in layers]` would keep all activations of its micro-batch.
    """
    found: set[int] = set()
    ahead: list[BaseException | None] = [error]
    while ahead:
        each = ahead.pop()
        if each is not None and id(each) not in found:
            found.add(id(each))
            each.__traceback__ = None
            ahead += [each.__cause__, each.__context__]
