"""What a rank sends to the others: the content that they wait for, or the error that it had instead.

Owns the form of a message. A rank that raised before a collective would leave the others waiting in it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import launcher.errors
from launcher.distributed.collectives import exchange_texts
from launcher.distributed.env import WorkerEnv, numbered
from launcher.errors import LauncherError

CONTENT, ERROR = b"+", b"-"


def message_of(make: Callable[[], bytes]) -> bytes:
    """What `make` returns, or the LauncherError that it raises, as a message."""
    try:
        return CONTENT + make()
    except LauncherError as error:
        return error_message(error)


def error_message(error: LauncherError) -> bytes:
    """The class, the text and the traceback of an error as a message."""
    return ERROR + json.dumps([type(error).__name__, str(error), error.traceback]).encode()


def content_of(message: bytes) -> bytes:
    """The content of a message. Raises the sender's LauncherError."""
    if message[:1] == ERROR:
        raise _error_of(message)
    return message[1:]


def _error_of(message: bytes) -> LauncherError:
    kind, text, traceback = json.loads(message[1:])
    error: LauncherError = getattr(launcher.errors, kind, LauncherError)(text)
    error.traceback = traceback
    return error


@contextmanager
def raised_on_all(env: WorkerEnv) -> Iterator[None]:
    """Raise a LauncherError of the code within on all ranks. A collective at the end of the context.

    Of several errors all ranks raise that of the lowest rank, with the ranks in front where some had none.
    """
    own = ""
    try:
        yield
    except LauncherError as error:
        own = error_message(error).decode()
    messages = exchange_texts(env, own)
    failed = [rank for rank, message in enumerate(messages) if message]
    if failed:
        first = _error_of(messages[failed[0]].encode())
        raise first if len(failed) == env.world_size else type(first)(f"on {numbered(failed)}: {first}")
