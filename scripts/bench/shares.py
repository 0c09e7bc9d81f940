"""Time per sample of ranks of unlike speed: with shares by speed, with equal shares, and of each rank alone.

    python scripts/bench/shares.py [--quick] [--json FILE] [--models resnet18 gpt] [--ranks 2 3] [--repeats 5]

Real runs with what the launcher does by default. Rank 0 has a core; every other one is stopped for two thirds
of each 30 ms, by SIGSTOP and SIGCONT, on the next core, which two of them share. The sides alternate. Steps
before the 25th are not counted: until then shares are being found.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from launcher.telemetry.event_log import read_events
from scripts.bench.interleaved import Figure, median_interval, text_table, write

ROOT = Path(__file__).resolve().parents[2]
MODELS = {
    "resnet18": ("recipe=resnet18", "data.batch_size=64"),
    "gpt": ("recipe=gpt", "data.batch_size=32"),
}
WORDS = ("tracker=none", "train.log_every_steps=1", "train.eval_every_epochs=100000", "train.epochs=100000")
FIRST_STEP, STEPS = 25, 20  # that are counted
RUNNING_S, STOPPED_S = 0.01, 0.02
PROMISED = 1 / 0.92  # the sum of what the ranks do alone, over what they do together
LIMIT_S = 300


def seconds_per_sample(folder: Path, words: Sequence[str], ranks: Sequence[int], steps: int) -> float:
    """Of a run of these ranks; rank 0 alone is not slowed."""
    run_dir = Path(tempfile.mkdtemp(dir=folder))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    started = []
    for number, rank in enumerate(ranks):
        job = {"RANK": number, "LOCAL_RANK": number, "WORLD_SIZE": len(ranks), "LOCAL_WORLD_SIZE": len(ranks)}
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        variables = {key: str(value) for key, value in (job | place if len(ranks) > 1 else {}).items()}
        command = ["taskset", "-c", str(min(rank, 1)), sys.executable, "-m", "launcher", *WORDS, *words]
        command += [f"run.dir={run_dir}", f"train.max_steps={FIRST_STEP + steps}"]
        variables |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        started.append(subprocess.Popen(command, env=os.environ | variables, stdout=subprocess.DEVNULL))
    slow = [each for rank, each in zip(ranks, started, strict=True) if rank]
    with slowed(slow):
        for each in started:
            assert each.wait(LIMIT_S) == 0, f"see {run_dir}"
    ends = {
        event["step"]: event["time"]
        for event in read_events(run_dir / "metrics.jsonl")
        if event["event"] == "step"
    }
    batch_size = int(next(word for word in words if word.startswith("data.batch_size=")).partition("=")[2])
    return (ends[FIRST_STEP + steps] - ends[FIRST_STEP]) / (steps * batch_size)


@contextlib.contextmanager
def slowed(processes: Sequence[subprocess.Popen[bytes]]) -> Iterator[None]:
    """Let these run for a third of the time, until the context ends."""
    over = threading.Event()

    def pause() -> None:
        while not over.wait(RUNNING_S):
            for number, seconds in ((signal.SIGSTOP, STOPPED_S), (signal.SIGCONT, 0.0)):
                for each in processes:
                    each.send_signal(number)  # nothing where it has ended
                time.sleep(seconds)

    thread = threading.Thread(target=pause)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def measure(model: str, ranks: int, repeats: int, steps: int, folder: Path) -> dict[str, list[float]]:
    """Seconds per sample by side."""
    words, together = MODELS[model], range(ranks)
    sides = {
        "auto": ([*words, "data.share=auto"], together),
        "equal": (words, together),
        "alone, fast": (words, [0]),
        "alone, slow": (words, [1]),
    }
    found: dict[str, list[float]] = {side: [] for side in sides}
    for _ in range(repeats):
        for side, (given, of) in sides.items():
            found[side].append(seconds_per_sample(folder, given, of, steps))
    return found


def figures_of(model: str, ranks: int, times: dict[str, list[float]]) -> Iterator[Figure]:
    # Two slow ranks share a core, each for a third of the time.
    alone = [
        1 / (1 / fast + (ranks - 1) / slow)
        for fast, slow in zip(times["alone, fast"], times["alone, slow"], strict=True)
    ]
    for side, promised in (("auto", PROMISED), ("equal", None)):
        own = times[side]
        low, high = median_interval([one / two for one, two in zip(own, alone, strict=True)])
        mine, sum_alone = 1e3 * statistics.median(own), 1e3 * statistics.median(alone)
        what = f"time per sample, {model}, {ranks} ranks, one fast, data.share={side}"
        baseline = "at the sum of their speeds alone"
        yield Figure(what, mine, "ms", baseline, sum_alone, mine / sum_alone, low, high, promised)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--ranks", nargs="+", type=int, default=[2])
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
                times = measure(model, ranks, repeats, steps, Path(folder))
                rows.append({"model": model, "ranks": ranks, "seconds_per_sample": times})
                figures += figures_of(model, ranks, times)
                print(text_table(figures), flush=True)
    write(arguments.json, "ranks of unlike speed", repeats, rows, figures)


if __name__ == "__main__":
    main()
