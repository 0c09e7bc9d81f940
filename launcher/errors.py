"""Errors that a user can act on, each with the exit code of the run that they end.

Owns the mapping from kind of failure to exit code. Never imports torch: the command line raises these before
any device is used. A bug of ours is an `assert` or a plain exception, never one of these.
"""

from __future__ import annotations

from collections.abc import Sequence

DIVERGED = 5
INTERRUPTED = 130
STOPPED = (75, 129, INTERRUPTED, 131, 143)  # exit codes by a signal, saved or not


class LauncherError(Exception):
    """A failure with a clear text (what happened, the rule, what to do now) and an exit code."""

    exit_code = 1
    traceback = ""  # of the exception behind it, where the text alone does not explain it; printed before it


class UnexpectedError(LauncherError):
    """An exception that no part of the launcher has foreseen. It may not recur after a restart."""


class RecipeError(LauncherError):
    """Code of a recipe raised an exception. Like any unexpected error, it may not recur after a restart."""


class CollectiveError(LauncherError):
    """The ranks called collectives that do not match. The text names the ranks."""


class ConfigError(LauncherError):
    """The command line or the config asks for something that cannot be run."""

    exit_code = 2


class PreflightError(LauncherError):
    """The machine or the way the processes were started cannot run this job."""

    exit_code = 3


class OutOfMemoryError(LauncherError):
    """The device has too little memory for this model and batch."""

    exit_code = 4


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


class StorageError(LauncherError):
    """A file or directory of the run cannot be written."""

    exit_code = 8


class NoProgressError(LauncherError):
    """The workers fail repeatedly without making progress."""

    exit_code = 10


class PreemptedError(LauncherError):
    """The run was asked to stop and is saved: the same command resumes it."""

    exit_code = 75


class DataWarning(UserWarning):
    """Something about a data set that the user should know, and that does not end the run."""


def in_words(error: BaseException) -> str:
    """The text of an error and the notes that were added to it."""
    return "\n".join([str(error) or repr(error), *getattr(error, "__notes__", ())])


def listed(names: Sequence[object], shown: int, separator: str = ", ") -> str:
    """The first `shown` of the names, and how many more there are."""
    more = f" and {len(names) - shown:,} more" if len(names) > shown else ""
    return separator.join(map(str, names[:shown])) + more
