"""`job`: runs one job of a sweep from its folder, as carriers start it on other machines."""

from __future__ import annotations

from pathlib import Path

from launcher.commands.arguments import Arguments
from launcher.commands.run import run_one
from launcher.config.messages import program
from launcher.distributed.handoff import Leader
from launcher.errors import ConfigError


def run_job(arguments: Arguments, leader: Leader) -> int:
    """job DIR: runs or resumes one job of a sweep, from its folder

    Runs or resumes one job of a sweep. The config is that in DIR/job.json, which the sweep wrote; later
    changes of the files in conf/ have no effect. The exit code is that of the run.

    Example: {program} job multirun/resnet18/20260101-120000-ab12/3_optim.lr=0.1
    """
    from launcher.sweep.job import read_job

    if len(arguments.words) != 1:
        raise ConfigError(f"job: give the folder of one job: {program()} job multirun/<recipe>/<sweep>/<job>")
    config, overrides = read_job(Path(arguments.words[0]))
    run_one(config, overrides, leader)
    return 0
