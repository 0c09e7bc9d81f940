"""Runs of the launcher for the fault tests: the whole program, from argv to the exit code, on real ranks.

This process stands in for torchrun: it holds the store in which the ranks meet, and passes the end of one
rank on to the others. The ranks are forked from a server that has imported torch, so that a run of two takes
a second instead of five. Pictures are left out; nothing else of the program is changed.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from launcher.config.resolve import Request, compose_jobs
from launcher.config.schema import Config, RunConfig
from launcher.telemetry.event_log import read_events
from tests.ranks.harness import forkserver, leave_out_pictures

RECIPE = Path(__file__).with_name("noisy.py")
EPOCH = 13  # steps; the last of them has half a batch
WORDS = (
    "recipe=resnet18",
    "recipe.uses=noisy",
    f"recipes.path={RECIPE}",
    "tracker=none",
    "data.batch_size=16",
    "train.epochs=3",
    "train.log_every_steps=1",
    "optim.lr=0.05",
    "precision.loss_scale.init_scale=1024",
    "precision.loss_scale.growth_interval=7",
    "checkpoint.every_s=null",
    "checkpoint.every_steps=5",
    "checkpoint.keep=100",
    "ddp.check_replicas_every_steps=null",
    "launch.max_restarts=0",
)

_NUMBERS = itertools.count()
UserCode = Callable[[Any, Any], None]


def nothing(network: Any, batch: Any) -> None:
    """What the recipe calls when it is built (with None) and before each forward pass."""


USER_CODE: UserCode = nothing


@dataclass(frozen=True)
class Ended:
    """What a run left behind; codes and outputs by rank (negative codes: the signal)."""

    directory: Path
    codes: list[int]
    outputs: list[str]
    seconds: float

    @property
    def result(self) -> dict[str, Any]:
        return dict(json.loads((self.directory / "result.json").read_text()))

    @property
    def status(self) -> dict[str, Any]:
        return dict(json.loads((self.directory / "status.json").read_text()))

    @property
    def digest(self) -> str:
        """Of the weights and buffers of a run that is done."""
        assert self.codes == [0] * len(self.codes), self
        return str(self.result["weights_sha256"])

    @property
    def checkpoints(self) -> dict[int, Path]:
        paths = (self.directory / "checkpoints").glob("step-*")
        return {int(path.name[5:]): path for path in sorted(paths)}

    def events(self, *kinds: str) -> list[dict[str, Any]]:
        found = read_events(self.directory / "metrics.jsonl")
        return [event for event in found if not kinds or event["event"] in kinds]

    @property
    def warnings(self) -> list[str]:
        return [event["text"] for event in self.events("warning")]

    def log(self, rank: int) -> str:
        return (self.directory / "logs" / f"rank{rank}.log").read_text()

    def __str__(self) -> str:
        return f"exit codes {self.codes}\n" + "\n".join(self.outputs)


class Started:
    """Ranks that run. Leaving the context kills what is left of them."""

    def __init__(
        self,
        directory: Path,
        words: Sequence[str] = (),
        ranks: int = 1,
        user_code: UserCode = nothing,
        prepare: Callable[[], None] | None = None,
    ) -> None:
        import torch.distributed as dist

        context = forkserver()
        self.directory = directory
        self._began = time.monotonic()
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        number = next(_NUMBERS)
        self._outputs = [
            directory.parent / f"{directory.name}.{number}.output{rank}" for rank in range(ranks)
        ]
        config = replace(composed(*words), run=RunConfig(str(directory)))
        self.processes: list[Any] = []
        for rank in range(ranks):
            environ = environment(rank, ranks, self._store.port)
            args = ([*WORDS, *words], config, environ, self._outputs[rank], user_code, prepare)
            self.processes.append(context.Process(target=_be_a_rank, args=args, daemon=True))
        for process in self.processes:
            process.start()

    def __enter__(self) -> Started:
        return self

    def __exit__(self, *error: object) -> None:
        for process in self.processes:
            process.kill()
            process.join()

    def signal(self, number: int, *ranks: int) -> None:
        """To these ranks, or to all: what torchrun does with its own."""
        for rank in ranks or range(len(self.processes)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.processes[rank].pid, number)

    def until(self, holds: Callable[[], object], timeout_s: float = 30) -> None:
        deadline = time.monotonic() + timeout_s
        while not holds():
            assert time.monotonic() < deadline, f"nothing came of it within {timeout_s} s: {self.ended()}"
            assert any(process.is_alive() for process in self.processes), self.ended()
            time.sleep(0.002)

    def end(self, timeout_s: float = 40) -> Ended:
        """Wait for all ranks. A second after one has failed the others get SIGTERM, as from torchrun."""
        deadline, tell_at = time.monotonic() + timeout_s, float("inf")
        while any(process.is_alive() for process in self.processes):
            assert time.monotonic() < deadline, f"not ended within {timeout_s} s: {self.ended()}"
            wait([p.sentinel for p in self.processes if p.is_alive()], timeout=0.2)
            if tell_at == float("inf") and any(process.exitcode for process in self.processes):
                tell_at = time.monotonic() + 1
            if tell_at < time.monotonic():
                tell_at = deadline
                self.signal(signal.SIGTERM, *(i for i, p in enumerate(self.processes) if p.is_alive()))
        return self.ended()

    def ended(self) -> Ended:
        codes = [process.exitcode for process in self.processes]
        outputs = [path.read_text() if path.exists() else "" for path in self._outputs]
        return Ended(self.directory, codes, outputs, time.monotonic() - self._began)


def run(
    directory: Path,
    *words: str,
    ranks: int = 1,
    user_code: UserCode = nothing,
    prepare: Callable[[], None] | None = None,
) -> Ended:
    """A run from its start to its end, or from where one in this directory stopped."""
    with Started(directory, words, ranks, user_code, prepare) as started:
        return started.end()


@cache
def composed(*words: str) -> Config:
    (config,) = compose_jobs(Request((*WORDS, *words)))
    return config


def environment(rank: int, ranks: int, port: int) -> dict[str, str]:
    """What torchrun gives a worker; nothing for a process on its own."""
    if ranks == 1:
        return {}
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RUN_ID": "faults",
    }


def _be_a_rank(
    argv: list[str],
    config: Config,
    environ: dict[str, str],
    output: Path,
    user_code: UserCode,
    prepare: Callable[[], None] | None,
) -> None:
    global USER_CODE
    import torch

    from launcher import cli
    from launcher.config import resolve
    from launcher.distributed import process_group
    from launcher.os import lifetime

    lifetime.kill_forks_on_exit()  # as in launcher.__main__
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    sys.stdout, sys.stderr = (
        open(each, "w", errors="backslashreplace", closefd=False)  # noqa: SIM115  # as in launcher.__main__
        for each in (1, 2)
    )
    os.environ.update(environ)
    torch.set_num_threads(1)
    process_group.divide_threads = lambda ranks: None  # two threads change bits, and the cores are shared
    leave_out_pictures()
    resolve.compose_jobs = lambda request: [config]
    sys.modules["tests.faults.launching"].USER_CODE = user_code  # type: ignore[attr-defined]
    if prepare is not None:
        prepare()
    sys.exit(cli.main(argv))
