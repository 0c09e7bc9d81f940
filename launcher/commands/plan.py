"""`plan`: what a command would run, without running it.

Owns the flags of the command and who it asks: the config, the number of devices, and the forecast itself.
"""

from __future__ import annotations

import json
import math
import sys
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launcher.commands.arguments import Arguments
from launcher.commands.sweep import devices_of_a_job
from launcher.commands.watch import has_unicode
from launcher.distributed.env import LaunchEnv
from launcher.errors import ConfigError, escaped
from launcher.run_dir.claim import keep_forecast, refuse_foreign
from launcher.supervisor.worker_count import count_gpus, num_workers, refuse_small_batch

if TYPE_CHECKING:
    from launcher.config.composition import Request
    from launcher.config.schema import Config

LINKS, RANKS = "100,1000,10000", "2,8,64"


def plan(arguments: Arguments, launch: LaunchEnv) -> None:
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
    from launcher.commands.train import HYDRA_ANSWERS, request_of
    from launcher.config.resolve import compose_jobs, with_experiment

    if asked_hydra := [flag for flag in HYDRA_ANSWERS if flag in arguments.flags]:
        raise ConfigError(
            f"plan {asked_hydra[0]}: is asked about a config, and plan about a run: leave plan out."
        )
    mbits = numbers_of(arguments, "--link", LINKS)
    ranks = [int(each) for each in numbers_of(arguments, "--ranks", RANKS, whole=True)]
    rates = numbers_of(arguments, "--samples-per-s", "")
    if len(rates) > 1 or (rates and "--measure" in arguments.flags):
        given = arguments.flags["--samples-per-s"]
        raise ConfigError(f"--samples-per-s {given}: give one rate, or --measure it here.")
    request = with_experiment(request_of(arguments))
    configs = compose_jobs(request)
    for config in configs:
        refuse_small_batch(config, launch)
    config, multirun = configs[0], request.multirun
    world_size = devices_of_a_job(config) if multirun else world_of(config, launch)
    from launcher.plan.forecast import forecast, kept
    from launcher.plan.page import lines_of, lines_of_sweep

    if config.run.dir and (place := Path(config.run.dir).expanduser()).is_dir():
        refuse_foreign(place)  # before steps are measured
    rate, measures = rates[0] if rates else None, "--measure" in arguments.flags
    links = [(mbit, each) for mbit in mbits for each in ranks]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a run gives them, once it is one
        found = forecast(config, world_size, count_gpus() > 0, links, rate, measures)
        if multirun:
            found["sweep"] = sweep_of(request, configs, found)
            found["files"][0] = f"{root_of(request, configs)}/<job>"
    if config.run.dir and not multirun:
        keep_forecast(config, kept(config, found))
    if "--json" in arguments.flags:
        print(json.dumps(found))
        return
    lines = [*lines_of(found, has_unicode())]
    lines += lines_of_sweep(found["sweep"]) if multirun else []
    print("\n".join(map(escaped, lines) if sys.stdout.isatty() else lines))


def world_of(config: Config, launch: LaunchEnv) -> int:
    """The ranks of a single run."""
    workers = num_workers(config.launch, launch)
    return launch.world_size if workers is None else workers


def root_of(request: Request, configs: list[Config]) -> str:
    """The directory of a sweep, of which the default is named when it starts."""
    given = [line for line in request.overrides if line.startswith("hydra.sweep.dir=")]
    recipes = {config.recipe.name for config in configs}
    default = f"multirun/{recipes.pop() if len(recipes) == 1 else 'several'}/<time>-<4 hex>"
    return given[-1].partition("=")[2] if given else default


def sweep_of(request: Request, configs: list[Config], found: Mapping[str, Any]) -> dict[str, Any]:
    """The jobs of the sweep, as fast per device as the first."""
    from launcher.commands.sweep import pool_of
    from launcher.config.resolve import space_of
    from launcher.plan.forecast import jobs_of_sweep

    settings, step = configs[0].sweep, found["step_s"]
    is_grid = settings.name == "grid"
    overrides = [*space_of(request.overrides).grid()] if is_grid else [()]
    devices = [devices_of_a_job(config) for config in (configs if is_grid else configs[:1])]
    rate = None if step is None else -(-found["batch_size"] // found["world_size"]) / step["total"]
    planned = [*zip(configs, overrides, devices, strict=False)]
    return jobs_of_sweep(planned, pool_of(settings).at_a_time(min(devices)), rate)


def numbers_of(arguments: Arguments, flag: str, default: str, whole: bool = False) -> list[float]:
    """The positive numbers of a flag, separated by commas. Raises ConfigError."""
    text = arguments.flags.get(flag) or default
    try:
        found = [float(each) for each in text.split(",")] if text else []
    except ValueError:
        found = [math.nan]
    if not all(each > 0 and math.isfinite(each) and (not whole or each % 1 == 0) for each in found):
        kind = "whole numbers above 0" if whole else "numbers above 0"
        raise ConfigError(f"{flag} {text}: must be {kind}, separated by commas: {flag} {default or '800'}")
    return found
