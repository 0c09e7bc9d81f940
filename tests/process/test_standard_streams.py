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
