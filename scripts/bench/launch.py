"""Time from the command, and from the death of a rank, to the first all-reduce, compared with torchrun.

    python scripts/bench/launch.py [--quick] [--json FILE] [--ranks 2 4] [--repeats 8]

One side is `python -m launcher launch.nproc=N` with a tiny recipe whose first line is an all-reduce: config
composed and checked, run directory claimed, workers started. The other is torchrun with a script that only
initialises a process group and does the same all-reduce. Then a rank is killed, and both restart their
workers. The sides alternate, A B A B. Reports minimum and median, and the time of `--help` and of a wrong
command line.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from scripts.bench.interleaved import Figure, text_table, write

PATIENCE_S = 60
STEADY_S = 0.3  # between the first all-reduce and the kill
TELL = """
import os, time
import torch
import torch.distributed as dist

def all_reduce_and_report():
    dist.all_reduce(torch.zeros(1))
    rank, generation = os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]
    line = f"reduced {rank} {generation} {os.getpid()} {time.monotonic()}\\n"
    os.write(1, line.encode())  # in one write: the ranks share the pipe
"""
BARE = (
    TELL
    + """
dist.init_process_group("gloo")
all_reduce_and_report()
while True:
    dist.all_reduce(torch.zeros(1))
    time.sleep(0.01)
"""
)
RECIPE = (
    TELL
    + """
from torch import nn
from launcher.recipe import Recipe, TensorData, cross_entropy, recipe

def loss(network, batch):
    time.sleep(0.01)
    return cross_entropy(network, batch)

@recipe("tiny")
def tiny(config):
    all_reduce_and_report()
    data = TensorData({"image": torch.zeros(8, 4), "label": torch.zeros(8, dtype=torch.int64)})
    return Recipe(lambda: nn.Linear(4, 2), data, data, loss, classes=("a", "b"))
"""
)
WORDS = (
    "recipe=resnet18",
    "recipe.uses=tiny",
    "recipes.path=recipe.py",
    "tracker=none",
    "data.batch_size=8",
    "train.epochs=100000",
    "train.eval_every_epochs=100000",
)
EVENTS = {"start": "from the command", "restart": "from SIGKILL of a rank"}
ANSWERS = {"help": ["--help"], "config error": ["recipe=resnet81", "optim.lrr=1"]}


def launcher_command(ranks: int) -> list[str]:
    return [sys.executable, "-m", "launcher", *WORDS, f"launch.nproc={ranks}", "launch.max_restarts=1"]


def torchrun_command(ranks: int) -> list[str]:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--max-restarts=1"]
    return [*torchrun, f"--nproc-per-node={ranks}", "bare.py"]


SIDES = {"launcher": launcher_command, "torchrun": torchrun_command}


class Job:
    """A launched command in a new session, which is killed at the end."""

    def __init__(self, command: Sequence[str], folder: Path) -> None:
        self.began = time.monotonic()
        self._process = subprocess.Popen(
            command,
            cwd=folder,
            env=environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
        )

    def __enter__(self) -> Job:
        signal.signal(signal.SIGALRM, give_up)
        signal.alarm(PATIENCE_S)
        return self

    def __exit__(self, *error: object) -> None:
        signal.alarm(0)
        for pid in (*children_of(self._process.pid), self._process.pid):  # torchrun's workers outlive it
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        assert self._process.stdout is not None
        self._process.stdout.close()
        self._process.wait()

    def first_reduced(self, ranks: int, generation: int) -> tuple[float, dict[int, int]]:
        """When the last rank of an attempt finished its first all-reduce, and each rank's pid."""
        assert self._process.stdout is not None
        pids: dict[int, int] = {}
        latest = 0.0
        while len(pids) < ranks:
            line = self._process.stdout.readline()
            if not line:
                raise Failed("it ended before the first all-reduce")
            match line.split():
                case ["reduced", rank, number, pid, moment] if int(number) == generation:
                    pids[int(rank)] = int(pid)
                    latest = max(latest, float(moment))
        return latest, pids


def children_of(pid: int) -> list[int]:
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


class Failed(Exception):
    """A side failed before its first all-reduce."""


def give_up(number: int, frame: object) -> None:
    raise Failed(f"no all-reduce within {PATIENCE_S} s")


def environment() -> dict[str, str]:
    clean = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE")}
    # torch 2.13: without the last, torchrun's new workers find the addresses of the dead ones in the store.
    return clean | {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(Path(__file__).parents[2]),
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    }


def start_and_restart(side: str, ranks: int, folder: Path) -> tuple[float, float]:
    """Seconds from the command, and from the death of rank 1, until all ranks have reduced."""
    with Job(SIDES[side](ranks), folder) as job:
        started, pids = job.first_reduced(ranks, 0)
        time.sleep(STEADY_S)
        killed = time.monotonic()
        os.kill(pids[1], signal.SIGKILL)
        restarted, _ = job.first_reduced(ranks, 1)
    return started - job.began, restarted - killed


def answer(words: Sequence[str], folder: Path) -> float:
    began = time.monotonic()
    subprocess.run(
        [sys.executable, "-m", "launcher", *words],
        cwd=folder,
        env=environment(),
        capture_output=True,
        check=False,
        timeout=PATIENCE_S,
    )
    return time.monotonic() - began


def measure(ranks: int, repeats: int, folder: Path) -> dict[str, dict[str, list[float]]]:
    """Seconds by event and side. The first round warms the file cache and is not counted."""
    times: dict[str, dict[str, list[float]]] = {
        event: {side: [] for side in SIDES} for event in ("start", "restart")
    }
    for repeat in range(-1, repeats):
        for side in SIDES:
            seconds = start_and_restart(side, ranks, folder)
            if repeat >= 0:
                for event, value in zip(times, seconds, strict=True):
                    times[event][side].append(value)
    return times


def summary(times: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """Minimum and median by name; ratios of the launcher to torchrun where both are there."""
    rows: dict[str, Any] = {
        name: {"min_s": min(seconds), "median_s": statistics.median(seconds)}
        for name, seconds in times.items()
    }
    if SIDES.keys() <= rows.keys():
        rows["ratio"] = {
            key: rows["launcher"][f"{key}_s"] / rows["torchrun"][f"{key}_s"] for key in ("min", "median")
        }
    return rows


PROMISED = {"start": {2: 0.65, 4: 0.5}, "restart": {2: 0.5}}  # over torchrun, by event and ranks
ANSWER_PROMISED = {"help": 0.3}  # seconds


def tell(title: str, rows: Mapping[str, Mapping[str, float]]) -> None:
    print(f"\n{title}")
    for name, row in rows.items():
        print(f"  {name:14}" + "".join(f"{key:>10} {value:7.2f}" for key, value in row.items()), flush=True)


def main(argv: Sequence[str] | None = None) -> None:
    arguments = parse(argv)
    repeats = 2 if arguments.quick else arguments.repeats
    cases: list[dict[str, Any]] = []
    figures: list[Figure] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "bare.py").write_text(BARE)
        (folder / "recipe.py").write_text(RECIPE)
        for ranks in [2] if arguments.quick else arguments.ranks:
            for event, by_side in measure(ranks, repeats, folder).items():
                rows = summary(by_side)
                cases.append({"event": event, "ranks": ranks, "rows": rows})
                what = f"{EVENTS[event]} to the first all-reduce, {ranks} ranks"
                promised = PROMISED[event].get(ranks)
                figures.append(Figure.ratio(what, by_side, "launcher", "torchrun", promised))
                tell(f"{event} to first all-reduce, {ranks} ranks", cases[-1]["rows"])
        answers = {
            what: [answer(words, folder) for _ in range(repeats + 1)][1:] for what, words in ANSWERS.items()
        }
        cases.append({"event": "answer", "ranks": 0, "rows": summary(answers)})
        figures += [
            Figure.alone(f"time to answer, {what}", seconds, "s", ANSWER_PROMISED.get(what))
            for what, seconds in answers.items()
        ]
        tell("time to answer", cases[-1]["rows"])
    print(f"\n{text_table(figures)}")
    write(arguments.json, "seconds to the first all-reduce", repeats, cases, figures)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", nargs="+", type=int, default=[2, 4])
    parser.add_argument("--repeats", type=int, default=8)
    parser.add_argument("--quick", action="store_true", help="two repeats, two ranks, to test this file")
    parser.add_argument("--json", type=Path, help="where to write the numbers")
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
