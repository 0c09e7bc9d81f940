"""What a check found, and how a check is run: in a process of its own, within a time limit.

Owns the way from a check that hangs, crashes or raises to a finding that says so.
"""

from __future__ import annotations

import dataclasses
import json
import os
import select
import signal
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from launcher.errors import LauncherError, described
from launcher.process.lifetime import end_with

OK, NOTE, FAILURE = "ok", "note", "failure"  # a note: runs work, but slower or at a risk


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


def judged(name: str, value: str, advice: str = "", verdict: str = NOTE) -> Finding:
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
    reader, writer = os.pipe()
    parent, child = os.getpid(), os.fork()
    if child == 0:
        try:
            end_with(parent)  # no Ctrl-C reaches another session, and a check that hangs has no other limit
            os.setsid()  # so that processes which the check has started are ended with it
            os.close(reader)
            with open(writer, "w", encoding="utf-8") as answer:
                json.dump([dataclasses.asdict(finding) for finding in _looked(check)], answer)
        finally:
            os._exit(0)  # the rest of the program is the parent's
    os.close(writer)
    with open(reader, "rb") as answer:
        said = _read(answer.fileno(), check.limit_s)
    # Where it has answered, only processes that it has left behind remain.
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(child, signal.SIGKILL)
    with suppress(ProcessLookupError):
        os.kill(child, signal.SIGKILL)  # it may not have reached setsid
    _, status = os.waitpid(child, 0)
    if said is None:
        text = f"no answer within {check.limit_s:g} s"
    elif said:
        return [Finding(**finding) for finding in json.loads(said)]
    else:
        text = f"the check was ended by {_cause(status)}"
    return [Finding(check.name, text, FAILURE, check.if_silent)]


def _looked(check: Check) -> list[Finding]:
    found: list[Finding] = []
    try:
        found.extend(check.look())
    except LauncherError as error:
        found.append(Finding(check.name, "refused", FAILURE, str(error)))
    except Exception as error:
        found.append(Finding(check.name, "could not be looked at", NOTE, described(error)))
    return found


def _read(descriptor: int, limit_s: float) -> bytes | None:
    """All that is written until the other end is closed; None if that takes longer than the limit."""

    said, deadline = b"", time.monotonic() + limit_s
    while select.select([descriptor], [], [], max(0.0, deadline - time.monotonic()))[0]:
        part = os.read(descriptor, 65536)
        if not part:
            return said
        said += part
    return None


def _cause(status: int) -> str:
    number = os.waitstatus_to_exitcode(status)
    return signal.Signals(-number).name if number < 0 else f"exit code {number}"


def as_json(found: Iterable[Finding]) -> list[dict[str, Any]]:
    return [dataclasses.asdict(finding) for finding in found]
