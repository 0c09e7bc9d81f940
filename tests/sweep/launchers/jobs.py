"""Folders of jobs for the tests of launchers: runs of a recipe that waits for a file, and save every step."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from launcher.config.resolve import Request, compose_jobs
from launcher.config.schema import RunConfig
from launcher.sweep.launchers import JobEvent, JobLauncher
from launcher.sweep.state import SweepJob, write_job
from tests.faults.parent import WORDS, write_recipe
from tests.limits import at_most

ROOT = Path(__file__).parents[3]
WAIT = """
while step > 4 and not os.path.exists("{go}"):
    time.sleep(0.02)
"""
ENDLESS = "time.sleep(0.02)"  # with so many epochs


def jobs_in(
    directory: Path, count: int, in_step: str = WAIT, nproc: int = 1, epochs: int = 5
) -> list[tuple[SweepJob, Path]]:
    """Folders in `directory`. The jobs wait after the fourth step until the file `go` is there."""
    write_recipe(directory, in_step.replace("{go}", str(directory / "go")))
    found = []
    for number in range(count):
        words = [word for word in WORDS if not word.startswith("recipes.path")]
        more = (
            f"train.epochs={epochs}",
            "checkpoint.every_steps=1",
            f"seed={number}",
            f"launch.nproc={nproc}",
        )
        lines = (*words, f"recipes.path={directory / 'tiny.py'}", *more)
        (config,) = compose_jobs(Request(lines))
        place = directory / f"{number}_seed={number}"
        place.mkdir()
        write_job(replace(config, run=RunConfig(str(place))), lines)
        found.append((SweepJob(number, place.name, lines, nproc=nproc), place))
    return found


def follow(
    launcher: JobLauncher,
    until: Callable[[list[JobEvent]], object],
    changes: list[JobEvent],
    timeout_s: float = 100,
) -> list[JobEvent]:
    """Poll until the condition holds for all changes so far, which are returned."""
    deadline = time.monotonic() + at_most(timeout_s)
    while not until(changes):
        assert time.monotonic() < deadline, changes
        changes.extend(launcher.poll(0.5))
    return changes


def started(*numbers: int) -> Callable[[Sequence[JobEvent]], bool]:
    return lambda changes: set(numbers) <= {each.number for each in changes if each.exit is None}


def ended(*numbers: int) -> Callable[[Sequence[JobEvent]], bool]:
    return lambda changes: set(numbers) <= {each.number for each in changes if each.exit is not None}


def codes(changes: Sequence[JobEvent]) -> dict[int, int]:
    """The exit codes by number; each job has one."""
    exits = [(each.number, each.exit) for each in changes if each.exit is not None]
    assert len(dict(exits)) == len(exits), changes
    return dict(exits)


def have_saved(jobs: Sequence[tuple[SweepJob, Path]]) -> bool:
    return all(any((place / "checkpoints").glob("step-*")) for _, place in jobs)


def environment(**more: str) -> dict[str, str]:
    """For what starts the jobs: the launcher of this clone, one thread each."""
    return dict(os.environ) | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"} | more
