"""What one job would be: its steps, memory, bytes sent and checkpoint, as plain values for JSON.

Owns what is computed from what, and the facts about GPUs. It reads the data as a run does, and starts
nothing.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from typing import Any

import torch

from launcher.config.schema import Config
from launcher.data.batch_plan import BatchPlan
from launcher.data.shares import compute_time, proportional_shares
from launcher.distributed.links import ring_bytes
from launcher.doctor.machine import existing_part_of_run_dir
from launcher.engine import UnusableError
from launcher.errors import ConfigError, LauncherError, first_line
from launcher.plan.memory import LOG, PlannedRank, PlannedTask, StepMemory, rank_on
from launcher.plan.meta import META
from launcher.trainer.builders import build
from launcher.trainer.errors.recipe_errors import guarding

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
SMALLEST_HALF = 3  # samples: micro-batches of at most 3 have at least 2 each


def estimate(
    config: Config, world_size: int, machines: int, on_gpu: bool, rates: Sequence[float] = ()
) -> dict[str, Any]:
    """All that is known of a job before it starts. All `machines` have as many ranks.

    `rates` are the ranks' samples per second, in any unit: what data.share=auto would make of them.
    """
    task = PlannedTask.of(config, world_size)
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
    message, buckets = found["memory"]["bytes"]["gradients"], found.pop("buckets")
    place, saved = existing_part_of_run_dir(config), found.pop("checkpoint_bytes")
    return {
        "recipe": config.recipe.name,
        "world_size": world_size,
        "machines": machines,
        "device": "GPU" if on_gpu else "CPU",
        "measured_because": reason,
        **_length(task),
        "shares": _shares(task.plan, rates),
        "checkpoint": {
            "bytes": saved,
            "at_most": saved * (config.checkpoint.keep + 2),  # one is written beside those kept and the best
            "free_bytes": shutil.disk_usage(place).free,
            "place": str(place),
        },
        **found,
        "wire": {
            "bytes": message,
            "buckets": buckets if world_size > 1 else None,
            "sent_by_each_rank": round(ring_bytes(message, world_size)),
        },
    }


def _shares(plan: BatchPlan, rates: Sequence[float]) -> dict[str, object] | None:
    """The samples of each rank in a batch, if they are not equal, and what that gains at known speeds."""
    if plan.num_samples < plan.batch_size:  # such a batch is divided equally
        return None
    if not rates:
        return {"samples": plan.shares, "times_as_fast": None} if plan.shares else None
    shares = plan.shares or proportional_shares(rates, plan.batch_size)
    equal = proportional_shares([1.0] * plan.world_size, plan.batch_size)
    times = [1 / rate for rate in rates]
    return {"samples": shares, "times_as_fast": compute_time(equal, times) / compute_time(shares, times)}


def _length(task: PlannedTask) -> dict[str, object]:
    config, plan, length = task.config, task.plan, task.length
    rates = build.lr_table(config, task.recipe, length.total_steps)
    return {
        "samples": plan.num_samples,
        "batch_size": plan.batch_size,
        "micro_batch": plan.largest_micro_batch,
        "micro_batches": plan.micro_batches,
        "steps_per_epoch": plan.steps_per_epoch,
        "steps": length.total_steps,
        "evaluations": sum(map(length.should_evaluate, range(1, length.total_steps + 1))),
        "schedule": {
            "name": build.named_schedule(config) if task.recipe.schedule else config.schedule.name,
            "first": rates[0],
            "highest": max(rates),
            "last": rates[-1],
        },
    }


def _counted(task: PlannedTask, rank: PlannedRank, on_gpu: bool) -> dict[str, Any]:
    """Parameters, memory by kind, and the micro-batch that fits each GPU."""
    share, size, most = task.plan.largest_share, task.plan.largest_micro_batch, task.plan.num_samples
    here = rank.step(size, on_gpu)
    # A CPU updates in pieces of its cache, which take nothing.
    peak = max(here.passes, here.update if on_gpu else 0)
    kinds = rank.held | {"activations": here.activations, "temporary": max(0, peak - here.activations)}
    by_size = [here if on_gpu and each == size else rank.step(each, True) for each in _sizes(task.plan)]
    held, sums = sum(rank.held.values()), 4 * rank.stepper.flat_numel
    if task.plan.micro_batches > 1:
        held -= sums  # of a rank with micro-batches; added where they are needed
    return {
        "parameters": rank.num_parameters,
        "buckets": rank.stepper.num_buckets,
        "state_bytes": rank.stepper.state_bytes(),
        "conditions": rank.tracker.conditions,
        "checkpoint_bytes": rank.checkpoint_bytes(
            task.plan.world_size if task.config.ddp.shard_optimizer else 1
        ),
        "memory": {"bytes": kinds, "total": sum(kinds.values())},
        "gpus": [
            {"name": name, "micro_batch": min(most, fitting(room, held, sums, by_size, share))}
            for name, room in ROOM.items()
        ],
    }


def _sizes(plan: BatchPlan) -> list[int]:
    """The micro-batch of the run and half of it: what memory grows by is between the two.

    A small one alone: of its half a micro-batch could be one sample, in which BatchNorm finds no deviation.
    """
    size, half = plan.largest_micro_batch, -(-plan.largest_micro_batch // 2)
    return [half, size] if half >= SMALLEST_HALF else [size]


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
