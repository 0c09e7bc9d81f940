"""The command line: argv to exit code.

Owns the choice of command and the role of this process among the ranks. Composition and checks come first
and without torch; workers get the resolved config as data.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import suppress

from launcher import errors
from launcher.commands.arguments import Arguments, parse
from launcher.commands.help import COMMANDS, config_directories, help_text, version_text
from launcher.commands.run import report_failure, run_node, run_worker
from launcher.distributed.env import LaunchEnv
from launcher.launch.config_broadcast import INIT_S, ConfigBroadcast, receive_jobs
from launcher.launch.node_env import given, node_env
from launcher.launch.slurm import torchrun_env_from_slurm
from launcher.os.signals import ignore_sigterm_of_torchrun
from launcher.os.stdio import say

RUNNING = ("train", "compare", "job")  # commands that run jobs, unless given one of QUERIES
QUERIES = frozenset({"--help", "--version", "--cfg"})


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code; errors are on stderr by then."""
    try:
        argv = sys.argv[1:] if argv is None else argv
        words = None if "RANK" in os.environ else run_overrides(argv)
        launch = LaunchEnv() if words is None else node_env(words, os.environ)
        if not launch.is_node:
            # A task of srun is a rank, unless the command makes it the parent of a node, or a run of its own.
            if given(words or (), "nnodes") != "1":
                os.environ.update(torchrun_env_from_slurm(os.environ))
            launch = LaunchEnv.from_environ(os.environ)
        if launch.has_external_launcher and "doctor" in argv:  # every rank looks, with its own words
            return run_command(parse(argv), ConfigBroadcast(launch, run_worker))
        return run_other_rank(launch, argv) if launch.rank > 0 else run_rank0(launch, argv)
    except (KeyboardInterrupt, errors.Interrupted):
        return errors.INTERRUPTED
    except Exception as error:
        return report_failure(error)


def run_rank0(launch: LaunchEnv, argv: Sequence[str]) -> int:
    """Rank 0, or the only process: run the command, then send the other ranks the same exit code."""
    run_rank = run_node if launch.is_node else run_worker
    broadcast = ConfigBroadcast(launch, run_rank, init_timeout_s(argv), without_node_rank(argv))
    try:
        exit_code, reason = run_command(parse(typed_argv(argv)), broadcast), ""
    except (KeyboardInterrupt, errors.Interrupted):
        exit_code, reason = errors.INTERRUPTED, "interrupted"
    except Exception as error:
        # Printed before the others leave: torchrun kills the remaining ranks once one has failed.
        exit_code, reason = report_failure(error), errors.in_words(error)
    if launch.world_size > 1:
        ignore_sigterm_of_torchrun()
        broadcast.send_exit(exit_code, reason)
    return exit_code


def run_other_rank(launch: LaunchEnv, argv: Sequence[str]) -> int:
    run_rank = run_node if launch.is_node else run_worker
    exit_code, reason = receive_jobs(launch, run_rank, init_timeout_s(argv), without_node_rank(argv))
    if reason and launch.local_rank == 0:  # on other machines than rank 0's nothing has been printed yet
        kind = "stopped" if exit_code in errors.ON_REQUEST else "error"
        say(f"{kind} on {launch.role} 0: {reason}", sys.stderr)
    return exit_code


def run_overrides(argv: Sequence[str]) -> tuple[str, ...] | None:
    """The overrides of a command that runs one job; None for any other, and for one that is refused."""
    try:
        arguments = parse(typed_argv(argv))
    except errors.LauncherError:
        return None
    runs = arguments.command == "train" and arguments.flags.keys() <= {"--config-dir"}
    return arguments.positionals if runs else None


def typed_argv(argv: Sequence[str]) -> Sequence[str]:
    """The words with the types that a sweep of wandb gives to its values."""
    if "WANDB_SWEEP_PARAM_PATH" not in os.environ:
        return argv
    from launcher.telemetry.tracker.wandb_agent import with_typed_values  # takes 0.1 s

    return with_typed_values(argv, os.environ)


def without_node_rank(argv: Sequence[str]) -> list[str]:
    """The words that must be the same on all machines."""
    return [word for word in argv if not word.lstrip("+").startswith("launch.node_rank=")]


def init_timeout_s(argv: Sequence[str]) -> float:
    """launch.init_timeout_s as given here: the ranks meet before there is a config, or never do."""
    with suppress(ValueError):
        return float(given(argv, "init_timeout_s"))
    return INIT_S


def run_command(arguments: Arguments, broadcast: ConfigBroadcast) -> int:
    try:
        return execute(arguments, broadcast)
    except OSError as error:
        if arguments.command in RUNNING and not QUERIES & arguments.flags.keys():
            raise
        if isinstance(error, BrokenPipeError):  # `| head` has read enough
            return 0
        raise errors.StorageError(f"{arguments.command}: {error}") from error


def execute(arguments: Arguments, broadcast: ConfigBroadcast) -> int:
    if "--help" in arguments.flags:
        print(errors.escaped(help_text(config_directories(arguments), arguments.command)), end="")
    elif "--version" in arguments.flags:
        print(version_text())
    elif arguments.command in COMMANDS:
        return COMMANDS[arguments.command](arguments, broadcast) or 0
    else:
        from launcher.commands.train import train  # loads Hydra

        return train(arguments, broadcast)
    return 0
