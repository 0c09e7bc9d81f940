"""Steps of two ranks of this machine: what a step costs them, first without sending, then with it.

Run as a program, one process a rank, by `doctor.links.exchanged`:

    python -m launcher.plan.pair CONFIG WORLD_SIZE RANK 2 FILE SECONDS cpu cpu

CONFIG is a JSON file of a config for WORLD_SIZE ranks; FILE is where the two meet. Rank 0 prints a line of
JSON.
Both parts are steps of the real Stepper on both ranks at the same time, so that they share memory and caches
as in a run. The time of sending is their difference: it has what the kernel does for a message, and what the
exchange takes from the caches, which the CPU time of an exchange alone has not.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
from dataclasses import asdict, replace
from pathlib import Path

import torch
import torch.distributed as dist

from launcher.config.schema import from_dict
from launcher.distributed.links import StepSeconds
from launcher.doctor.exchange import meet
from launcher.plan.memory import PASSES, PlannedTask, rank_on
from launcher.process.allocator import keep_freed_memory
from launcher.process.lifetime import die_with_launcher

CPU = torch.device("cpu")
UNCOUNTED, LEAST, MOST = 2, 5, 40  # steps of each part


def main(config_file: str, world_size: int, rank: int, store: str, seconds: float) -> None:
    keep_freed_memory()
    config = from_dict(json.loads(Path(config_file).read_text()))
    task = PlannedTask.of(config, world_size)
    size, passes = task.plan.largest_micro_batch, min(PASSES, task.plan.micro_batches)
    plan = replace(task.plan, rank=rank, world_size=2, batch_size=2 * passes * size, micro_batch=size)
    meet("gloo", store, rank, 2)
    found = []
    for group in (dist.new_group([0, 1], backend="fake"), dist.group.WORLD):
        with rank_on(CPU, replace(task, plan=plan), counting=False, group=group) as one:
            steps: list[StepSeconds] = []
            count = torch.tensor(LEAST)
            dist.barrier()
            while len(steps) < count:
                _, parts, sent = one.step(size, of_gpu=False)
                steps.append(parts)
                if len(steps) == UNCOUNTED:  # the first allocates; both ranks make equally many
                    count.fill_(min(MOST, max(LEAST, int(seconds / parts.total))))
                    dist.broadcast(count, 0)
            found.append(median(steps[UNCOUNTED:]))
    alone, together = found
    dist.destroy_process_group()
    if rank == 0:
        cost = max(0.0, together.total - alone.total) / sent
        print(json.dumps(asdict(alone) | {"cpu_s_per_byte": cost}), flush=True)


def median(steps: list[StepSeconds]) -> StepSeconds:
    """The median of each part."""
    parts = zip(*(asdict(step).values() for step in steps), strict=True)
    return StepSeconds(*map(statistics.median, parts))


if __name__ == "__main__":
    die_with_launcher(os.environ)
    config_file, world_size, rank, _, store, seconds = sys.argv[1:7]
    main(config_file, int(world_size), int(rank), store, float(seconds))
