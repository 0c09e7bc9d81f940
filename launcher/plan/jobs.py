"""The jobs of a sweep before it starts: their order, steps and device hours."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import Any

from launcher.config.resolve import GRID
from launcher.config.schema import Config
from launcher.plan.forecast import Task

HOUR_S = 3600.0


def jobs_of_sweep(
    configs: Sequence[Config],
    overrides: Sequence[tuple[str, ...]],
    devices: Sequence[int],
    at_a_time: int,
    samples_per_s: float | None,
) -> dict[str, Any]:
    """All jobs of a grid, or the first of a search as an example of its trials.

    `samples_per_s` is the rate of one device; None: hours are not known. Hours are those of the grid's own
    order: the next job starts as soon as one of `at_a_time` places is free.
    """
    settings = configs[0].sweep
    searches, trials = settings.name != GRID, settings.stop.trials
    steps: dict[str, tuple[int, int]] = {}  # data are read once for the jobs that share them
    jobs: list[dict[str, Any]] = []
    for number, (config, lines, num) in enumerate(zip(configs, overrides, devices, strict=False)):
        key = repr((config.recipe, config.recipes, config.data, config.train, config.model, num))
        if key not in steps:
            task = Task.of(config, num)
            steps[key] = task.course.total_steps, task.course.total_steps * task.plan.batch_size
        total, samples = steps[key]
        hours = None if samples_per_s is None else samples / samples_per_s / HOUR_S
        job = {"number": number, "devices": num, "steps": total, "device_hours": hours, "overrides": [*lines]}
        jobs.append(job)
        if searches:
            break
    times = len(jobs) if not searches else trials
    known = times is not None and samples_per_s is not None
    each = [job["device_hours"] for job in jobs] * (times if searches and times else 1) if known else []
    wall = [
        hours / num for hours, num in zip(each, [job["devices"] for job in jobs] * len(each), strict=False)
    ]
    return {
        "search": settings.name if searches else None,
        "trials": trials if searches else None,
        "at_a_time": at_a_time,
        "jobs": jobs,
        "device_hours": sum(each) if known else None,
        "hours": makespan(wall, at_a_time) if known else None,
    }


def makespan(hours: Sequence[float], places: int) -> float:
    """Until the last job has ended, where each starts in order as soon as one of the places is free."""
    ends = [0.0] * places
    for each in hours:
        heapq.heapreplace(ends, ends[0] + each)
    return max(ends)
