"""A parent ends with its verdict, whatever a dying rank left torn, and however little room there is."""

from __future__ import annotations

import contextlib
import resource
import signal
import tempfile
import time
from functools import partial
from pathlib import Path

import pytest

from tests.faults.parent import ENDLESS, Parent, write_recipe
from tests.faults.saving import mount_alone
from tests.limits import at_most

pytestmark = pytest.mark.timeout(60)
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


@pytest.mark.sampled(every=2, first=1)
@pytest.mark.parametrize("kept", [1, pytest.param(8, marks=pytest.mark.slow), 10])
def test_a_rank_that_is_killed_within_a_write_is_named(tmp_path: Path, kept) -> None:
    write_tearing(tmp_path, kept, "os.kill(os.getpid(), signal.SIGKILL)")
    with Parent(tmp_path, LONG) as parent:
        assert parent.end(15) == 1
        assert "error: rank 1 was killed by SIGKILL (pid " in parent.stderr


@pytest.mark.slow
def test_the_workers_that_are_started_again_do_not_read_the_torn_record(tmp_path: Path) -> None:
    at = "step == 6 and RANK == 1 and GENERATION == 0"
    write_tearing(tmp_path, 3, "os.kill(os.getpid(), signal.SIGKILL)", at)
    with Parent(tmp_path, "train.epochs=10", "launch.max_restarts=1") as parent:
        assert parent.end() == 0
        assert parent.stderr.count("restart 1 of 1: rank 1 was killed by SIGKILL") == 1


@pytest.mark.slow
def test_a_rank_that_tore_a_record_and_raises_is_named_with_its_error(tmp_path: Path) -> None:
    """It claims to be the first that failed, and says why, without the store."""
    write_tearing(tmp_path, 3, "raise DataError('a fault on purpose')")
    with Parent(tmp_path, LONG, nproc=3) as parent:
        assert parent.end(15) == 7
        assert "error: rank 1 failed: a fault on purpose" in parent.stderr


@pytest.mark.slow
def test_sigterm_ends_a_run_whose_ranks_read_a_torn_record_for_ever(tmp_path: Path) -> None:
    write_tearing(tmp_path, 3, "raise DataError('a fault on purpose')", "step == 6")
    recipe = tmp_path / "tiny.py"
    spin = "open('spins', 'w').close(); torch.distributed.group.WORLD.get_group_store().get('x')"
    recipe.write_text(recipe.read_text().replace("raise DataError('a fault on purpose')", spin))
    with Parent(tmp_path, LONG, "launch.grace_s=1") as parent:
        parent.wait_until((tmp_path / "spins").exists, 20, "a rank reads the torn record")
        asked = time.monotonic()
        parent.signal(signal.SIGTERM)
        assert parent.end() == 143
        assert time.monotonic() - asked < at_most(4)


def limit_files(size: int) -> None:
    """A write beyond this fails with EFBIG, as with ENOSPC on a full disk."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("size", [0, 100])
def test_a_run_that_may_write_next_to_nothing_ends_with_a_reason(tmp_path: Path, size) -> None:
    write_recipe(tmp_path, ENDLESS)
    with Parent(tmp_path, LONG, prepare=partial(limit_after_claim, size)) as parent:
        assert parent.end(30) in (1, 8)  # by which file is the first to be too large
        assert (tmp_path / "limited").exists()


def limit_after_claim(size: int) -> None:
    """The parent's own files of the run are written by then, and its workers not yet forked."""
    from launcher.launch import parent

    supervised = parent.run_supervised

    def limited(*given: object) -> None:
        Path("limited").touch()
        limit_files(size)
        supervised(*given)  # type: ignore[arg-type]

    parent.run_supervised = limited


def full_temporary_folder() -> None:
    folder = Path("full")
    folder.mkdir()
    with contextlib.suppress(PermissionError):  # then it is only an empty folder
        mount_alone(b"tmpfs", folder, b"tmpfs", 0, b"size=8k,nr_inodes=100")
        with contextlib.suppress(OSError):
            (folder / "ballast").write_bytes(bytes(1 << 20))
    tempfile.tempdir = str(folder.absolute())


@pytest.mark.slow
def test_the_ranks_meet_while_the_temporary_folder_is_full(tmp_path: Path) -> None:
    write_recipe(tmp_path)
    with Parent(tmp_path, "train.epochs=2", prepare=full_temporary_folder) as parent:
        assert parent.end() == 0
