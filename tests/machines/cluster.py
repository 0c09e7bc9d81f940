"""A real Slurm cluster of two nodes: that of the sbatch on PATH. Its nodes share this machine's files.

The nodes may be imitated on this machine, which then is the only address of both.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from tests.limits import at_most

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "slurm" / "train.sbatch"
# A container has neither scontrol nor hostname; the launcher needs none of them.
LAUNCHER = f"env PATH=/nowhere {sys.executable} -m launcher"


def reason_for_none() -> str:
    """Why there is no cluster here that these tests can use; empty if there is one."""
    if shutil.which("sbatch") is None:
        return "there is no sbatch on PATH"
    if len(names := nodes()) < 2:
        return f"the cluster of the sbatch on PATH has {len(names)} nodes; two are needed"
    return ""


def nodes() -> list[str]:
    return sorted(set(ask("sinfo", "--noheader", "--Node", "--format=%N").split()))


def ask(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout


def environment() -> dict[str, str]:
    """For sbatch, which hands it on: the launcher of this clone, and an address if nodes' names are none."""
    environ = dict(os.environ) | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "LAUNCHER": LAUNCHER}
    first = nodes()[0]
    try:
        socket.gethostbyname(first)
    except OSError:
        (environ["MASTER_ADDR"],) = re.findall(r"NodeAddr=(\S+)", ask("scontrol", "show", "node", first))
    return environ


class Job:
    """A job of train.sbatch in `directory`. Leaving the context cancels it."""

    def __init__(
        self, directory: Path, *words: str, options: tuple[str, ...] = (), command: str = ""
    ) -> None:
        self.directory, self.output = directory, directory / "job.out"
        arguments = ["sbatch", "--parsable", f"--output={self.output}", *options]
        arguments += [f"--wrap={command}"] if command else [str(SCRIPT), *words]
        done = subprocess.run(
            arguments, cwd=directory, env=environment(), capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, done.stderr
        self.id = done.stdout.strip()
        self.run_dir = directory / "outputs" / "slurm" / self.id

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *error: object) -> None:
        subprocess.run(["scancel", "--signal=KILL", "--full", self.id], capture_output=True, timeout=60)
        subprocess.run(["scancel", self.id], capture_output=True, timeout=60)
        self.until(self.is_gone, "it is gone", 60)

    def is_gone(self) -> bool:
        """Whether it neither waits nor runs, nor does a task of its array."""
        return self.id not in ask("squeue", "--noheader", "--me", "--format=%F").split()

    def facts(self) -> dict[str, str]:
        """What Slurm says about it: JobState, Restarts, ExitCode, ..."""
        return dict(re.findall(r"(\w+)=(\S*)", ask("scontrol", "show", "job", self.id)))

    @property
    def state(self) -> str:
        return self.facts()["JobState"]

    def signal(self, name: str) -> None:
        """To all processes of its step, where there is one. scancel may wait for a job that just leaves."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            subprocess.run(["scancel", f"--signal={name}", self.id], capture_output=True, timeout=15)

    def until(self, holds: Callable[[], object], what: str, timeout_s: float = 120) -> None:
        deadline = time.monotonic() + at_most(timeout_s)
        while not holds():
            assert time.monotonic() < deadline, f"not within {timeout_s} s: {what}\n{self.said}"
            time.sleep(0.2)

    def until_requeued(self) -> None:
        self.until(lambda: self.state == "PENDING" and self.facts()["Restarts"] == "1", "it is requeued")

    def start_again(self) -> None:
        """Slurm waits for two minutes before it starts a job again that was not lost with a node."""
        time.sleep(2)  # a slurmd refuses what was allowed within the second in which it ended the job
        now = ["StartTime=now", "TimeLimit=30"]
        subprocess.run(["scontrol", "update", f"JobId={self.id}", *now], capture_output=True, timeout=60)

    def until_ended(self) -> None:
        active = ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING")
        self.until(lambda: self.state not in active, "it has ended")

    @property
    def said(self) -> str:
        return self.output.read_text() if self.output.exists() else ""
