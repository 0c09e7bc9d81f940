"""What the standard streams of a run do with text that their encoding cannot represent."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

PRINTED = (
    "from launcher.process import streams; streams.make_unfailing(); print('caf\\udce9 \\ud800 \\u2713')"
)


@pytest.mark.parametrize(("encoding", "tick"), [("utf-8", "\u2713"), ("ascii", "\\u2713")])
def test_bytes_of_a_name_that_are_not_utf_8_are_escaped(encoding, tick) -> None:
    environ = os.environ | {"PYTHONIOENCODING": encoding}
    done = subprocess.run([sys.executable, "-c", PRINTED], env=environ, capture_output=True)
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout.decode() == f"caf\\udce9 \\ud800 {tick}\n"


@pytest.mark.parametrize("words", [["--version"], ["recipes"], ["recipe=cnn", "--cfg", "job"]])
def test_an_answer_that_cannot_be_written_is_an_error(words) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "launcher", *words], stdout=full, stderr=subprocess.PIPE, text=True
        )
    assert done.returncode == 8
    assert done.stderr.startswith("error: stdout cannot be written: No space left on device.")
    assert done.stderr.count("\n") == 1


def test_a_reader_that_has_left_is_no_error() -> None:
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "launcher", "--version"]
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE)
    os.close(write)
    assert (done.returncode, done.stderr) == (0, b"")


@pytest.mark.parametrize("end", ["sys.stdout.close()", "sys.stdout = None"])
def test_code_that_ends_stdout_leaves_the_exit_code(end) -> None:
    code = f"import sys; from launcher.process import streams; streams.make_unfailing(); {end}; "
    done = subprocess.run([sys.executable, "-c", f"{code}sys.exit(bool(streams.lost_output()))"])
    assert done.returncode == 0
