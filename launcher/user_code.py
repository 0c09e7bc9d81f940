"""Which lines of a traceback are the user's, and the traceback that a console shows: those lines, and the one
that raised.

A line of the user's is of a recipe or a file of one's own, not of us or of a library. The rank's log has the
whole traceback. Never imports what it judges.
"""

from __future__ import annotations

import functools
import re
import sys
import sysconfig
from pathlib import Path
from traceback import StackSummary, TracebackException, walk_tb
from types import CodeType

from launcher.config.groups import PACKAGE, recipes_dir
from launcher.errors import visible

LIBRARIES = tuple(sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib"))
WAITS = "torch/distributed/", "launcher/recipe/rank0.py"  # files, in which a rank waits for another one


def user_location(error: BaseException) -> str:
    """`file:line, in function` of the innermost line of the user's; empty where there is none."""
    return next((place for code, place in _innermost_first(error) if is_user_code(code)), "")


def innermost(error: BaseException) -> str:
    """`file:line, in function` of the line that raised, whoever's it is; empty without a traceback."""
    return next((place for _, place in _innermost_first(error)), "")


def place_of_thread(thread: int) -> str:
    """`file:line, in function` of the innermost line of the user's in a thread; empty where there is none."""
    frame = sys._current_frames().get(thread)
    while frame is not None:
        if is_user_code(frame.f_code) and frame.f_back is not None:
            return f"{frame.f_code.co_filename}:{frame.f_lineno}, in {frame.f_code.co_name}"
        frame = frame.f_back
    return ""


def waits_for_another_rank(thread: int) -> bool:
    """Whether the innermost line of the user's in a thread has called a collective or rank0_first."""
    frame = sys._current_frames().get(thread)
    while frame is not None and not is_user_code(frame.f_code):
        if any(file in frame.f_code.co_filename for file in WAITS):
            return True
        frame = frame.f_back
    return False


def place_in_stacks(text: str) -> str:
    """As `place_of_thread`, of the thread that faulthandler's latest stacks in `text` call current."""
    own = text.rpartition("\nCurrent thread ")[2].partition("\n\n")[0]
    frames = re.findall(r'^  File "(.+)", line (\d+) in (.+)$', own, re.MULTILINE)
    return next((f"{file}:{line}, in {name}" for file, line, name in frames[:-1] if is_of_the_user(file)), "")


def _innermost_first(error: BaseException) -> list[tuple[CodeType, str]]:
    frames = [(frame.f_code, line) for frame, line in walk_tb(error.__traceback__)]
    return [(code, f"{code.co_filename}:{line}, in {code.co_name}") for code, line in reversed(frames)]


def is_user_code(code: CodeType) -> bool:
    return is_of_the_user(code.co_filename)


@functools.cache  # asked for each frame of each warning
def is_of_the_user(file: str) -> bool:
    """Whether the file, as a traceback names it, is a recipe or a file of the user's own."""
    if file.startswith("<"):
        return False
    path = Path(file).absolute()
    if path.is_relative_to(recipes_dir()):  # first: those of a wheel are in site-packages and in PACKAGE
        return True
    if "site-packages" in file or "dist-packages" in file:
        return False
    return not path.is_relative_to(PACKAGE) and not any(path.is_relative_to(each) for each in LIBRARIES)


def short_traceback(error: BaseException) -> str:
    """The traceback of an error and of those that led to it: the user's lines, and the line that raised.

    The whole of it where no line is the user's.
    """
    whole = TracebackException.from_exception(error)
    ahead: list[TracebackException | None] = [whole]
    while ahead:
        if (each := ahead.pop()) is not None:
            ahead += [each.__cause__, each.__context__]
            own = [is_of_the_user(frame.filename) for frame in each.stack]
            last = len(own) - 1
            each.stack = StackSummary.from_list(
                frame
                for number, frame in enumerate(each.stack)
                if own[number] or number == last or not any(own)
            )
    return "".join(map(visible, whole.format()))
