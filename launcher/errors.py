"""Errors that a user can act on, each with the exit code of the run that they end.

Owns the mapping from kind of failure to exit code. Never imports torch: the command line raises these before
any device is used. A bug of ours is an `assert` or a plain exception, never one of these.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

LONGEST = 2_000  # characters of an exception's text; the rank's log has all of it
LONGEST_OF_OURS = 4 * LONGEST  # of a message that names several ranks, each with an exception
DIVERGED = 5
PRUNED = 11
INTERRUPTED = 130  # 128 + SIGINT, as of a program that the signal ends
STOPPED = frozenset({75, *range(129, 193)})  # exit codes of a run that a signal ended, saved or not
# Of a run that ended as it was asked to, on all ranks after the same step.
ON_REQUEST = frozenset({75, PRUNED})
TO_RESUME = "To resume: the same command with"
CONTROL = re.compile("[\x00-\x1f\x7f-\x9f]")  # characters of Unicode's category Cc


class LauncherError(Exception):
    """A failure with a clear text (what happened, the rule, what to do now) and an exit code."""

    exit_code = 1
    restart_helps: bool | None = None  # None: as the exit code says
    by_scheduler = False  # of a run that was stopped: preempted, not stopped by a person
    shared = False  # one rank has sent it to all: no fault of the rank that reports it
    traceback = ""  # of the exception behind it, where the text alone does not explain it; printed before it

    def __str__(self) -> str:
        return visible(super().__str__(), LONGEST_OF_OURS)


class UnexpectedError(LauncherError):
    """An exception that no part of the launcher has foreseen. It may not recur after a restart."""


class RecipeError(LauncherError):
    """Code of a recipe raised an exception, which it would do again after a restart."""

    restart_helps = False


class ConfigError(LauncherError):
    """The command line or the config asks for something that cannot be run."""

    exit_code = 2


class PreflightError(LauncherError):
    """The machine or the way the processes were started cannot run this job."""

    exit_code = 3


class OutOfMemoryError(LauncherError):
    """The device has too little memory for this model and batch.

    `micro_batch` is the micro-batch with which the parent may restart the run, where that can help.
    """

    exit_code = 4
    micro_batch: int | None = None


class DivergedError(LauncherError):
    """Training produces values that are not finite, and lowering the loss scale does not help."""

    exit_code = DIVERGED


class ReplicaError(LauncherError):
    """The ranks, which should hold the same bits, do not."""

    exit_code = 9


class StalledError(LauncherError):
    """A rank did not arrive where the others waited for it."""

    exit_code = 6


class DataError(LauncherError):
    """The data set is missing, unreadable, or not of the expected form."""

    exit_code = 7


class LoaderKilledError(DataError):
    """A loader process was killed by a signal, as for memory."""

    restart_helps = True


class StorageError(LauncherError):
    """A file or directory of the run cannot be written."""

    exit_code = 8


class NoProgressError(LauncherError):
    """The workers fail repeatedly without making progress."""

    exit_code = 10


class PreemptedError(LauncherError):
    """The run was asked to stop and is saved: the same command resumes it."""

    exit_code = 75


class PrunedError(PreemptedError):
    """A sweep has ended the run, because others promise more."""

    exit_code = PRUNED


class Interrupted(BaseException):
    """Ctrl-C was pressed again while a run was stopping. Code of a data set may catch KeyboardInterrupt."""


class DataWarning(UserWarning):
    """Something about a data set that the user should know, and that does not end the run."""


def in_words(error: BaseException) -> str:
    """The text of an error, or else its class, and the notes that were added to it."""
    return "\n".join([text_of(error) or type(error).__name__, *_notes(error)])


def described(error: BaseException, with_notes: bool = False) -> str:
    """The class of an error and its text in one line: "ValueError: text". Notes have lines of their own."""
    text = " ".join(text_of(error).split())
    line = f"{type(error).__name__}: {text}" if text else type(error).__name__
    return "\n".join([line, *_notes(error)]) if with_notes else line


def text_of(error: BaseException) -> str:
    """The text of an exception of any code, `visible`."""
    text = whole_text(error)
    return text if isinstance(error, LauncherError) else visible(text)


def whole_text(error: BaseException) -> str:
    """The text of an exception, to be searched; its `__str__`, which may be the user's, may raise."""
    try:
        return str(error)
    except Exception as failure:
        return f"(no text: its __str__ raised {type(failure).__name__})"


def visible(text: str, longest: int = LONGEST) -> str:
    """The text without the middle of one that is too long, and `escaped`."""
    if len(text) > longest:
        half = longest // 2
        text = f"{text[:half]} [{len(text) - longest:,} characters left out] {text[-half:]}"
    return escaped(text)


def escaped(text: str, kept: str = "\n\t") -> str:
    """The text with its control characters, but those in `kept`, written out, as in \\x1b.

    For text of files, names and code of others that a terminal shows: an escape sequence in it could change
    what the terminal shows of other lines.
    """
    return CONTROL.sub(lambda each: each[0] if each[0] in kept else f"\\x{ord(each[0]):02x}", text)


def _notes(error: BaseException) -> list[str]:
    return [visible(str(note)) for note in getattr(error, "__notes__", ())]


def first_line(error: BaseException) -> str:
    """The first line of the error's text that is not blank, else the name of its class."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def first_sentence(error: BaseException) -> str:
    """`first_line` with a full stop, where it does not end a sentence."""
    line = first_line(error)
    return line if line.endswith((".", "!", "?")) else f"{line}."


def counted(number: int, noun: str, plural: str = "s") -> str:
    """`1 job`, `2 jobs`; `plural` is what the noun ends with where there are several."""
    return f"{number:,} {noun}{'' if number == 1 else plural}"


def listed(names: Sequence[object], shown: int, separator: str = ", ") -> str:
    """The first `shown` of the names, and how many more there are."""
    more = f" and {len(names) - shown:,} more" if len(names) > shown else ""
    return separator.join(map(str, names[:shown])) + more
