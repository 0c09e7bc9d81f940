"""Which line of a traceback is the user's: of a recipe or a file of one's own, not of us or of a library.

Owns that distinction. Never imports what it judges.
"""

from __future__ import annotations

import inspect
import sysconfig
from pathlib import Path
from types import CodeType

from launcher.config.groups import PACKAGE, recipes_dir

LIBRARIES = tuple(sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib"))


def place_of(error: BaseException) -> str:
    """`file:line, in function` of the innermost line of the user's; empty where there is none."""
    place, frame = "", error.__traceback__
    while frame is not None:
        code = frame.tb_frame.f_code
        if is_the_users(code):
            place = f"{code.co_filename}:{frame.tb_lineno}, in {code.co_name}"
        frame = frame.tb_next
    return place


def defined_at(function: object) -> str:
    """`file:line` where the user has defined a function or a class; empty where it is not the user's."""
    function = inspect.unwrap(function) if callable(function) else function
    function = getattr(function, "func", function)  # of functools.partial
    code = getattr(
        getattr(function, "__init__", None) if isinstance(function, type) else function, "__code__", None
    )
    return (
        f"{code.co_filename}:{code.co_firstlineno}"
        if isinstance(code, CodeType) and is_the_users(code)
        else ""
    )


def innermost(error: BaseException) -> str:
    """`file:line, in function` of the line that raised, whoever's it is; empty without a traceback."""
    frame = error.__traceback__
    while frame is not None and frame.tb_next is not None:
        frame = frame.tb_next
    if frame is None:
        return ""
    code = frame.tb_frame.f_code
    return f"{code.co_filename}:{frame.tb_lineno}, in {code.co_name}"


def is_the_users(code: CodeType) -> bool:
    return is_of_the_user(code.co_filename)


def is_of_the_user(file: str) -> bool:
    """Whether the file, as a traceback names it, is a recipe or a file of the user's own."""
    if file.startswith("<") or "site-packages" in file or "dist-packages" in file:
        return False
    path = Path(file).absolute()
    if path.is_relative_to(recipes_dir()):
        return True
    return not path.is_relative_to(PACKAGE) and not any(path.is_relative_to(each) for each in LIBRARIES)
