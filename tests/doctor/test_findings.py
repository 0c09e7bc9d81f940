"""Each check ends within its limit, whatever it does."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from launcher.doctor.findings import FAILURE, OK, WARNING, Check, Finding, found_by, judged
from launcher.errors import PreflightError


def fine() -> Iterator[Finding]:
    yield Finding("one", "1")
    yield judged("two", "2", "Do this.")


def hangs() -> Iterator[Finding]:
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    time.sleep(600)
    yield Finding("never", "")


def crashes() -> Iterator[Finding]:
    os.kill(os.getpid(), signal.SIGKILL)
    yield Finding("never", "")


def raises() -> Iterator[Finding]:
    raise OSError(28, "No space left on device")
    yield


def refuses() -> Iterator[Finding]:
    raise PreflightError("The driver is too old.")
    yield


def test_a_check_gives_its_findings() -> None:
    assert found_by(Check("numbers", fine)) == [Finding("one", "1"), Finding("two", "2", WARNING, "Do this.")]
    assert judged("two", "2").verdict == OK


@pytest.mark.parametrize(
    ("look", "verdict", "says"),
    [
        (hangs, FAILURE, "no answer within 0.5 s"),
        (crashes, FAILURE, "SIGKILL"),
        (raises, WARNING, "No space left"),
        (refuses, FAILURE, "The driver is too old."),
    ],
)
def test_a_check_that_fails_is_a_finding(look, verdict, says) -> None:
    (found,) = found_by(Check("this", look, limit_s=0.5 if look is hangs else 30.0))
    assert (found.name, found.verdict) == ("this", verdict)
    assert says in found.sentence


def test_processes_that_a_check_has_started_end_with_it(tmp_path) -> None:
    pid_file = tmp_path / "pid"

    def leaves_one() -> Iterator[Finding]:
        child = subprocess.Popen(["sleep", "600"])
        pid_file.write_text(str(child.pid))
        time.sleep(600)
        yield Finding("never", "")

    (found,) = found_by(Check("this", leaves_one, limit_s=3.0))
    assert "no answer" in found.value
    wait_until(lambda: not runs(int(pid_file.read_text())))


def runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_check_ends_with_the_doctor(number) -> None:
    reader, writer = os.pipe()

    def look() -> Iterator[Finding]:
        os.write(writer, f"{os.getpid()}\n".encode())
        yield from hangs()

    doctor = os.fork()
    if doctor == 0:
        try:
            for each in (signal.SIGINT, signal.SIGTERM):
                signal.signal(each, lambda *_: os._exit(1))
            found_by(Check("this", look, limit_s=600.0))
        finally:
            os._exit(0)
    os.close(writer)
    with open(reader, encoding="utf-8") as answer:
        check = int(answer.readline())
        os.kill(doctor, number)
        os.waitpid(doctor, 0)
        ended = select.select([answer], [], [], 30.0)[0]  # the check has the other end as well
        if not ended:
            os.kill(check, signal.SIGKILL)
        assert ended
