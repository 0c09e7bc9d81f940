"""Standard streams keep what Python promises of them, and progress that cannot be written ends no run."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

PREPARED = "import os, sys; from launcher.os import stdio; stdio.prepare(); "


def run(code: str, *flags: str, **options) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run([sys.executable, *flags, "-c", PREPARED + code], capture_output=True, **options)


@pytest.mark.parametrize(("encoding", "tick"), [("utf-8", "\u2713"), ("ascii", "\\u2713")])
def test_bytes_of_a_name_that_are_not_utf_8_are_escaped(encoding, tick) -> None:
    done = run("print('caf\\udce9 \\ud800 \\u2713')", env=os.environ | {"PYTHONIOENCODING": encoding})
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout.decode() == f"caf\\udce9 \\ud800 {tick}\n"


@pytest.mark.parametrize("words", [["--version"], ["recipes"], ["recipe=cnn", "--cfg", "job"]])
def test_an_answer_that_cannot_be_written_is_an_error(words) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "launcher", *words], stdout=full, stderr=subprocess.PIPE, text=True
        )
    assert done.returncode == 8
    assert "No space left on device" in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("words", [["--version"], ["recipe=cnn", "--cfg", "job"]])
def test_a_reader_that_has_left_is_no_error(words) -> None:
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run([sys.executable, "-m", "launcher", *words], stdout=write, stderr=subprocess.PIPE)
    os.close(write)
    assert (done.returncode, done.stderr) == (0, b"")
