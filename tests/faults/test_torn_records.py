"""A parent ends with its verdict, whatever a dying rank left torn, and however little room there is."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.parent import ENDLESS, Parent, write_recipe

pytestmark = [pytest.mark.slow, pytest.mark.timeout(60)]
LONG = "train.epochs=100000"
# The first bytes of a record of the ranks' store, as SIGKILL within its write or a full disk leaves them.
TEAR = """
def torn_at(kept):
    for name in os.listdir('/proc/self/fd'):
        with contextlib.suppress(OSError):
            if 'launcher-store' in os.readlink(f'/proc/self/fd/{name}'):
                with open(f'/proc/self/fd/{name}', 'ab') as file:
                    return file.write(bytes([64, 0, 0, 0, 0, 0, 0, 0, 1, 2])[:kept])
    raise AssertionError('there is no store')
"""


def write_tearing(directory: Path, kept: int, then: str, at: str = "step == 6 and RANK == 1") -> None:
    write_recipe(directory, f"if {at}: torn_at({kept}); {then}\n{ENDLESS}")
    recipe = directory / "tiny.py"
    recipe.write_text(f"import contextlib\n{recipe.read_text()}\n{TEAR}")


@pytest.mark.parametrize("kept", [1, pytest.param(8, marks=pytest.mark.slow), 10])
def test_a_rank_that_is_killed_within_a_write_is_named(tmp_path: Path, kept) -> None:
    write_tearing(tmp_path, kept, "os.kill(os.getpid(), signal.SIGKILL)")
    with Parent(tmp_path, LONG) as parent:
        assert parent.end(15) == 1
        assert "error: rank 1 was killed by SIGKILL (pid " in parent.stderr
