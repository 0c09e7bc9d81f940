"""Composes and checks the request, then runs it, or lets Hydra answer a query.

Owns the choice between one job, a sweep and a query for Hydra. All jobs are checked before the first starts.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout

import hydra

from launcher.commands.arguments import Arguments
from launcher.commands.run import report_failure, run_job
from launcher.config.composition import HYDRA_VERSION, Request
from launcher.config.overrides import with_plain_constant
from launcher.config.recipe_file import expanded as expanded_recipe
from launcher.config.resolve import compose_jobs
from launcher.errors import PRUNED, ConfigError, LauncherError
from launcher.launch.config_broadcast import ConfigBroadcast
from launcher.launch.node_env import check_all_nodes_started
from launcher.launch.worker_count import refuse_small_batch
from launcher.telemetry.tracker.registry import refuse_missing
from launcher.telemetry.tracker.wandb_agent import refuse_sweep, sweep_of_agent
from launcher.telemetry.tracker.wandb_environment import of_agent, with_environment

HYDRA_QUERY_FLAGS = ("--cfg", "--info", "--hydra-help")


def train(arguments: Arguments, broadcast: ConfigBroadcast, findings: Sequence[int] = ()) -> int:
    """Compose and check the request, then run it, or let Hydra answer a query.

    Jobs of a sweep that end with one of the exit codes `findings` have not failed.
    """
    request = request_of(arguments)
    if "--hydra-help" in arguments.flags:
        return run_hydra(request, ["--hydra-help"])
    if "--multirun" in arguments.flags:
        from launcher.sweep.prepare import continued

        request = continued(request)
    configs = compose_jobs(request)
    if any(flag in arguments.flags for flag in HYDRA_QUERY_FLAGS):
        overrides = expanded_recipe(with_plain_constant(request.overrides))
        return run_hydra(request, [*arguments.hydra_flags(), request.search_path, *overrides])
    for config in configs:  # all jobs are checked before the first starts
        refuse_missing(config.tracker)
        if broadcast.launch.has_external_launcher or not request.multirun:
            refuse_small_batch(config, broadcast.launch)
    if request.multirun:
        from launcher.commands.sweep import refuse_several_machines, run_sweep

        refuse_several_machines(configs)
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


def request_of(arguments: Arguments) -> Request:
    multirun = "--multirun" in arguments.flags
    if multirun and (clashing := [flag for flag in (*HYDRA_QUERY_FLAGS, "--run") if flag in arguments.flags]):
        why = f"{clashing[0]} is for one config, and a sweep or a comparison has several"
        raise ConfigError(f"--multirun and {clashing[0]} exclude each other: {why}. Leave one of them out.")
    name = arguments.flags.get("--config-name") or "config"
    return Request(arguments.words, arguments.config_dir, name, multirun)


def run_hydra(request: Request, argv: Sequence[str]) -> int:
    """Let `hydra.main` answer these arguments. It may raise SystemExit."""
    main = hydra.main(str(request.directories[0]), request.config_name, HYDRA_VERSION)
    answer = main(lambda composed: None)
    own, sys.argv = sys.argv, ["launcher", *argv]  # which Hydra reads
    answered = io.StringIO()  # Hydra reports a reader that has left (`| head`) with a traceback
    try:
        with redirect_stdout(answered):
            answer()
    finally:
        sys.argv = own
        sys.stdout.write(answered.getvalue())
    return 0
