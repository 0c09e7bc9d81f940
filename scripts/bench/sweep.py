"""What a sweep adds to its jobs: time to compose and prepare them, memory, idle devices, time around a job.

    python scripts/bench/sweep.py [--quick] [--json FILE] [--repeats 5]

Composing and preparing are CPU seconds for 200 jobs, in a fresh process each. Memory is what the process of a
sweep of 200 simulated jobs has grown by after torch was imported, in bytes that no other process shares.
Busy is the share of 8 declared devices' time in which a simulated job works. Around a job is the wall time of
a job of a sweep, and of the same job alone in a process with torch imported, less the time from its first to
its last event of training: the sides alternate.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from scripts.bench.machine import machine

RECIPE = """
import torch
from torch import nn
from launcher.recipe import Recipe, TensorData, cross_entropy, recipe

@recipe("tiny")
def tiny(config):
    data = TensorData({"image": torch.randn(64, 4), "label": torch.zeros(64, dtype=torch.int64)})
    return Recipe(lambda: nn.Linear(4, 2), data, data, cross_entropy, classes=("a", "b"))
"""
OVERRIDES = ("recipe=resnet18", "tracker=none", "launch.nproc=1")
TINY = ("recipe.uses=tiny", "recipes.path=recipe.py", "data.batch_size=16", "train.epochs=2")
DRAWN = ("optim.lr=tag(log,interval(1e-4,1))", "optim.momentum=interval(0.5,0.99)")
JOBS = 200


def prepare(directory: Path, jobs: int) -> dict[str, float]:
    """CPU seconds to compose and to prepare so many jobs of a grid."""
    from launcher.config.composition import Request
    from launcher.config.resolve import compose_jobs
    from launcher.sweep.prepare import prepared

    words = (f"optim.lr={','.join(str(number / 1000) for number in range(1, jobs + 1))}",)
    request = Request((*OVERRIDES, *words, f"hydra.sweep.dir={directory / 'grid'}"), multirun=True)
    began = time.process_time()
    configs = compose_jobs(request)
    composed = time.process_time()
    with prepared(request, configs):
        return {"compose_s": composed - began, "prepare_s": time.process_time() - composed}


def simulate(directory: Path, jobs: int, kind: str, shortest_s: float) -> dict[str, float]:
    """How busy eight devices are with jobs of one to four times this length, and the parent's memory."""
    from launcher.config.composition import Request
    from launcher.config.resolve import compose_jobs
    from launcher.process.signals import StopSignal
    from launcher.run_dir.atomic import write_json
    from launcher.supervisor.supervise import preload
    from launcher.sweep.carriers.devices import DevicePool, Devices
    from launcher.sweep.prepare import prepared
    from launcher.sweep.progress import SweepProgress
    from launcher.sweep.scheduler import Scheduler
    from launcher.sweep.search import Searching

    preload()
    memory, files = unshared_bytes(), len(os.listdir("/proc/self/fd"))

    def work(folder: Path) -> int:
        began, number = time.monotonic(), int(folder.name.partition("_")[0])
        time.sleep(shortest_s * random.Random(number).choice([1, 2, 3, 4]))
        result = {"state": "done", "exit": 0, "metric": float(number % 17), "metric_name": "loss"}
        write_json(folder / "result.json", {**result, "higher_is_better": False})
        (folder / "worked").write_text(str(time.monotonic() - began))
        return 0

    settings = (f"sweep={kind}", f"sweep.stop.max_trials={jobs}", f"hydra.sweep.dir={directory / kind}")
    request = Request((*OVERRIDES, *DRAWN, *settings), multirun=True)
    configs = compose_jobs(request)
    pool = DevicePool([f"GPU-{number}" for number in range(8)], sorted(os.sched_getaffinity(0)))
    with prepared(request, configs) as (folder, record, _), Devices(pool, work, alone=False) as carrier:
        searching = Searching(request, folder, record, configs[0], lambda config: 1, carrier.has_room)
        progress = SweepProgress(folder, record.jobs, False, jobs)
        began = time.monotonic()
        settings = configs[0].sweep
        scheduler = Scheduler(folder, record, carrier, settings, progress, StopSignal(), search=searching)
        scheduler.run()
        took = time.monotonic() - began
    worked = [float((folder / job.name / "worked").read_text()) for job in record.jobs]
    return {
        "busy": sum(worked) / (8 * took),
        "memory_mb": (unshared_bytes() - memory) / 1e6,
        "files": len(os.listdir("/proc/self/fd")) - files,
        "jobs": len(worked),
    }


def unshared_bytes() -> int:
    """Memory of this process that no other one has."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return 1024 * sum(int(line.split()[1]) for line in lines if line.startswith("Private_"))


def around_jobs(directory: Path, workers: int, jobs: int, sweep: bool) -> dict[str, float]:
    """Seconds of a job outside of its training: of a sweep, by its record, or one after another, warm."""
    from launcher.commands.sweep import FOR_JOBS, run_in_child
    from launcher.config.composition import Request
    from launcher.config.resolve import compose_jobs
    from launcher.supervisor.supervise import preload
    from launcher.sweep.prepare import prepared

    os.chdir(directory)
    (directory / "recipe.py").write_text(RECIPE)
    place = directory / f"{'sweep' if sweep else 'alone'}-{workers}-{time.monotonic_ns()}"
    words = (*OVERRIDES[:2], *TINY, f"launch.nproc={workers}", f"seed={','.join(map(str, range(jobs)))}")
    words = (*words, f"hydra.sweep.dir={place}")
    if sweep:
        subprocess.run([sys.executable, "-m", "launcher", "-m", *words], check=True, stdout=sys.stderr)
        took = json.loads((place / "sweep.json").read_text())["seconds"]
    else:
        request = Request(words, multirun=True)
        with prepared(request, compose_jobs(request)) as (folder, record, _):
            preload(FOR_JOBS)
            began = time.monotonic()
            for job in record.jobs:
                if (child := os.fork()) == 0:
                    os.dup2(2, 1)
                    os._exit(run_in_child(folder / job.name))
                os.waitpid(child, 0)
            took = time.monotonic() - began
    trained = [training_seconds(folder) for folder in place.glob("[0-9]*")]
    assert len(trained) == jobs, "a job has failed"
    return {"around_job_s": (took - sum(trained)) / jobs}


def training_seconds(folder: Path) -> float:
    """From the first to the last event of training and evaluation."""
    events = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    times = [each["time"] for each in events if each["event"] in ("step", "eval", "checkpoint")]
    return float(max(times) - min(times))


CASES = {"prepare": prepare, "simulate": simulate, "around": around_jobs}


def measured(case: str, *words: object) -> dict[str, float]:
    """What a case returns in a fresh process."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "--case", json.dumps([case, folder, *words])]
        found = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment())
    values: dict[str, float] = json.loads(found.stdout.splitlines()[-1])
    return values


def environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}


def main(argv: Sequence[str] | None = None) -> None:
    arguments = parse(argv)
    if arguments.case:
        case, folder, *words = json.loads(arguments.case)
        print(json.dumps(CASES[case](Path(folder), *words)))
        return
    jobs, repeats = (20, 1) if arguments.quick else (JOBS, arguments.repeats)
    several = 2 if arguments.quick else 6
    cases: dict[str, list[dict[str, float]]] = {}
    for _ in range(repeats):
        cases.setdefault("grid", []).append(measured("prepare", jobs))
        for workers in (1, 2):
            for side in ("alone", "sweep"):
                name = f"{side}, workers: {workers}"
                cases.setdefault(name, []).append(measured("around", workers, several, side == "sweep"))
    for kind in ("random", "tpe"):
        cases[kind] = [measured("simulate", jobs, kind, 0.1 if arguments.quick else 1.0)]
    for name, rows in cases.items():
        for key in rows[0]:
            values = [row[key] for row in rows]
            print(
                f"{name:22} {key:14} {statistics.median(values):9.3f}  {min(values):.3f}..{max(values):.3f}"
            )
    if arguments.json:
        report: dict[str, Any] = {"what": "what a sweep adds", "machine": machine(), "jobs": jobs}
        report |= {"n": repeats, "cases": cases}
        arguments.json.write_text(json.dumps(report, indent=2) + "\n")


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="few jobs, once, to test this file")
    parser.add_argument("--json", type=Path, help="where to write the numbers")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
