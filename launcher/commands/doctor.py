"""`doctor`: whether this machine, or all hosts of a launch, can run what is to be trained.

Owns what is printed and the exit code.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from dataclasses import asdict
from typing import TYPE_CHECKING

from launcher.commands.arguments import Arguments
from launcher.distributed.handoff import Leader
from launcher.errors import PreflightError
from launcher.process.terminal import say

if TYPE_CHECKING:
    from launcher.doctor.findings import Finding

ANY_RECIPE = "recipe=resnet18"  # what is looked at hardly depends on it


def doctor(arguments: Arguments, leader: Leader) -> int:
    """doctor [key=value ...] [--json]: looks at GPUs, links, disk, network and tracker

    Looks at this machine: GPUs and the links between them, disk, memory, limits, network and tracker. It
    prints a line for each: ok, note (runs work, but slower or at a risk) or failure, and what to do. Keys
    such as run.dir, data.path and launch.nproc say what a run would use. Started by torchrun on several
    hosts, it looks at each, compares them and measures the links between them.

      --json             print JSON

    Exit code 3 after a failure, else 0.

    Example: {program} doctor recipe=resnet50 data.path=/data/imagenet
    """
    from launcher.config.composition import Request
    from launcher.config.resolve import compose_jobs
    from launcher.doctor import gpus, links, machine
    from launcher.doctor.findings import FAILURE, Finding, found_by
    from launcher.doctor.hosts import consult
    from launcher.supervisor.worker_count import count_gpus, num_workers

    chosen = () if any(word.startswith("recipe=") for word in arguments.words) else (ANY_RECIPE,)
    (config,) = compose_jobs(Request((*chosen, *arguments.words), arguments.config_dir))
    launch, says_json = leader.launch, "--json" in arguments.flags

    def look() -> list[Finding]:
        try:
            count, found = count_gpus(), []
        except PreflightError as error:  # a driver that does not start
            count, found = 0, [Finding("driver", "does not start", FAILURE, str(error))]
        found.append(Finding("GPUs", str(count)))
        ranks = launch.local_world_size if launch.launched else num_workers(config.launch, launch) or 1
        subject = machine.Subject(config, ranks, count)
        of_links = links.checks(count, 1 if launch.launched else ranks)
        for check in (*machine.checks(subject), *gpus.checks(count), *of_links):
            now = found_by(check)
            found += now
            if not says_json and not launch.launched:
                print_findings(now)
        return found

    hosts = consult(launch, machine.place_of(config), look, config.launch.init_timeout_s)
    if hosts is None:
        return 0
    found = [finding for host in hosts for finding in host.found]
    if says_json:
        said = [{"host": host.name, "findings": [*map(asdict, host.found)]} for host in hosts]
        print(json.dumps({"hosts": said}))
    elif launch.launched:
        for host in hosts:
            print(f"{host.name}:")
            print_findings(host.found)
    return PreflightError.exit_code if any(finding.verdict == FAILURE for finding in found) else 0


def print_findings(found: Iterable[Finding]) -> None:
    for each in found:
        text = f"{each.verdict:<8}{each.name:<18}{each.value}" + (f". {each.advice}" if each.advice else "")
        say(text, sys.stdout)
