"""An executed program that ignores signals although it installs handlers for them."""

from __future__ import annotations

import signal
import subprocess
import sys

from launcher.process.ignoring import start_ignoring
from launcher.process.signals import HEEDED

PROGRAM = """
import os
import signal
import time

heard = []
for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGALRM):
    signal.signal(number, lambda number, frame: heard.append(number))
os.write(1, b"ready\\n")
while signal.SIGALRM not in heard:
    time.sleep(0.01)
print(heard)
"""


def test_a_program_that_handles_signals_does_not_get_those_that_it_is_to_ignore() -> None:
    command = [sys.executable, "-I", "-S", "-c", PROGRAM]
    with start_ignoring(HEEDED, command, stdout=subprocess.PIPE, text=True) as program:
        for number in HEEDED:  # before it can have done anything
            program.send_signal(number)
        assert program.stdout is not None
        assert program.stdout.readline() == "ready\n"
        for number in (*HEEDED, signal.SIGALRM):
            program.send_signal(number)
        assert program.stdout.read() == f"[{signal.SIGALRM:d}]\n"
    assert program.returncode == 0
