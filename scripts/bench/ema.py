"""Cost of a moving average of the weights (ema.decay) beside the update that it follows.

    python scripts/bench/ema.py [--quick] [--json FILE] [--threads 2] [--models resnet50]

On the parameter shapes of ResNet-50: a Stepper's backward and step as in update.py, alone and followed by
WeightAverage.update() with a pass in every step, and with one in every tenth, which is the default. All
alternate in one process, ten steps at a time. Reports the minimum CPU time of a step.

A pass reads the averages and the masters and writes the averages, 12 bytes per parameter; the update moves
about 30.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from launcher.engine import WeightAverage
from scripts.bench.interleaved import interleave
from scripts.bench.machine import machine
from scripts.bench.shapes import MODELS, Shapes
from scripts.bench.update import RULES, Ours

DECAY, EVERY_STEPS = 0.999, 10
GOAL = 0.10  # of the update


class WithAverage(Ours):
    """As `Ours`, and an average of its weights after each step."""

    def __init__(self, *arguments: Any, every_steps: int) -> None:
        super().__init__(*arguments)
        self._average = WeightAverage(self._stepper, DECAY, every_steps)
        self._steps = 0

    def step(self) -> None:
        super().step()
        self._steps += 1
        self._average.update(self._steps)


def measured(shapes: Shapes, optimizer: str, repeats: int) -> dict[str, float]:
    """Processor time of an update in ms, and what the average adds to it."""
    rule = RULES[optimizer].ours
    contenders = {
        "alone": Ours(shapes, rule),
        "every step": WithAverage(shapes, rule, every_steps=1),
        "every 10 steps": WithAverage(shapes, rule, every_steps=EVERY_STEPS),
    }
    sides = {name: contender.step for name, contender in contenders.items()}
    times = interleave(sides, repeats, steps=EVERY_STEPS, warm_up=1, clock=time.process_time)
    alone, each, tenth = (min(times[name]) for name in sides)
    return {"update_ms": 1e3 * alone, "every_step": each / alone - 1, "every_10_steps": tenth / alone - 1}


def table(rows: Mapping[str, Mapping[str, float]]) -> str:
    head = "| case | update, CPU ms | a pass in every step | in every tenth |\n| --- | --- | --- | --- |\n"
    return head + "\n".join(
        f"| {name} | {row['update_ms']:.1f} | {row['every_step']:+.1%} | {row['every_10_steps']:+.1%} |"
        for name, row in rows.items()
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="a few repeats, to try the program")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["resnet50"])
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    rows = {}
    for model in arguments.models:
        shapes = dict(sorted(MODELS[model][0]().items(), key=lambda item: len(item[1]), reverse=True))
        for optimizer in RULES:
            name = f"{model}, {optimizer}, {arguments.threads} threads"
            rows[name] = measured(shapes, optimizer, 1 if arguments.quick else 6)
    print(table(rows))
    worst = max(row["every_10_steps"] for row in rows.values())
    print(f"\nGoal: at most {GOAL:.0%} with a pass in every tenth step. Measured: at most {worst:.1%}.")
    if arguments.json:
        arguments.json.write_text(json.dumps({"machine": machine(), "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
