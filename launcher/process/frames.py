"""Frees what the frames of a failure hold: the tensors of a pass, or a process group.

Imports no torch.
"""

from __future__ import annotations

import gc
import sys
import traceback
from collections import Counter
from collections.abc import Iterator
from types import CellType, FrameType, FunctionType


def release(error: BaseException) -> None:
    """Free all that the frames hold which `error` and its causes have passed through and left.

    Their tracebacks are dropped: log the error before. To clear the frames would not do. CPython keeps the
    function of a frame, and with it the variables that it takes from around it. Lambdas and generator
    expressions are such functions, and before Python 3.12 comprehensions: a forward pass that failed within
    `[layer(x) for layer in layers]` would keep all activations of its micro-batch.
    """
    for each in _chain(error):
        each.__traceback__ = None


def clear(error: BaseException) -> None:
    """Free what these frames hold, as `release`, and keep the tracebacks for the log.

    For a rank that has yet to say why it fails: others notice the failure once it has let go of the process
    group, which a comprehension that calls a collective may hold. A function that calls itself by its name
    is not freed.
    """
    errors = list(_chain(error))
    for each in errors:
        traceback.clear_frames(each.__traceback__)
    frames = {id(frame): frame for each in errors for frame, _ in traceback.walk_tb(each.__traceback__)}
    for _ in frames:  # what was in a cell may have been another such function, of another frame
        if not _empty_cells([*frames.values()]):
            return


def _chain(error: BaseException) -> Iterator[BaseException]:
    """The error, its causes, and the errors during whose handling it was raised; each once."""
    found: dict[int, BaseException] = {}
    ahead: list[BaseException | None] = [error]
    while ahead:
        each = ahead.pop()
        if each is not None and id(each) not in found:
            found[id(each)] = each
            ahead += [each.__cause__, each.__context__]
            yield each


def _empty_cells(frames: list[FrameType]) -> bool:
    """Empty each cell that belongs to functions alone which nothing can call any more; whether there was one.

    References are counted without a variable for what is counted, which would be one more.
    """
    functions = {key: each for key, each in ((id(frame), _function_of(frame)) for frame in frames) if each}
    frames_of = Counter(id(function) for function in functions.values())
    closures = {  # of functions that nothing but their frames refers to
        id(functions[key]): functions[key].__closure__ or ()
        for key in functions
        if sys.getrefcount(functions[key]) == 2 * frames_of[id(functions[key])] + 1  # frames, values, here
    }
    users_of = Counter(id(cell) for closure in closures.values() for cell in closure)
    emptied = False
    for closure in closures.values():
        for index in range(len(closure)):
            if sys.getrefcount(closure[index]) == users_of[id(closure[index])] + 1:
                emptied |= _empty(closure[index])
    return emptied


def _function_of(frame: FrameType) -> FunctionType | None:
    """The function that the frame runs, if it takes variables from around it."""
    if not frame.f_code.co_freevars:
        return None
    held = (each for each in gc.get_referents(frame) if isinstance(each, FunctionType))
    return next((each for each in held if each.__code__ is frame.f_code), None)


def _empty(cell: CellType) -> bool:
    """Whether there was anything in it."""
    try:
        cell.cell_contents  # noqa: B018  # raises ValueError if it is empty
    except ValueError:
        return False
    del cell.cell_contents
    return True
