"""Jobs of a sweep on a Ray cluster, for machines without a scheduler. Ray's core alone: no Tune, no Train.

Each job is an actor that holds the job's GPUs and runs it as a process of its own, so that nothing of Ray is
in that process. All machines need the sweep's folder, this Python and the working directory at the same
paths. Ray decides on which GPUs of which machine a job runs, and sets CUDA_VISIBLE_DEVICES there.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import os
import re
import signal
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launcher.config.schema import SweepConfig
from launcher.errors import PreflightError, first_line
from launcher.process.lifetime import ENDS_WITH_STARTER
from launcher.sweep.carriers import Carrier, Change, command_of, imported
from launcher.sweep.progress import LOG
from launcher.sweep.record import SweepJob

CONNECT_S = 10.0  # to a cluster in the same network
HEAD_S = 30.0  # without Ray's head; after 60 s Ray ends this process, without a word on how to continue
LOSSES = 3  # of the actor of one job, after which the job has failed: they may be its own fault
QUEUED = 4  # jobs that wait for Ray to place them, so that it can start one at once


class Runner:
    """One job, on the machine on which Ray has placed this actor."""

    def __init__(self) -> None:
        self._process: asyncio.subprocess.Process | None = None

    async def start(
        self, directory: str, command: Sequence[str], cwd: str, environ: Mapping[str, str]
    ) -> list[str]:
        """Start the job; returns the names of its devices."""
        ray = importlib.import_module("ray")  # without its types, which not every checker of ours has
        context, place = ray.get_runtime_context(), ray.util.get_node_ip_address()
        with open(os.path.join(directory, LOG), "ab") as output:
            self._process = await asyncio.create_subprocess_exec(
                *command,
                cwd=cwd,
                # What Ray has set for this actor wins, CUDA_VISIBLE_DEVICES above all.
                env={**environ, **os.environ, ENDS_WITH_STARTER: "1"},
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )
        gpus = context.get_accelerator_ids().get("GPU", [])
        return [f"{place}:{gpu}" for gpu in gpus or ["cpu"]]

    async def wait(self) -> int:
        assert self._process is not None
        code = await self._process.wait()
        return 128 - code if code < 0 else code

    async def send(self, number: int) -> None:
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)


@dataclass
class Running:
    """A job that was submitted. `waited` is Ray's reference to what comes next: its start, then its end."""

    job: SweepJob
    directory: Path
    new_actor: Callable[[], object]
    actor: Any = None
    waited: Any = None
    has_started: bool = False
    stopped: bool = False  # on request
    losses: int = 0  # how often its actor has died, as with its machine


class RayCarrier(Carrier):
    """Runs jobs on the cluster that this process can reach. Raises PreflightError if there is none."""

    def __init__(self, sweep: SweepConfig) -> None:
        self._sweep = sweep
        self._ray = connected()
        self._running: dict[int, Running] = {}
        host, _, port = self._ray.get_runtime_context().gcs_address.rpartition(":")
        self._head, self._head_seen_s = (host, int(port)), time.monotonic()

    def has_room(self, job: SweepJob) -> bool:
        if self._sweep.parallel != "auto":
            return len(self._running) < self._sweep.parallel
        return sum(not each.has_started for each in self._running.values()) < QUEUED

    def submit(self, job: SweepJob, directory: Path) -> None:
        nodes = [node["Resources"] for node in self._ray.nodes() if node["Alive"]]
        kind = "GPU" if any(has.get("GPU") for has in nodes) else "CPU"
        shared = kind == "GPU" and job.nproc == 1
        amount = job.nproc / self._sweep.jobs_per_gpu if shared else job.nproc
        if (most := max(has.get(kind, 0) for has in nodes)) < amount:
            problem = f"launch.nproc={job.nproc} needs as many {kind}s of one machine"
            raise PreflightError(f"{problem}, and the largest of the Ray cluster has {most:g}.")
        # Without num_cpus an actor needs a CPU while it is placed, which all jobs may hold.
        share = {"num_cpus": 0, f"num_{kind.lower()}s": amount}
        new = self._ray.remote(Runner).options(**share).remote
        self._running[job.number] = self._placed(Running(job, directory.absolute(), new))

    def _placed(self, each: Running) -> Running:
        """The job with a new actor, which Ray starts on a machine that has room."""
        each.actor, each.has_started = each.new_actor(), False
        place = each.directory
        each.waited = each.actor.start.remote(str(place), command_of(place), os.getcwd(), dict(os.environ))
        return each

    def poll(self, wait_s: float) -> Sequence[Change]:
        self._look_for_head()
        if not self._running:
            time.sleep(wait_s)
            return []
        references = {each.waited: each for each in self._running.values()}
        ready, _ = self._ray.wait([*references], num_returns=1, timeout=wait_s)
        if ready:
            ready, _ = self._ray.wait([*references], num_returns=len(references), timeout=0)
        return [change for each in ready for change in self._changes(references[each])]

    def _look_for_head(self) -> None:
        """Raise PreflightError if Ray's head has not been there for a while."""
        now = time.monotonic()
        try:
            socket.create_connection(self._head, 1.0).close()
            self._head_seen_s = now
        except OSError as error:
            if now - self._head_seen_s > HEAD_S:
                self._running.clear()  # none of them can be reached any more
                head = ":".join(map(str, self._head))
                problem = f"Ray's head at {head} has not answered for {HEAD_S:g} s ({error})"
                rest = "finished jobs are kept, and the others resume from their checkpoints"
                raise PreflightError(f"{problem}. Start Ray again, then the same command: {rest}.") from error

    def _changes(self, each: Running) -> Iterator[Change]:
        try:
            found = self._ray.get(each.waited)
        except self._ray.exceptions.RayError as error:
            is_lost = isinstance(error, self._ray.exceptions.RayActorError)
            each.losses += is_lost
            if is_lost and each.losses <= LOSSES and not each.stopped:
                self._placed(each)  # it resumes from its checkpoints, on another machine if that one died
                return
            del self._running[each.job.number]
            code = 128 + signal.SIGKILL if each.stopped else 1
            yield Change(each.job.number, code, "" if each.stopped else f"Ray: {first_line(error)}")
            return
        if each.has_started:
            del self._running[each.job.number]
            self._ray.kill(each.actor)  # frees its GPUs
            yield Change(each.job.number, found)
        else:
            each.job.devices, each.has_started = found, True
            each.waited = each.actor.wait.remote()
            yield Change(each.job.number)

    def stop(self, job: SweepJob, at_once: bool = False) -> None:
        each = self._running[job.number]
        each.stopped = True
        if each.has_started:
            each.actor.send.remote(signal.SIGKILL if at_once else signal.SIGTERM)
        else:
            self._ray.kill(each.actor)

    def save(self, job: SweepJob) -> None:
        each = self._running[job.number]
        if each.has_started:
            each.actor.send.remote(signal.SIGUSR1)

    def __exit__(self, *error: object) -> None:
        for each in self._running.values():
            self._ray.kill(each.actor)
        self._ray.shutdown()


def connected() -> Any:
    """The module `ray`, connected to the cluster of RAY_ADDRESS or of this machine. Raises PreflightError."""
    ray = imported("ray", "ray")
    address = os.environ.get("RAY_ADDRESS", "auto")
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        # Never a cluster of its own: it would end with this process, and take all GPUs of the machine.
        # Where nobody answers Ray tries for 13 minutes.
        if found := re.fullmatch(r"([\w.-]+):(\d+)", address):
            socket.create_connection((found[1], int(found[2])), CONNECT_S).close()
        ray.init(address=address, log_to_driver=False, logging_level="ERROR")
    except (OSError, ValueError, RuntimeError) as error:
        problem = f"sweep.on=ray: no Ray cluster can be reached ({first_line(error)})"
        start = "`ray start --head`, on further machines `ray start --address=HOST:6379`"
        advice = f"Start one with {start}, or name one with RAY_ADDRESS."
        raise PreflightError(f"{problem}. {advice}") from error
    finally:
        for number, handler in handlers.items():  # Ray has its own for SIGTERM, which would end the sweep
            signal.signal(number, handler)
    return ray
