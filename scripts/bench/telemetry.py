"""What all sinks together add to a step of about 5 ms, logging every step, over the same steps with none.

    python scripts/bench/telemetry.py [--quick] [--json FILE] [--repeats 60]

One process, one thread of torch: a small network, forward and backward. With sinks: metrics.jsonl,
status.json, the console into a file, wandb offline and TensorBoard. Blocks of both kinds alternate. Rows:

- wall time of a step, which needs a machine without other work;
- processor time of the training thread within the calls of the telemetry, between real steps, where caches
  are cold; with a goal of 1 % of 5 ms;
- processor time of all other threads of Python: what the training thread would wait at most.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from launcher.config.composition import Request
from launcher.config.resolve import compose_jobs
from launcher.config.schema import RunConfig
from launcher.run_dir.claim import open_run_dir
from launcher.telemetry import Telemetry, open_telemetry
from launcher.telemetry.events import StartEvent, StepEvent
from scripts.bench.interleaved import Goal, Times, goal_table, interleave, row_of, write

GOAL, STEP_MS = 1.01, 5.0
WORDS = ("recipe=resnet18", "tracker.name=[wandb,tensorboard]", "tracker.mode=offline")
NUMBERS: dict[str, Any] = {
    **{"epoch": 0, "loss": 0.7, "lr": 0.1, "grad_norm": 1.5, "scale": 65536.0, "skipped": 0, "samples": 128},
    **{"samples_per_s": 25_000.0, "step_ms": 5.0, "data_ms": 0.1, "compute_ms": 3.0, "wire_ms": 1.0},
    **{"update_ms": 0.8, "other_ms": 0.1, "memory_bytes": 123_456_789},
}
SETTLED_S = 3.0  # until the trackers have started and used their allowance


def training_step() -> Callable[[], None]:
    """Forward and backward of 24 layers: about 5 ms on one core."""
    network = nn.Sequential(*(layer for _ in range(24) for layer in (nn.Linear(256, 256), nn.ReLU())))
    inputs = torch.randn(16, 256)

    def step() -> None:
        network(inputs).square().mean().backward()

    return step


@contextlib.contextmanager
def all_sinks(folder: Path) -> Iterator[Telemetry]:
    """The telemetry of a run with all sinks, started."""
    (config,) = compose_jobs(Request(WORDS))
    with open_run_dir(replace(config, run=RunConfig(str(folder / "run"))), []) as claim:
        shown = sys.stdout
        with open(folder / "console", "w") as sys.stdout:
            telemetry = open_telemetry(claim.config, os.environ)
            sys.stdout = shown
            telemetry.emit(StartEvent(0, total_steps=10**6))
            yield telemetry
            telemetry.close()


@dataclass(frozen=True)
class Found:
    """Seconds of a step by side; for each block those in the calls, and those of all other threads."""

    wall: Times
    calls: list[float]
    others: list[float]


def measure(repeats: int, steps: int) -> Found:
    torch.set_num_threads(1)
    step, number = training_step(), iter(range(1, 10**9))
    calls: list[float] = []
    others: list[float] = []

    def block(telemetry: Telemetry) -> None:
        in_calls, other = 0.0, time.process_time() - time.thread_time()
        for _ in range(steps):
            step()
            at, began = next(number), time.thread_time()
            telemetry.advance(0, at)
            telemetry.emit(StepEvent(at, **NUMBERS))
            in_calls += time.thread_time() - began
        calls.append(in_calls / steps)
        others.append((time.process_time() - time.thread_time() - other) / steps)

    def plain() -> None:
        for _ in range(steps):
            step()

    with tempfile.TemporaryDirectory() as folder, all_sinks(Path(folder)) as telemetry:
        began = time.monotonic()
        while time.monotonic() - began < SETTLED_S:
            block(telemetry)
        calls.clear()
        others.clear()
        wall = interleave({"all sinks": lambda: block(telemetry), "none": plain}, repeats)
    return Found({side: [s / steps for s in times] for side, times in wall.items()}, calls, others)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--repeats", type=int, default=60)
    arguments = parser.parse_args(argv)
    repeats, steps = (2, 5) if arguments.quick else (arguments.repeats, 20)
    found = measure(repeats, steps)
    rows = {f"wall, {side}": row_of(seconds) for side, seconds in found.wall.items()}
    rows |= {"calls of the telemetry": row_of(found.calls), "other threads": row_of(found.others)}
    for name, row in rows.items():
        print(f"{name:24} min {1e3 * row['min_ms']:6.0f} us, median {1e3 * row['median_ms']:6.0f} us")
    step_s = [STEP_MS / 1e3] * len(found.calls)
    in_calls = {"with": [s + calls for s, calls in zip(step_s, found.calls, strict=True)], "without": step_s}
    goals = [
        Goal.of("telemetry", "wall time of a step", found.wall, "all sinks", "none", GOAL),
        Goal.of("telemetry", "5 ms and the calls", in_calls, "with", "without", GOAL),
    ]
    print(f"\n{goal_table(goals)}\nload average {os.getloadavg()[0]:.1f}")
    write(arguments.json, "what all sinks add to a step", repeats, rows, goals)


if __name__ == "__main__":
    main()
