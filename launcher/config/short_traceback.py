"""The traceback that a console shows: the lines that the user can change, and the line that raised.

Owns which frames are left out. The rank's log has all of them, and
the whole text of the error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from traceback import FrameSummary, StackSummary, TracebackException

from launcher.config.groups import PACKAGE
from launcher.config.user_code import is_of_the_user
from launcher.errors import visible

# Call what the user wrote, and say nothing about it.
MACHINERY = tuple(f"torch/{name}" for name in ("nn/modules/module.py", "_dynamo/", "utils/_contextlib.py"))
# Of the launcher: from the command line to the start of a job, the same in every run.
OUTER = ("__main__.py", "cli.py", "commands/", "distributed/handoff.py", "supervisor/", "worker.py")
ENGINE = "engine/"  # between the user's call and torch: emulation, autocast
SHOWN = 5, 15  # of the outermost and of the innermost frames


def short_traceback(error: BaseException) -> str:
    """The traceback of an error and of those that led to it, without frames that do not help a user.

    Begins at the user's first line, and keeps those of libraries after it. If no line is the user's, it
    begins where the job does.
    """
    whole = TracebackException.from_exception(error)
    for each in _chain(whole):
        each.stack = StackSummary.from_list(_shown(each.stack))
    return "".join(map(visible, whole.format()))


def _chain(error: TracebackException) -> Iterator[TracebackException]:
    ahead: list[TracebackException | None] = [error]
    while ahead:
        each = ahead.pop()
        if each is not None:
            ahead += [each.__cause__, each.__context__]
            yield each


def _shown(stack: Sequence[FrameSummary]) -> list[FrameSummary]:
    """The frames that help. The last one always does, unless it is the engine's below the user's."""
    own = [number for number, frame in enumerate(stack) if is_of_the_user(frame.filename)]
    if own:
        inner = [frame for frame in stack[own[0] :] if not _is_ours(frame, ENGINE)]
        frames = _without(inner, lambda frame: _is_ours(frame) or _is_machinery(frame))
    else:
        frames = _without(stack, lambda frame: _is_ours(frame, *OUTER))
    first, last = SHOWN
    return frames if len(frames) <= first + last else [*frames[:first], *frames[-last:]]


def _without(
    stack: Sequence[FrameSummary], says_nothing: Callable[[FrameSummary], bool]
) -> list[FrameSummary]:
    return [frame for frame in stack[:-1] if not says_nothing(frame)] + list(stack[-1:])


def _is_ours(frame: FrameSummary, *folders: str) -> bool:
    path = Path(frame.filename)
    if not path.is_relative_to(PACKAGE):
        return False
    return not folders or path.relative_to(PACKAGE).as_posix().startswith(folders)


def _is_machinery(frame: FrameSummary) -> bool:
    return any(f"site-packages/{each}" in frame.filename for each in MACHINERY)
