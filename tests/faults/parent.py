"""A supervised run as a process that tests may hurt: its recipe is user code, its faults come from outside.

The process is forked from a server that has imported what the parent imports, so that a test pays for the run
and not for the start. Pictures are left out, unless asked for. All else is `python -m launcher`: its
arguments, its signals, its exit code, its files.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tests.limits import at_most
from tests.ranks.harness import forkserver, leave_out_pictures

RECIPE = """
import ctypes
import os
import signal
import time

import torch
from torch import nn

from launcher.errors import DataError
from launcher.recipe import Recipe, TensorData, cross_entropy, recipe

RANK, GENERATION = (int(os.environ.get(key, 0)) for key in ("RANK", "TORCHELASTIC_RESTART_COUNT"))
LIBC = ctypes.PyDLL(None)  # its functions hold the interpreter's lock
MUTEX = ctypes.create_string_buffer(64)
step = 0


def loss(network, batch):
    global step
    step += network.training
    if step == 5:
        with open(f"{os.getpid()}.unfinished", "w") as file:
            file.write(str(os.getpid()))
        os.rename(file.name, f"pid-{GENERATION}-{RANK}")
    if network.training:
        in_step(network, batch)
    return cross_entropy(network, batch)


def in_step(network, batch):
    IN_STEP


def build():
    IN_BUILD
    return nn.Linear(4, 2)


@recipe("tiny")
def tiny(config):
    x = torch.randn(32, 4, generator=torch.Generator().manual_seed(0))
    data = TensorData({"image": x, "label": (x[:, 0] > 0).long()})
    return Recipe(build, data, data, loss, classes=("a", "b"))
"""
WORDS = (
    "recipe=resnet18",
    "recipe.uses=tiny",
    "recipes.path=tiny.py",
    "tracker=none",
    "data.batch_size=8",
    "train.eval_every_epochs=100000",
    "launch.max_restarts=0",
)
ENDLESS = "time.sleep(0.01)"
BUFFERED = "a line that waits in the buffer of the parent's stdout when it forks"


def write_recipe(directory: Path, in_step: str = "pass", in_build: str = "pass") -> None:
    text = RECIPE.replace("IN_STEP", indented(in_step)).replace("IN_BUILD", indented(in_build))
    (directory / "tiny.py").write_text(text)


def indented(code: str) -> str:
    return code.strip().replace("\n", "\n    ")


def be_the_parent(
    directory: Path, words: Sequence[str], name: str, prepare: Callable[[], None], pictures: bool
) -> None:
    from launcher.__main__ import main

    os.chdir(directory)
    os.environ["OMP_NUM_THREADS"] = "1"
    tempfile.tempdir = str(directory)
    for descriptor, stream in ((1, "out"), (2, "err")):
        os.dup2(os.open(f"{name}.{stream}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), descriptor)
    sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115  # the server's own may be closed
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    print(BUFFERED)
    if not pictures:
        leave_out_pictures()
    prepare()
    code = main(list(words))
    sys.stdout.flush()
    os._exit(code)


def nothing() -> None:
    """What a parent does before it begins."""


class Parent:
    """A running `python -m launcher ... launch.nproc=...` in `directory`, killed at the latest on exit."""

    def __init__(
        self,
        directory: Path,
        *words: str,
        nproc: int | None = 2,
        name: str = "parent",
        prepare: Callable[[], None] = nothing,
        pictures: bool = False,
        command: Sequence[str] = (),
    ) -> None:
        self.directory, self._name = directory, name
        context = forkserver()
        workers = [] if nproc is None else [f"launch.nproc={nproc}"]
        arguments = (directory, [*command, *WORDS, *workers, *words], name, prepare, pictures)
        self._process = context.Process(target=be_the_parent, args=arguments)
        self.began = time.monotonic()
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid
        self._seen: set[int] = set()

    def __enter__(self) -> Parent:
        return self

    def __exit__(self, *error: object) -> None:
        left = self.workers()
        self._process.kill()
        self._process.join()
        self.wait_until(lambda: not any(map(is_alive, left)), 15, "the workers are gone")
        self._process.close()

    def end(self, timeout_s: float = 20) -> int:
        """Its exit code; fails if it runs for longer. Then no worker that was ever seen is left."""
        deadline = time.monotonic() + at_most(timeout_s)
        while self._process.exitcode is None and time.monotonic() < deadline:
            self.workers()
            time.sleep(0.02)
        code = self._process.exitcode
        assert code is not None, f"it did not end within {timeout_s} s\n{self.stderr}"
        assert not any(map(is_alive, self._seen)), "a worker has survived its parent"
        return code

    def workers(self) -> list[int]:
        """The processes that it has forked and that are alive, oldest first."""
        found = children_of(self.pid)
        self._seen |= set(found)
        return found

    def rank(self, rank: int, attempt: int = 0) -> int:
        """The process of a rank, once it is in its fifth step."""
        path = self.directory / f"pid-{attempt}-{rank}"
        self.wait_until(path.exists, 15, f"rank {rank} of attempt {attempt} is at work")
        return int(path.read_text())

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def wait_until(self, holds: Callable[[], Any], timeout_s: float, what: str) -> None:
        deadline = time.monotonic() + at_most(timeout_s)
        while not holds():
            if time.monotonic() > deadline:
                raise AssertionError(f"not within {timeout_s} s: {what}\n{self.stdout}\n{self.stderr}")
            time.sleep(0.01)

    @property
    def stdout(self) -> str:
        return (self.directory / f"{self._name}.out").read_text()

    @property
    def stderr(self) -> str:
        return (self.directory / f"{self._name}.err").read_text()

    @property
    def run_dir(self) -> Path:
        (run_dir,) = (self.directory / "outputs" / "resnet18").iterdir()
        return run_dir

    def json(self, name: str) -> dict[str, Any]:
        value = json.loads((self.run_dir / name).read_text())
        assert isinstance(value, dict)
        return value


def children_of(pid: int) -> list[int]:
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def state_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "gone"


def is_alive(pid: int) -> bool:
    return state_of(pid) not in ("gone", "Z", "X")
