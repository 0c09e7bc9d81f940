"""Standard streams that are full or unread change the output of a run and nothing else."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.faults.parent import Parent, nothing, write_recipe

pytestmark = [pytest.mark.slow, pytest.mark.timeout(60)]


def full() -> None:
    descriptor = os.open("/dev/full", os.O_WRONLY)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)


def unread() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    os.dup2(writing, 1)
    os.dup2(writing, 2)
    sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115  # the one before takes 1 for a file


FAULTS = {"full": full, "unread": unread}


@pytest.fixture(scope="module")
def digest(tmp_path_factory) -> Callable[[int | None], str]:
    """Of the run of so many workers whose streams are as they should be."""
    found: dict[int | None, str] = {}

    def of(nproc: int | None) -> str:
        if nproc not in found:
            found[nproc] = trained(tmp_path_factory.mktemp("undisturbed"), nproc, nothing)
        return found[nproc]

    return of


def trained(directory: Path, nproc: int | None, prepare: Callable[[], None]) -> str:
    """The digest of a run that ends with 0."""
    write_recipe(directory)
    with Parent(directory, "train.epochs=2", nproc=nproc, prepare=prepare) as parent:
        assert parent.end() == 0, parent.stderr
        assert parent.json("status.json")["state"] == "done"
        return str(parent.json("result.json")["weights_sha256"])


CASES = [(fault, nproc) for fault in FAULTS for nproc in (None, 2)]
QUICK = [("full", None), ("unread", 2)]


@pytest.mark.parametrize(
    ("fault", "nproc"),
    [pytest.param(*case, marks=[] if case in QUICK else pytest.mark.slow) for case in CASES],
)
def test_a_run_ends_as_it_would(tmp_path: Path, digest, fault, nproc) -> None:
    assert trained(tmp_path, nproc, FAULTS[fault]) == digest(nproc)


def test_what_a_killed_rank_has_printed_is_on_stdout(tmp_path: Path) -> None:
    """Each process of a container or a Slurm job is unbuffered: PYTHONUNBUFFERED=1."""
    write_recipe(
        tmp_path, "if step == 3 and RANK == 1: print('last words'); os.kill(os.getpid(), signal.SIGKILL)"
    )
    with Parent(tmp_path, prepare=unbuffered) as parent:
        assert parent.end() == 1
        assert "last words\n" in parent.stdout


def unbuffered() -> None:
    raw: Any = io.FileIO(1, "w", closefd=False)
    sys.stdout = io.TextIOWrapper(raw, write_through=True)  # as Python makes it under -u
