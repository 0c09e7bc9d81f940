"""`plan`: what a command would run, without running it.

Owns the flags of the command and who it asks: the config, the number of devices, and the forecast itself.
"""

from __future__ import annotations

import json
import math
import os
import sys
import warnings
from collections.abc import Mapping
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launcher.commands.arguments import Arguments
from launcher.commands.watch import has_unicode
from launcher.distributed.handoff import Leader
from launcher.distributed.machines import planned_launch
from launcher.errors import ConfigError, escaped
from launcher.run_dir.claim import keep_forecast, refuse_foreign
from launcher.supervisor.worker_count import count_gpus, num_ranks, refuse_small_batch

if TYPE_CHECKING:
    from launcher.config.composition import Request
    from launcher.config.schema import Config

LINKS, RANKS = "100,1000,10000", "2,8,64"  # without --link and --ranks


def plan(arguments: Arguments, leader: Leader) -> None:
    """plan recipe=resnet18 [--json]: says what would run, and what it would need

    Says what a command would run, and starts nothing: batches, steps and schedule; memory of a rank by
    kind, and the micro-batch that fits on GPUs; bytes on the wire, and step times over links; size of
    checkpoints. Reads the data as the run would. With -m, also lists a sweep's jobs and device hours.
    With run.dir=DIR, writes DIR/plan.json: the report of the run shows it beside what was measured.

      --json               one line of JSON instead of the page
      --link MBIT,...      rates of links in Mbit/s; default 100,1000,10000
      --ranks N,...        numbers of ranks for the table of links; default 2,8,64
      --samples-per-s N    rate of one rank (samples_per_s of result.json / ranks); gives step times and hours
      --measure            measures that rate in a few steps of one rank on this machine;
                           on a CPU also the time that sending takes from its cores

    Example: {program} plan recipe=resnet50 data.path=photos --link 25000 --samples-per-s 800
    """
    from launcher.commands.sweep import devices_of_a_job, refuse_several_machines
    from launcher.commands.train import HYDRA_ANSWERS, request_of
    from launcher.config.overrides import SWEEP_DIRECTORY
    from launcher.config.resolve import compose_jobs, with_experiment

    if flags := [flag for flag in HYDRA_ANSWERS if flag in arguments.flags]:
        raise ConfigError(f"plan {flags[0]}: is asked about a config, and plan about a run: leave plan out.")
    measures = "--measure" in arguments.flags
    listed = "above 0, separated by commas, such as"
    mbits = arguments.numbers("--link", LINKS, are_positive, f"numbers {listed} {LINKS}")
    ranks = arguments.numbers("--ranks", RANKS, are_whole, f"whole numbers {listed} {RANKS}")
    rates = arguments.numbers("--samples-per-s", "", are_positive, "a number above 0, such as 800")
    if len(rates) + measures > 1:
        given = arguments.flags["--samples-per-s"]
        raise ConfigError(f"--samples-per-s {given}: give one rate, or --measure it here.")
    request = with_experiment(request_of(arguments))
    configs = compose_jobs(request)
    config, multirun = configs[0], request.multirun
    if multirun:
        refuse_several_machines(configs)
    launch = leader.launch if multirun else planned_launch(config.launch, leader.launch, os.environ)
    workers = [devices_of_a_job(each) if multirun else None for each in configs]
    for each, of_job in zip(configs, workers, strict=True):
        refuse_small_batch(each, launch, of_job)
    world_size = num_ranks(config.launch, launch, workers[0])
    from launcher.plan.forecast import forecast, kept
    from launcher.plan.page import lines_of, lines_of_sweep
    from launcher.sweep.prepare import root_of

    if config.run.dir and (place := Path(os.path.expanduser(config.run.dir))).is_dir():
        refuse_foreign(place)  # before steps are measured
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a run gives them, once it is one
        links = product(mbits, map(int, ranks))
        rate, machines = next(iter(rates), None), 1 if multirun else launch.num_machines
        found = forecast(config, world_size, machines, count_gpus() > 0, links, rate, measures)
        if multirun:
            found["sweep"] = sweep_of(request, configs, found)
            root = request.value_of(SWEEP_DIRECTORY) or f"{root_of(configs)}/<time>-<4 hex>"
            found["files"][0] = f"{root}/<job>"
    if config.run.dir and not multirun:
        keep_forecast(config, kept(config, found))
    if "--json" in arguments.flags:
        print(json.dumps(found))
        return
    lines = [*lines_of(found, has_unicode())]
    lines += lines_of_sweep(found["sweep"]) if multirun else []
    print("\n".join(map(escaped, lines) if sys.stdout.isatty() else lines))


def sweep_of(request: Request, configs: list[Config], found: Mapping[str, Any]) -> dict[str, object]:
    """The jobs of the sweep, as fast per device as the first."""
    from launcher.commands.sweep import devices_of_a_job, pool_of
    from launcher.config.resolve import space_of
    from launcher.plan.forecast import jobs_of_sweep

    settings, step = configs[0].sweep, found["step_s"]
    is_grid = settings.name == "grid"
    overrides = [*space_of(request.overrides).grid()] if is_grid else [()]
    devices = [devices_of_a_job(config) for config in configs]
    rate = None if step is None else -(-found["batch_size"] // found["world_size"]) / step["total"]
    planned = [*zip(configs, overrides, devices, strict=False)]  # of a search one, as an example
    return jobs_of_sweep(planned, pool_of(settings).at_a_time(min(devices)), rate)


def are_positive(numbers: list[float]) -> bool:
    return all(0 < each < math.inf for each in numbers)


def are_whole(numbers: list[float]) -> bool:
    return are_positive(numbers) and all(map(float.is_integer, numbers))
