"""`plan`: what a command would run, without running it.

Owns the flags of the command and who it asks: the config, the number of devices, and the forecast itself.
"""

from __future__ import annotations

import json
import math
import os
import sys
import warnings
from itertools import product

from launcher.commands.arguments import Arguments
from launcher.errors import ConfigError, escaped
from launcher.launch.config_broadcast import ConfigLeader
from launcher.launch.node_env import planned_launch
from launcher.launch.worker_count import count_gpus, num_ranks, refuse_small_batch

LINKS, RANKS = "100,1000,10000", "2,8,64"  # without --link and --ranks


def plan(arguments: Arguments, leader: ConfigLeader) -> None:
    """plan recipe=resnet18 [--json]: says what would run, and what it would need

    Says what a command would run, and starts nothing: batches, steps and schedule; memory of a rank by
    kind, and the micro-batch that fits on GPUs; bytes that a step sends, and step times over links; size of
    checkpoints. Reads the data as the run would.

      --json               one line of JSON instead of the page
      --link MBIT,...      rates of links in Mbit/s; default 100,1000,10000
      --ranks N,...        numbers of ranks for the table of links; default 2,8,64
      --samples-per-s N    rate of one rank (samples_per_s of result.json / ranks); gives step times and hours

    Example: {program} plan recipe=resnet50 data.path=photos --link 25000 --samples-per-s 800
    """
    from launcher.commands.train import HYDRA_QUERY_FLAGS, request_of
    from launcher.config.resolve import compose_jobs, with_experiment

    if flags := [flag for flag in HYDRA_QUERY_FLAGS if flag in arguments.flags]:
        raise ConfigError(f"plan {flags[0]}: is asked about a config, and plan about a run: leave plan out.")
    listed = "above 0, separated by commas, such as"
    mbits = arguments.numbers("--link", LINKS, are_positive, f"numbers {listed} {LINKS}")
    ranks = arguments.numbers("--ranks", RANKS, are_whole, f"whole numbers {listed} {RANKS}")
    rates = arguments.numbers("--samples-per-s", "", are_positive, "a number above 0, such as 800")
    if len(rates) > 1:
        raise ConfigError(f"--samples-per-s {arguments.flags['--samples-per-s']}: give one rate.")
    request = with_experiment(request_of(arguments))
    if request.multirun:
        raise ConfigError("plan -m: plan is about one run. Leave -m out, and give each key one value.")
    (config,) = compose_jobs(request)
    launch = planned_launch(config.launch, leader.launch, os.environ)
    refuse_small_batch(config, launch)
    world_size, links = num_ranks(config.launch, launch), product(mbits, map(int, ranks))
    from launcher.plan.forecast import forecast
    from launcher.plan.page import lines_of

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a run gives them, once it is one
        rate = next(iter(rates), None)
        found = forecast(config, world_size, launch.num_machines, count_gpus() > 0, links, rate)
    if "--json" in arguments.flags:
        print(json.dumps(found))
        return
    lines = [*lines_of(found)]
    print("\n".join(map(escaped, lines) if sys.stdout.isatty() else lines))


def are_positive(numbers: list[float]) -> bool:
    return all(0 < each < math.inf for each in numbers)


def are_whole(numbers: list[float]) -> bool:
    return are_positive(numbers) and all(map(float.is_integer, numbers))
