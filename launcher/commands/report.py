"""`report`: pages and tables of runs and sweeps, from their files alone.

Owns which directories are read and where the page is written. A run's page is its report.html; that of a
sweep is in the sweep's directory; that of several runs is in the working directory, or where --out says.
"""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from launcher.commands.arguments import Arguments
from launcher.config.messages import command_name, shortened
from launcher.errors import ConfigError, escaped
from launcher.launch.config_broadcast import ConfigBroadcast


def write_reports(arguments: Arguments, broadcast: ConfigBroadcast) -> None:
    """report RUN ... [--out FILE]: writes report.html of a run, a sweep, or several runs

    Writes report.html: for one run or sweep into its directory, for several into the working directory,
    where it replaces no file but a report.
    RUN is the directory of a run, such as outputs/resnet18/20260101-120000-ab12, or of a sweep, with all its
    jobs.

      --out FILE         write the page to FILE instead

    Example: {program} report outputs/resnet18/* --out runs.html
    """
    from launcher.report.comparison import is_sweep, job_directories, write_comparison
    from launcher.report.html import GENERATOR
    from launcher.report.overview import run_table
    from launcher.report.page import render
    from launcher.report.run import Run
    from launcher.run_dir.atomic import write_text
    from launcher.run_dir.records import REPORT

    if not arguments.positionals:
        raise ConfigError(
            f"report: which run? Give its directory: {command_name()} report outputs/<recipe>/<run>"
        )
    directories = [checked("report", word) for word in dict.fromkeys(arguments.positionals)]
    sweeps = [directory for directory in directories if is_sweep(directory)]
    runs = [Run.read(directory) for directory in run_directories(directories)]
    own = directories[0] / REPORT if len(directories) == 1 else Path(REPORT)
    place = Path(arguments.flags.get("--out") or own)
    if place == Path(REPORT) and place.exists() and GENERATOR not in place.read_text(errors="replace"):
        raise ConfigError(f"{place} is there, and no page of a report. Give another name: --out FILE.")
    by_directory = {run.directory.resolve(): run for run in runs}
    written = []
    for sweep in sweeps:
        jobs = [by_directory[job.resolve()] for job in job_directories(sweep)]
        written += write_comparison(sweep, jobs)
    alone = directories[0] if len(directories) == 1 and sweeps else None
    of_runs = runs[0].name if len(runs) == 1 else f"{len(runs)} runs"
    title = alone.absolute().name if alone else of_runs
    write_text(place, render(runs, title, alone))
    print(run_table(runs))
    lines = [str(path) for path in (*written, place)]
    print(*(map(escaped, lines) if sys.stdout.isatty() else lines), sep="\n")


def checked(command: str, word: str) -> Path:
    """The directory of a run or a sweep. Raises ConfigError."""
    from launcher.report.comparison import job_directories
    from launcher.report.run import is_run

    if not os.path.isdir(word):
        raise ConfigError(f"{command} {shortened(word)}: there is no such directory.")
    directory = Path(word)
    if not is_run(directory) and not job_directories(directory):
        why = "it holds neither metrics.jsonl nor status.json, nor folders with them"
        advice = "Give the directory of a run: outputs/<recipe>/<run>"
        raise ConfigError(f"{command} {shortened(word)}: this is no run and no sweep: {why}. {advice}")
    return directory


def run_directories(directories: Sequence[Path]) -> list[Path]:
    """The runs, and those of the sweeps, each once."""
    from launcher.report.comparison import is_sweep, job_directories

    found = (job_directories(each) if is_sweep(each) else [each] for each in directories)
    return list({run.resolve(): run for run in itertools.chain.from_iterable(found)}.values())
