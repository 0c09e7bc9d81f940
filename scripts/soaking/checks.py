"""Checks after a run, independent of its faults: of its files and of the living processes.

Each check returns its failures as messages; an empty list means success.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launcher.checkpoint.manifest import verify
from launcher.checkpoint.storage import DAMAGED
from launcher.run_dir.records import CHECKPOINTS
from launcher.telemetry.event_log import read_events

MARK = "LAUNCHER_SOAK"  # the environment variable that marks every process of a run
LEFTOVERS = (".unfinished-*", ".deleted-*")
TEMPORARY = ".*.tmp"


@dataclass(frozen=True)
class Expected:
    """The outcome of the undisturbed run."""

    digest: str
    steps: int
    skipped: tuple[int, ...]  # the skipped steps


def expected_of(run_dir: Path) -> Expected:
    result = json.loads((run_dir / "result.json").read_text())
    return Expected(str(result["weights_sha256"]), int(result["steps"]), skipped_steps(run_dir))


def skipped_steps(run_dir: Path) -> tuple[int, ...]:
    return tuple(steps_of(read_events(run_dir / "metrics.jsonl"), "overflow"))


def problems_of_run(run_dir: Path, expected: Expected, damaged: Collection[str]) -> list[str]:
    """All failed checks of a run that ended with success. `damaged`: checkpoints damaged on purpose."""
    return [
        *problems_of_result(run_dir, expected),
        *problems_of_events(run_dir, expected),
        *problems_of_checkpoints(run_dir / CHECKPOINTS, damaged, expected.steps),
        *(f"{path.name} was left in the run's directory" for path in sorted(run_dir.glob(TEMPORARY))),
    ]


def problems_of_result(run_dir: Path, expected: Expected) -> list[str]:
    """Check result.json and status.json: done, with the bits of the undisturbed run."""
    result = json.loads((run_dir / "result.json").read_text())
    status = json.loads((run_dir / "status.json").read_text())
    skipped = len(expected.skipped)
    return [
        *differences("result.json", result, state="done", exit=0, steps=expected.steps),
        *differences("result.json", result, weights_sha256=expected.digest, skipped_steps=skipped),
        *differences("status.json", status, state="done", exit=0, step=expected.steps),
    ]


def differences(name: str, values: dict[str, Any], **wanted: Any) -> list[str]:
    found = {key: values.get(key) for key in wanted}
    return [
        f"{name}: {key} is {found[key]}, not {wanted[key]}" for key in wanted if found[key] != wanted[key]
    ]


def problems_of_events(run_dir: Path, expected: Expected) -> list[str]:
    """Check metrics.jsonl: each step recorded once and in order, no sink dropped, one end."""
    events = read_events(run_dir / "metrics.jsonl")
    steps, skipped = steps_of(events, "step"), steps_of(events, "overflow")
    problems = []
    if twice := repeated(steps):
        problems.append(f"metrics.jsonl: steps {twice} are recorded twice")
    missing = sorted(set(range(1, expected.steps + 1)) - set(steps))
    if missing:
        problems.append(f"metrics.jsonl: steps {missing} are missing")
    if not problems and steps != sorted(steps):
        problems.append("metrics.jsonl: the steps are not in order")
    if tuple(skipped) != expected.skipped:
        problems.append(f"metrics.jsonl: steps {skipped} were skipped, not {list(expected.skipped)}")
    if twice := repeated(steps_of(events, "eval")):
        problems.append(f"metrics.jsonl: the evaluations of steps {twice} are recorded twice")
    if [event["event"] for event in events].count("end") != 1 or events[-1]["event"] != "end":
        problems.append("metrics.jsonl does not end with its only end event")
    given_up = [event["text"] for event in events if "is given up" in event.get("text", "")]
    return problems + given_up


def steps_of(events: Iterable[dict[str, Any]], kind: str) -> list[int]:
    return [int(event["step"]) for event in events if event["event"] == kind]


def repeated(steps: list[int]) -> list[int]:
    return sorted({step for step in steps if steps.count(step) > 1})


def problems_of_checkpoints(directory: Path, damaged: Collection[str], last_step: int) -> list[str]:
    """Check the checkpoints: intact under their names, damaged ones renamed, no temporary files."""
    names = sorted(path.name for path in directory.iterdir())
    problems = [
        f"{path.name}: {'; '.join(found)}"
        for path in sorted(directory.glob("step-*"))
        if (found := verify(path))
    ]
    for name in sorted(set(damaged)):
        aside = [other for other in names if other.startswith(DAMAGED + name)]
        if len(aside) != list(damaged).count(name):
            problems.append(f"{name} was damaged and is not set aside")
    unhurt = [name for name in names if name.startswith(DAMAGED) and name[len(DAMAGED) :][:13] not in damaged]
    problems += [f"{name} was not damaged on purpose" for name in unhurt]
    problems += [
        f"{path.name} is left over" for pattern in LEFTOVERS for path in sorted(directory.glob(pattern))
    ]
    if f"step-{last_step:08d}" not in names:
        problems.append(f"there is no checkpoint of the last step, {last_step}")
    return problems


def alive_with(mark: str) -> list[int]:
    """The processes that have inherited this mark, except zombies."""
    needle = f"{MARK}={mark}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal() and int(entry.name) != os.getpid():
            try:
                variables = (entry / "environ").read_bytes().split(b"\0")
            except OSError:  # ended, or of another user
                continue
            if needle in variables:
                found.append(int(entry.name))
    return found


def described(pid: int) -> str:
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        command = "gone by now"
    return f"pid {pid} ({command[:60].strip()})"
