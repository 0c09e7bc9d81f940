"""Composes and checks the request, then runs it, or prints its config.

Owns the choice between one job, a sweep and the printed config. All jobs are checked before the first starts.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from launcher.commands.arguments import Arguments
from launcher.commands.run import report_failure, run_job
from launcher.config.composition import Request
from launcher.config.resolve import compose_jobs
from launcher.errors import PRUNED, ConfigError, LauncherError
from launcher.launch.config_broadcast import ConfigBroadcast
from launcher.launch.node_env import check_all_nodes_started
from launcher.launch.worker_count import refuse_small_batch
from launcher.run_dir.records import config_yaml
from launcher.telemetry.tracker.registry import refuse_missing
from launcher.telemetry.tracker.wandb_agent import refuse_sweep, sweep_of_agent
from launcher.telemetry.tracker.wandb_environment import of_agent, with_environment


def train(arguments: Arguments, broadcast: ConfigBroadcast, findings: Sequence[int] = ()) -> int:
    """Compose and check the request, then run it, or print its config.

    Jobs of a sweep that end with one of the exit codes `findings` have not failed.
    """
    request = Request(arguments.positionals, arguments.config_dir, "--multirun" in arguments.flags)
    if request.multirun:
        from launcher.sweep.prepare import continued

        request = continued(request)
    configs = compose_jobs(request)
    if "--cfg" in arguments.flags:
        print(config_yaml(configs[0]), end="")
        return 0
    for config in configs:  # all jobs are checked before the first starts
        refuse_missing(config.tracker)
        if not request.multirun:  # a sweep divides the devices among its jobs
            refuse_small_batch(config, broadcast.launch)
    if request.multirun:
        from launcher.commands.sweep import run_sweep

        if any(config.launch.nnodes not in ("auto", 1) for config in configs):
            raise ConfigError("launch.nnodes with -m: a sweep runs on one machine. Leave it out.")
        refuse_sweep(os.environ)
        return run_sweep(request, configs, broadcast, findings)
    (config,) = configs
    check_all_nodes_started(config.launch, broadcast.launch, os.environ)
    tracked = with_environment(of_agent(config, os.environ), request.overrides, os.environ)
    try:
        run_job(tracked, request.overrides, broadcast)
    except LauncherError as error:
        if error.exit_code != PRUNED or not sweep_of_agent(os.environ):
            raise
        report_failure(error)  # the agent would count another exit code as a failure, and give up after five
    return 0
