"""Time per sample of ranks of unlike speed: with shares by speed, with equal ones, and without any exchange.

    python scripts/bench/shares.py [--quick] [--json FILE] [--models resnet18 gpt] [--ranks 2 3] [--repeats 5]

Real runs with what the launcher does by default. Rank 0 has a core; every other one is stopped for two
thirds of the time, by SIGSTOP and SIGCONT, on the next core, where two take turns. The baseline is the sum
of what the ranks do at the same time without each other: cores that share memory slow each other down. The
sides alternate. With data.share=auto steps before the 20th are not counted, until which shares are found.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

from launcher.data.shares import proportional_shares
from launcher.telemetry.event_log import read_events
from scripts.bench.interleaved import Figure, text_table, write

ROOT = Path(__file__).resolve().parents[2]
MODELS = {  # words and the batch, of some seconds: what a step costs beside its samples then counts little
    "resnet18": (("recipe=resnet18", "data=synthetic", "data.num_samples=8192"), 128),
    "gpt": (("recipe=gpt",), 384),
}
WORDS = ("tracker=none", "train.log_every_steps=1", "data.val_fraction=0", "train.epochs=100000")
FOUND_STEP, WARM_STEP = 20, 3  # from where on steps are counted
TURNS, TURN_S = 3, 0.003  # a slow rank runs in one of three turns
PROMISED = 1 / 0.92  # the sum of what the ranks do alone, over what they do together
LIMIT_S = 300
STEPS = 9  # that are counted: a machine of others may slow some of them
QUICK_BATCH = 16
Run = tuple[int, Sequence[int]]  # its batch size, and the ranks of which the slow ones are above 0


def started(
    folder: Path, words: Sequence[str], batch_size: int, ranks: Sequence[int], last_step: int
) -> tuple[Path, list[subprocess.Popen[bytes]]]:
    """The directory of a run of these ranks, and its processes, in the environment that torchrun gives."""
    run_dir = Path(tempfile.mkdtemp(dir=folder))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    processes = []
    for number, rank in enumerate(ranks):
        job = {"RANK": number, "LOCAL_RANK": number, "WORLD_SIZE": len(ranks), "LOCAL_WORLD_SIZE": len(ranks)}
        variables = job | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": 1}
        command = ["taskset", "-c", str(min(rank, 1)), sys.executable, "-m", "launcher", *WORDS, *words]
        command += [f"data.batch_size={batch_size}", f"run.dir={run_dir}", f"train.max_steps={last_step}"]
        environ = (
            os.environ | {key: str(value) for key, value in variables.items()} | {"PYTHONPATH": str(ROOT)}
        )
        with (run_dir / f"output{rank}").open("wb") as output:
            processes.append(subprocess.Popen(command, env=environ, stdout=output, stderr=subprocess.STDOUT))
    return run_dir, processes


def samples_per_s(folder: Path, words: Sequence[str], runs: Sequence[Run], first: int, steps: int) -> float:
    """Of all these runs, which train at the same time, by the median of `steps` steps after `first`."""
    found = [started(folder, words, batch_size, ranks, first + steps) for batch_size, ranks in runs]
    processes = [process for _, of_run in found for process in of_run]
    ranks = [rank for _, of_run in runs for rank in of_run]
    with slowed([process for rank, process in zip(ranks, processes, strict=True) if rank]):
        for process in processes:
            assert process.wait(LIMIT_S) == 0, f"see {[str(run_dir) for run_dir, _ in found]}"
    total = 0.0
    for (batch_size, _), (run_dir, _) in zip(runs, found, strict=True):
        events = read_events(run_dir / "metrics.jsonl")
        ends = {event["step"]: event["time"] for event in events if event["event"] == "step"}
        step_s = [ends[step] - ends[step - 1] for step in range(first + 1, first + steps + 1)]
        total += batch_size / statistics.median(step_s)
    return total


@contextlib.contextmanager
def slowed(processes: Sequence[subprocess.Popen[bytes]]) -> Iterator[None]:
    """Let each of these, three at most, run for a third of the time in turn, until the context ends."""
    over = threading.Event()

    def pause() -> None:
        runs_now: subprocess.Popen[bytes] | None = None
        for turn in itertools.cycle(range(TURNS)):
            each = processes[turn] if turn < len(processes) else None
            for process, number in ((runs_now, signal.SIGSTOP), (each, signal.SIGCONT)):
                if process is not None:
                    process.send_signal(number)  # nothing where it has ended
            runs_now = each
            if over.wait(TURN_S):
                break
        for process in processes:
            process.send_signal(signal.SIGCONT)

    for process in processes:
        process.send_signal(signal.SIGSTOP)
    thread = threading.Thread(target=pause)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def measure(
    model: str, ranks: int, repeats: int, steps: int, folder: Path, quick: bool
) -> dict[str, list[float]]:
    """Seconds per sample by side."""
    words, batch_size = MODELS[model]
    batch_size = QUICK_BATCH if quick else batch_size
    speeds = [3.0] + [1.0] * (ranks - 1)
    shares = proportional_shares(speeds, batch_size)
    together: list[Run] = [(batch_size, range(ranks))]
    apart: list[Run] = [(share, [rank]) for rank, share in enumerate(shares)]
    # A rank with room for the whole batch takes its share in one pass, as a rank alone does.
    one_pass = f"data.micro_batch_size={batch_size}"
    sides = {
        "auto": ([*words, one_pass, "data.share=auto"], together, FOUND_STEP),
        "equal": ([*words, one_pass], together, WARM_STEP),
        "without each other": (words, apart, WARM_STEP),
    }
    found: dict[str, list[float]] = {side: [] for side in sides}
    for _ in range(repeats):
        for side, (given, runs, first) in sides.items():
            found[side].append(1 / samples_per_s(folder, given, runs, first, steps))
    return found


def figures_of(model: str, ranks: int, times: dict[str, list[float]]) -> Iterator[Figure]:
    for side, promised in (("auto", PROMISED), ("equal", None)):
        what = f"time per sample, {model}, {ranks} ranks, one of them fast, data.share={side}"
        yield Figure.ratio(what, times, side, "without each other", promised)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--ranks", nargs="+", type=int, choices=(2, 3, 4), default=[2])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="two steps of one model, to test this file")
    parser.add_argument("--json", type=Path, help="where to write the numbers")
    arguments = parser.parse_args(argv)
    repeats, steps, models = arguments.repeats, STEPS, arguments.models
    if arguments.quick:
        repeats, steps, models = 1, 2, ["resnet18"]
    rows, figures = [], []
    with tempfile.TemporaryDirectory() as folder:
        for model in models:
            for ranks in arguments.ranks:
                times = measure(model, ranks, repeats, steps, Path(folder), arguments.quick)
                rows.append({"model": model, "ranks": ranks, "seconds_per_sample": times})
                figures += figures_of(model, ranks, times)
                print(text_table(figures), flush=True)
                # After each of them: an interrupted run loses none.
                write(arguments.json, "ranks of unlike speed", repeats, rows, figures)


if __name__ == "__main__":
    main()
