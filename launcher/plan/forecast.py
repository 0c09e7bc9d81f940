"""What one job would be: its steps, memory, wire, times, checkpoint and files, as plain values for JSON.

Of a sweep also the order, steps and device hours of its jobs.

Owns what is computed from what, and the facts about GPUs. It reads the data as a run does, and starts
nothing.
"""

from __future__ import annotations

import heapq
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from launcher.config.resolve import GRID
from launcher.config.schema import Config, to_dict
from launcher.config.trees import typed_leaves
from launcher.distributed.links import StepSeconds, ring_bytes, wire_seconds
from launcher.distributed.process_group import divide_threads, own_thread_count
from launcher.doctor.links import exchanged
from launcher.doctor.machine import place_of
from launcher.engine import UnusableError
from launcher.errors import ConfigError, LauncherError, PreflightError, first_line
from launcher.plan.memory import LOG, PASSES, PlannedRank, PlannedTask, StepMemory, rank_on
from launcher.plan.meta import META
from launcher.run_dir.records import user_shape
from launcher.run_dir.result import Forecast
from launcher.training.failures.recipe_errors import guarding
from launcher.training.setup import build

GIB = 2**30
# GiB that torch reports as a device's total, which is less than on the label.
GPUS = {
    "T4 16 GB": 14.6,
    "V100 16 GB": 15.8,
    "V100 32 GB": 31.7,
    "RTX 3090 24 GB": 23.7,
    "A100 40 GB": 39.4,
    "A100 80 GB": 79.2,
}
# Not measured here, but usual: a CUDA context with its kernels, cuBLAS, cuDNN and NCCL, and what the caching
# allocator cannot use of the rest.
CONTEXT_GIB, USABLE = 1.0, 0.95
ROOM = {name: USABLE * (gib - CONTEXT_GIB) * GIB for name, gib in GPUS.items()}  # bytes for tensors
BACKWARD_SHARE = 2 / 3  # of a pass: each product has two in the backward pass
FILES = (  # of a run, in its directory
    *("config.yaml", "overrides.txt", "env.json", "status.json", "metrics.jsonl", "result.json"),
    *("report.html", "logs/rank<k>.log", "checkpoints/step-<n>/"),
)
Links = Iterable[tuple[float, int]]  # rates in Mbit/s, with numbers of ranks
TIMED = 3  # steps, after one that is not
PAIR_S = 1.0  # of steps of two ranks, each without and with sending
RATES_KEPT = 60  # points of the schedule


def forecast(
    config: Config,
    world_size: int,
    machines: int,
    on_gpu: bool,
    links: Links,
    samples_per_s: float | None,
    measures: bool,
) -> dict[str, Any]:
    """All that is known of a job before it starts; a None where it is not.

    `samples_per_s` is the rate of one rank. All `machines` have as many ranks.
    """
    task, ranks_here = PlannedTask.of(config, world_size), -(-world_size // machines)
    seconds, cpu_s_per_byte = None, 0.0  # of all cores of a rank; 0 on a GPU, and where it was not measured
    if samples_per_s is not None:
        step_s = task.plan.largest_share / samples_per_s
        parts = StepSeconds(step_s * (1 - BACKWARD_SHARE), step_s * BACKWARD_SHARE, 0.0)
        seconds = _last_backward(parts, task.plan.micro_batches)
    elif measures and on_gpu:
        seconds = _alone(task, torch.device("cuda"), ranks_here)
    elif measures:
        seconds, cpu_s_per_byte = _on_this_cpu(task, ranks_here)
    found, reason = None, ""
    try:
        with rank_on(META, task) as rank:
            found = _counted(task, rank, on_gpu)
    except LauncherError:
        raise
    except UnusableError as error:  # a run would say the same
        raise ConfigError(str(error)) from error
    except (Exception, SystemExit) as error:  # it is the model's, and the real pass raises it again
        name, line = type(error).__name__, first_line(error)
        reason = name if line == name else f"{name}: {line}"
    if found is None:
        with guarding("the recipe's model or loss", LOG), rank_on(torch.device("cpu"), task) as rank:
            found = _counted(task, rank, on_gpu=False)
    message, place = found["memory"]["bytes"]["gradients"], place_of(config)
    buckets, saved = found.pop("buckets"), found.pop("checkpoint_bytes")
    if world_size == 1:
        buckets = None if seconds is None else _buckets_of_a_pair(task)
    sent = ring_bytes(message, world_size)
    knows_link = world_size == 1 or (machines == 1 and not on_gpu)
    wire = {"bytes": message, "buckets": buckets, "overlaps": config.wire.overlap}
    wire |= {"cpu_s_per_byte": cpu_s_per_byte, "sent_by_each_rank": round(sent)}
    return {
        "recipe": config.recipe.name,
        "world_size": world_size,
        "machines": machines,
        "device": "GPU" if on_gpu else "CPU",
        "measured_because": reason,
        **_course(task),
        "checkpoint": {
            "bytes": saved,
            "at_most": saved * (config.checkpoint.keep + 2),  # one is written beside those kept and the best
            "free_bytes": shutil.disk_usage(place).free,
            "place": str(place),
        },
        **found,
        "wire": wire,
        "step_s": None if seconds is None else vars(seconds) | {"total": seconds.total},
        "here_s": seconds.total + sent * cpu_s_per_byte if seconds and knows_link else None,
        "files": [config.run.dir or f"outputs/{config.recipe.name}/<time>-<4 hex>", *FILES],
        "links": [_link(wire, mbit, ranks, seconds) for mbit, ranks in links],
    }


def _course(task: PlannedTask) -> dict[str, object]:
    config, plan, course = task.config, task.plan, task.course
    rates = build.rates_of(config, task.recipe, course.total_steps)
    last = course.total_steps - 1
    evenly = {round(each * last / (RATES_KEPT - 1)) for each in range(RATES_KEPT)}
    highest = max(range(min(len(rates), course.total_steps)), key=rates.__getitem__)
    kept = sorted(evenly | {highest})
    return {
        "samples": plan.num_samples,
        "batch_size": plan.batch_size,
        "micro_batch": plan.largest_micro_batch,
        "micro_batches": plan.micro_batches,
        "steps_per_epoch": plan.steps_per_epoch,
        "steps": course.total_steps,
        "evaluations": sum(map(course.evaluates_after, range(1, course.total_steps + 1))),
        "schedule": {
            "name": build.named_schedule(config) if task.recipe.schedule else config.schedule.name,
            "rates": [[step, rates[min(step, len(rates) - 1)]] for step in kept],
        },
    }


def _counted(task: PlannedTask, rank: PlannedRank, on_gpu: bool) -> dict[str, Any]:
    """Parameters, memory by kind, and the micro-batch that fits each GPU."""
    share, size = task.plan.largest_share, task.plan.largest_micro_batch
    here, _, _ = rank.step(size, on_gpu)
    # A CPU updates in pieces of its cache, which take nothing.
    peak = max(here.passes, here.update if on_gpu else 0)
    kinds = rank.held | {"activations": here.activations, "temporary": max(0, peak - here.activations)}
    sizes = sorted({size, max(1, -(-size // 2))})
    by_size = [here if on_gpu and each == size else rank.step(each, True)[0] for each in sizes]
    held, sums = sum(rank.held.values()), 4 * rank.stepper.num_trainable
    if task.plan.micro_batches > 1:
        held -= sums  # of a rank with micro-batches; added where they are needed
    return {
        "parameters": rank.num_parameters,
        "buckets": rank.stepper.num_buckets,
        "state_bytes": rank.stepper.state_bytes(),
        "conditions": rank.tracker.conditions,
        "checkpoint_bytes": rank.checkpoint_bytes(task.plan.world_size if task.config.wire.shard else 1),
        "memory": {"bytes": kinds, "total": sum(kinds.values())},
        "gpus": [
            {"name": name, "micro_batch": fitting(room, held, sums, by_size, share)}
            for name, room in ROOM.items()
        ],
    }


def fitting(room: float, held: int, sums: int, counted: Sequence[StepMemory], share: int) -> int:
    """The largest micro-batch that fits into `room` bytes beside `held`: on a line through those `counted`.

    One that is smaller than the `share` of a rank needs `sums` bytes more, to add the gradients. 0 if not
    even one sample fits.
    """
    first, last = counted[0], counted[-1]
    per_sample = max(last.activations / last.size, 1.0)
    if last.size > first.size:
        per_sample = max(per_sample, (last.passes - first.passes) / (last.size - first.size))
    base = held + max(0.0, last.passes - per_sample * last.size)
    if held + last.update > room:
        return 0
    whole = int((room - base) / per_sample)
    return whole if whole >= share else max(0, min(share - 1, int((room - base - sums) / per_sample)))


def _last_backward(step: StepSeconds, passes: int) -> StepSeconds:
    """The wire is busy beside the last backward pass only, so the others count with the forward passes."""
    last = step.backward / passes
    return StepSeconds(step.forward + (passes - 1) * last, last, step.update)


def _alone(task: PlannedTask, device: torch.device, ranks_here: int) -> StepSeconds:
    """The fastest of a few steps of one rank on this machine, without any other rank."""
    divide_threads(ranks_here)  # as each rank has them in a run
    alone = replace(task.plan, micro_batch=task.plan.largest_micro_batch)
    with rank_on(device, replace(task, plan=alone), counting=False) as rank:
        steps = [rank.step(alone.largest_micro_batch, device.type == "cuda")[1] for _ in range(1 + TIMED)][1:]
    return _of_all_passes(min(steps, key=lambda step: step.total), alone.micro_batches)


def _of_all_passes(step: StepSeconds, micro_batches: int) -> StepSeconds:
    """A step of `micro_batches` from one in which at most PASSES of them were computed."""
    each = micro_batches / min(PASSES, micro_batches)
    return _last_backward(StepSeconds(step.forward * each, step.backward * each, step.update), micro_batches)


def _on_this_cpu(task: PlannedTask, ranks_here: int) -> tuple[StepSeconds, float]:
    """The parts of a step, and the seconds of all cores of a rank per byte that it sends.

    Of several ranks on this machine the parts are those of two that compute at the same time, as in a run.
    """
    world_size, cores = task.plan.world_size, len(os.sched_getaffinity(0))
    threads = int(own_thread_count() or max(1, cores // max(2, ranks_here)))
    with tempfile.TemporaryDirectory(prefix="plan-") as folder:
        file = Path(folder, "config.json")
        file.write_text(json.dumps(to_dict(task.config)))
        program = (sys.executable, "-m", "launcher.plan.pair", str(file), str(world_size))
        said = exchanged(["cpu", "cpu"], PAIR_S, {"OMP_NUM_THREADS": str(threads)}, program)
    if isinstance(said, str):
        advice = "python -m launcher doctor looks for the cause; --samples-per-s N plans without measuring."
        problem = "two ranks of this machine could not exchange gradients"
        raise PreflightError(f"--measure: {problem}: {said}. {advice}")
    cost = said.pop("cpu_s_per_byte")
    if ranks_here == 1:  # with all cores, where each of the two had half
        parts = _alone(task, torch.device("cpu"), 1)
        return parts, cost * threads / torch.get_num_threads()
    return _of_all_passes(StepSeconds(**said), task.plan.micro_batches), cost


def _buckets_of_a_pair(task: PlannedTask) -> int:
    """One rank sends nothing, so that its own buckets say nothing of the links between several.

    1 where the model cannot be built on `meta`: then nothing is foretold to be hidden.
    """
    plan = replace(task.plan, world_size=2, batch_size=max(2, task.plan.batch_size))
    try:
        with rank_on(META, replace(task, plan=plan)) as rank:
            return rank.stepper.num_buckets
    except Exception:  # of any kind: it is the model's, which `measured_because` names
        return 1


def kept(config: Config, found: Mapping[str, Any]) -> Forecast:
    """What a run of this config can be compared with, of what `forecast` returned."""
    return Forecast(
        steps=found["steps"],
        parameters=found["parameters"],
        step_ms=None if found["here_s"] is None else 1000 * found["here_s"],
        wire_bytes_per_step=found["wire"]["sent_by_each_rank"],
        state_bytes=found["state_bytes"],
        memory_bytes=found["memory"]["total"],
        checkpoint_bytes=found["checkpoint"]["bytes"],
        world_size=found["world_size"],
        config=typed_leaves(user_shape(config)),
    )


def _link(wire: Mapping[str, Any], mbit: float, ranks: int, seconds: StepSeconds | None) -> dict[str, object]:
    sent = ring_bytes(wire["bytes"], ranks)
    wire_s = wire_seconds(sent, mbit)
    # Without overlap all of it is sent after the backward pass, as one bucket would be.
    sending_s = wire_s, wire["buckets"] if wire["overlaps"] else 1, sent * wire["cpu_s_per_byte"]
    return {
        "mbit": mbit,
        "ranks": ranks,
        "wire_s": wire_s,
        "step_s": seconds and seconds.over(*sending_s),
        "efficiency": seconds and seconds.efficiency(*sending_s),
    }


def jobs_of_sweep(
    planned: Sequence[tuple[Config, Sequence[str], int]], at_a_time: int, samples_per_s: float | None
) -> dict[str, Any]:
    """All jobs of a grid, or the first of a search as an example of its trials.

    `planned`: the config, overrides and number of devices of each. `samples_per_s` is the rate of one device;
    None: hours are not known. Hours are those of the grid's own order: the next job starts as soon as one of
    `at_a_time` places is free.
    """
    settings = planned[0][0].sweep
    searches, trials = settings.name != GRID, settings.stop.trials
    steps: dict[str, tuple[int, int]] = {}  # data are read once for the jobs that share them
    jobs: list[dict[str, Any]] = []
    for number, (config, lines, num) in enumerate(planned):
        key = repr((config.recipe, config.recipes, config.data, config.train, config.model, num))
        if key not in steps:
            task = PlannedTask.of(config, num)
            steps[key] = task.course.total_steps, task.course.total_steps * task.plan.batch_size
        total, samples = steps[key]
        hours = None if samples_per_s is None else samples / samples_per_s / 3600
        job = {"number": number, "devices": num, "steps": total, "device_hours": hours, "overrides": [*lines]}
        jobs.append(job)
    times = (trials or 0) if searches else 1  # 0: a search has no end
    run = [] if samples_per_s is None else jobs * times
    return {
        "search": settings.name if searches else None,
        "trials": trials if searches else None,
        "at_a_time": at_a_time,
        "jobs": jobs,
        "device_hours": sum(job["device_hours"] for job in run) if run else None,
        "hours": makespan([job["device_hours"] / job["devices"] for job in run], at_a_time) if run else None,
    }


def makespan(hours: Sequence[float], places: int) -> float:
    """The time until the last job has ended, where each starts in order once one of the places is free."""
    ends = [0.0] * places
    for each in hours:
        heapq.heapreplace(ends, ends[0] + each)
    return max(ends)
