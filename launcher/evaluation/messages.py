"""What a rank sends to the others: the content that they wait for, or the error that it had instead.

Owns the form of a message. A rank that raised before a collective would leave the others waiting in it.
"""

from __future__ import annotations

import json
from collections.abc import Callable

import launcher.errors
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
    content = message[1:]
    if message[:1] == ERROR:
        kind, text, traceback = json.loads(content)
        error: LauncherError = getattr(launcher.errors, kind, LauncherError)(text)
        error.traceback = traceback
        raise error
    return content
