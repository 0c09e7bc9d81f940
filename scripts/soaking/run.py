"""The run under test, seen from outside: its command, its processes, its files.

Owns the processes of a round. Every wait has a time limit. Leaving the context ends all processes; the kernel
ends them if the soak test dies.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from launcher.run_dir.records import CHECKPOINTS
from scripts.soaking.checks import MARK, alive_with, described

ROOT = Path(__file__).parents[2]
EVERY_STEPS = 15  # a checkpoint
STEPS_PER_EPOCH, EVAL_EVERY_EPOCHS = 25, 2
KEEP = 3
HANG_TIMEOUT_S = 6.0  # includes drawing the report, which is one phase
PREEMPTED = 75
GONE_S = 5.0  # for the workers of a parent that has ended
RECOVERY_S = 60.0  # for the outcome of a fault
ROUND_LIMIT_S = 900.0
TAIL_BYTES = 65536
LOOK_EVERY_S = 0.04
PR_SET_PDEATHSIG = 1


class Failed(Exception):
    """A check failed."""


class Finished(Exception):
    """The run has ended with success."""


@dataclass(frozen=True)
class Plan:
    """The settings that all runs of a soak test share."""

    num_ranks: int
    steps: int

    def words(self, run_dir: Path) -> list[str]:
        return [
            "recipe=resnet18",
            "recipe.uses=soak",
            f"recipes.path={ROOT / 'scripts' / 'soaking' / 'recipe.py'}",
            f"run.dir={run_dir}",
            "tracker=none",
            "data.batch_size=16",
            f"train.epochs={-(-self.steps // STEPS_PER_EPOCH)}",
            f"train.max_steps={self.steps}",
            f"train.eval_every_epochs={EVAL_EVERY_EPOCHS}",
            "train.log_every_steps=1",
            "optim.lr=0.05",
            "precision.loss_scale.init_scale=1024",
            "precision.loss_scale.growth_interval=20",
            f"checkpoint.every_steps={EVERY_STEPS}",
            f"checkpoint.keep={KEEP}",
            f"launch.nproc={self.num_ranks}",
            "launch.max_restarts=100000",
            f"launch.hang_timeout_s={HANG_TIMEOUT_S}",
            "launch.init_timeout_s=60",
            "launch.grace_s=20",
        ]


def is_scheduled(step: int) -> bool:
    """Whether a checkpoint of this step is scheduled."""
    return step % EVERY_STEPS == 0 or step % (STEPS_PER_EPOCH * EVAL_EVERY_EPOCHS) == 0


class Run:
    """One run in `directory`, over all its commands."""

    def __init__(self, plan: Plan, directory: Path, mark: str, limit_s: float) -> None:
        self.plan = plan
        self.directory = directory
        self.run_dir = directory / "run"
        self.restarts = 0  # caused by injected faults
        self.damaged: list[str] = []
        self.hurt = False  # whether the fault under way has been injected
        self._mark = mark
        self._number = 0  # of the commands
        self._process: subprocess.Popen[bytes] | None = None
        self._deadline_s = time.monotonic() + limit_s

    def __enter__(self) -> Run:
        self.run_dir.mkdir(parents=True, exist_ok=True)
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        """Kill the parent, which ends its workers, and all orphans."""
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait(GONE_S)
        for number in range(1, self._number + 1):
            for pid in alive_with(f"{self._mark}-{number}"):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    # Processes

    @property
    def parent(self) -> subprocess.Popen[bytes]:
        assert self._process is not None
        return self._process

    def start(self) -> None:
        """Start the command, the same each time."""
        self._number += 1
        environ = os.environ | {
            MARK: self._own_mark,
            "PYTHONPATH": str(ROOT),
            "CUDA_VISIBLE_DEVICES": "",
            "OMP_NUM_THREADS": "1",
            "TMPDIR": str(self.directory),  # deleted with the round, even if the parent is killed
        }
        with open(self.directory / "command.out", "ab") as out, open(self._stderr, "ab") as err:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "launcher", *self.plan.words(self.run_dir)],
                cwd=self.directory,
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                start_new_session=True,  # Ctrl-C is for this program
                preexec_fn=_die_with_parent,
            )

    def exit_code(self, limit_s: float = RECOVERY_S) -> int:
        """Wait for the parent, and for the end of all its processes."""
        try:
            code = self.parent.wait(limit_s)
        except subprocess.TimeoutExpired:
            raise Failed(f"the parent (pid {self.parent.pid}) has not ended within {limit_s:g} s") from None
        deadline = time.monotonic() + GONE_S
        while (left := alive_with(self._own_mark)) and time.monotonic() < deadline:
            time.sleep(LOOK_EVERY_S)
        if left:
            raise Failed(f"orphans, {GONE_S:g} s after the parent: {'; '.join(map(described, left))}")
        return code

    def workers(self) -> list[int]:
        """The workers that are alive, in the order of their ranks."""
        pid = self.parent.pid
        try:
            children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        except OSError:
            return []
        return [int(child) for child in children if state_of(int(child)) not in ("Z", "X", "gone")]

    def all_workers(self) -> list[int]:
        """Wait until all workers are running; returns them."""
        self.until(lambda: len(self.workers()) == self.plan.num_ranks, "all workers are running")
        return self.workers()

    def signal(self, pid: int, number: signal.Signals) -> float:
        """Send a signal; returns the time in unix seconds. Ignores a process that has ended."""
        now, self.hurt = time.time(), True
        if pid == self.parent.pid:
            self.parent.send_signal(number)
        else:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        return now

    # Output

    def tail(self) -> list[dict[str, Any]]:
        """The latest events of metrics.jsonl."""
        try:
            with open(self.run_dir / "metrics.jsonl", "rb") as file:
                size_bytes = file.seek(0, os.SEEK_END)
                file.seek(max(0, size_bytes - TAIL_BYTES))
                lines = file.read().split(b"\n")[:-1]
        except FileNotFoundError:
            return []
        return [json.loads(line) for line in (lines[1:] if size_bytes > TAIL_BYTES else lines)]

    def since(self, time_s: float, *kinds: str) -> list[dict[str, Any]]:
        return [event for event in self.tail() if event["time"] > time_s and event["event"] in kinds]

    def restarted_since(self, time_s: float) -> bool:
        """Whether workers started after this time have done a step."""
        starts = [event["time"] for event in self.since(time_s, "start")]
        return bool(starts) and bool(self.since(max(starts), "step"))

    def newest_checkpoint(self) -> int:
        """Step of the newest checkpoint; 0 without one."""
        names = (path.name for path in (self.run_dir / CHECKPOINTS).glob("step-*"))
        return max((int(name[5:]) for name in names), default=0)

    def status(self) -> dict[str, Any]:
        return dict(json.loads((self.run_dir / "status.json").read_text()))

    def restart_lines(self) -> list[str]:
        """The parents' messages about restarts so far."""
        return re.findall(r"^restart \d+ of .*$", self.told(), re.MULTILINE)

    def told(self) -> str:
        """Everything on stderr, of all commands."""
        return self._stderr.read_text(errors="replace")

    # Waiting

    def until(self, holds: Callable[[], Any], what: str, limit_s: float = RECOVERY_S) -> None:
        """Wait for a condition. Raises Finished if the run succeeds first, Failed if it ends otherwise."""
        deadline = min(time.monotonic() + limit_s, self._deadline_s)
        while not holds():
            if self.parent.poll() is not None:
                self.finish_or_fail(self.exit_code())
            if time.monotonic() > deadline:
                raise Failed(f"not within {limit_s:g} s: {what}")
            time.sleep(LOOK_EVERY_S)

    def wait_for_checkpoint_after(self, step: int) -> None:
        self.until(lambda: self.newest_checkpoint() > step, f"a checkpoint after step {step}")

    def finish_or_fail(self, code: int) -> None:
        """Raise Finished or Failed for an exit that was not requested."""
        if code == 0:
            raise Finished
        raise Failed(f"the parent has ended with exit code {code}")

    def wait_for_restart(self, victim: int) -> None:
        """Expect the parent's message about a restart, which must name the victim."""
        self.until(lambda: len(self.restart_lines()) > self.restarts, "the parent restarts its workers")
        self.restarts += 1
        line = self.restart_lines()[self.restarts - 1]
        if f"(pid {victim})" not in line:
            raise Failed(f"the fault hit pid {victim}, but the parent reports: {line}")

    def recovery_s(self, since_s: float) -> float:
        """Seconds from a fault to the next step of new workers."""
        self.until(lambda: self.restarted_since(since_s), "new workers have done a step")
        start = self.since(since_s, "start")[-1]
        return float(self.since(start["time"], "step")[0]["time"]) - since_s

    def undisturbed_s(self, since_s: float, workers: list[int]) -> float:
        """Seconds to the next step of the same workers."""
        self.until(lambda: self.since(since_s, "step"), "the same workers continue")
        if self.workers() != workers:
            raise Failed(f"workers {workers} had to continue, but now they are {self.workers()}")
        return float(self.since(since_s, "step")[0]["time"]) - since_s

    @property
    def _own_mark(self) -> str:
        return f"{self._mark}-{self._number}"

    @property
    def _stderr(self) -> Path:
        return self.directory / "command.err"


def state_of(pid: int) -> str:
    """As one letter: R, S, T (stopped), Z; or `gone`."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "gone"


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
