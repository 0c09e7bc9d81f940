"""What a check found, and how a check is run: in a process of its own, within a time limit.

Owns the way from a check that hangs, crashes or raises to a finding that says so.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection

from launcher.errors import LauncherError, described
from launcher.os.lifetime import die_with_parent

OK, WARNING, FAILURE = "ok", "warning", "failure"  # a warning: runs work, but slower or at a risk


@dataclass(frozen=True)
class Finding:
    """The value of one thing that was looked at, the verdict on it, and what to do unless that is `ok`."""

    name: str
    value: str
    verdict: str = OK
    advice: str = ""

    @property
    def sentence(self) -> str:
        return f"{self.name}: {self.value}. {self.advice}".rstrip()


def judged(name: str, value: str, advice: str = "", verdict: str = WARNING) -> Finding:
    """The finding that all is well, unless there is something to advise."""
    return Finding(name, value, verdict if advice else OK, advice)


@dataclass(frozen=True)
class Check:
    """`look` yields findings. After `limit_s` seconds it is ended, and that is the finding."""

    name: str
    look: Callable[[], Iterable[Finding]]
    limit_s: float = 10.0
    if_silent: str = "Look for what it waits in: dmesg, a network disk, a proxy."


def found_by(check: Check) -> list[Finding]:
    """Run a check in a forked process: what it imports, allocates or breaks ends with it."""
    forking = multiprocessing.get_context("fork")
    reader, writer = forking.Pipe(duplex=False)
    child = forking.Process(target=_look, args=(check, writer, os.getpid()))
    child.start()
    writer.close()  # so that the reader notices if the child ends without an answer
    found: list[Finding] | None = None
    try:
        answered = reader.poll(check.limit_s)
        with suppress(EOFError):
            found = reader.recv() if answered else None
    finally:
        assert child.pid is not None
        # Where it has answered, only processes that it has left behind remain.
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(child.pid, signal.SIGKILL)
        child.kill()  # it may not have reached setsid
        child.join()
    if found is not None:
        return found
    code = child.exitcode or 0
    cause = signal.Signals(-code).name if code < 0 else f"exit code {code}"
    text = f"the check was ended by {cause}" if answered else f"no answer within {check.limit_s:g} s"
    return [Finding(check.name, text, FAILURE, check.if_silent)]


def _look(check: Check, writer: Connection, parent: int) -> None:
    """Send what a check finds to the process that has forked this one."""
    die_with_parent(parent)  # no Ctrl-C reaches another session, and a check that hangs has no other limit
    os.setsid()  # so that processes which the check has started are ended with it
    found: list[Finding] = []
    try:
        found.extend(check.look())
    except LauncherError as error:
        found.append(Finding(check.name, "refused", FAILURE, str(error)))
    except Exception as error:
        found.append(Finding(check.name, "could not be looked at", WARNING, described(error)))
    writer.send(found)
