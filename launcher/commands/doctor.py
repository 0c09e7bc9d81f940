"""`doctor`: whether this machine can run what is to be trained.

Owns what is printed and the exit code.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from dataclasses import asdict
from socket import gethostname
from typing import TYPE_CHECKING

from launcher.commands.arguments import Arguments
from launcher.errors import PreflightError
from launcher.launch.config_broadcast import ConfigBroadcast
from launcher.os.stdio import say

if TYPE_CHECKING:
    from launcher.config.schema import Config
    from launcher.distributed.env import LaunchEnv
    from launcher.doctor.findings import Check, Finding

ANY_RECIPE = "recipe=resnet18"  # what is looked at hardly depends on it


def doctor(arguments: Arguments, broadcast: ConfigBroadcast) -> int:
    """doctor [key=value ...] [--json]: checks GPUs, links, disk, network and tracker

    Checks this machine: GPUs and the links between them, disk, memory, limits, network and tracker. It
    prints a line for each: ok, warning (runs work, but slower or at a risk) or failure, and what to do. Keys
    such as run.dir, data.path and launch.nproc say what a run would use. Started by torchrun on several
    hosts, it checks each by itself.

      --json             print JSON

    Exit code 3 after a failure, else 0.

    Example: {program} doctor recipe=resnet50 data.path=/data/imagenet
    """
    from launcher.config.composition import Request
    from launcher.config.resolve import compose_jobs
    from launcher.doctor.findings import FAILURE, found_by

    if broadcast.launch.local_rank > 0:
        return 0
    chosen = () if any(word.startswith("recipe=") for word in arguments.positionals) else (ANY_RECIPE,)
    (config,) = compose_jobs(Request((*chosen, *arguments.positionals), arguments.config_dir))
    says_json, host = "--json" in arguments.flags, gethostname()
    if broadcast.launch.has_external_launcher and not says_json:
        say(f"{host}:", sys.stdout)
    found, checks = planned_checks(config, broadcast.launch)
    if not says_json:
        print_findings(found)
    for check in checks:
        found += (of_check := found_by(check))
        if not says_json:
            print_findings(of_check)
    if says_json:
        print(json.dumps({"hosts": [{"host": host, "findings": [*map(asdict, found)]}]}))
    return PreflightError.exit_code if any(finding.verdict == FAILURE for finding in found) else 0


def planned_checks(config: Config, launch: LaunchEnv) -> tuple[list[Finding], list[Check]]:
    """What is known at once, and the checks. More workers than GPUs leave those without a GPU."""
    from launcher.doctor import gpus, links, machine
    from launcher.doctor.findings import FAILURE, Finding
    from launcher.launch.worker_count import count_gpus, num_workers

    try:
        count = count_gpus()
        ranks = (
            launch.local_world_size
            if launch.has_external_launcher
            else num_workers(config.launch, launch) or 1
        )
        found = [Finding("GPUs", str(count))]
    except PreflightError as error:
        count, ranks, found = 0, 1, [Finding("driver", "no worker could start", FAILURE, str(error))]
    of_machine = machine.checks(machine.Subject(config, ranks, count))
    return found, [*of_machine, *gpus.checks(count), *links.checks(count, ranks)]


def print_findings(found: Iterable[Finding]) -> None:
    for each in found:
        text = f"{each.verdict:<8}{each.name:<18}{each.value}" + (f". {each.advice}" if each.advice else "")
        say(text, sys.stdout)
