"""Runs several jobs in the order of Hydra's multirun, and compares them at the end."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from launcher.commands.run import report_failure, run_one
from launcher.config.messages import directory_override
from launcher.distributed.handoff import Leader
from launcher.errors import (
    STOPPED,
    TO_RESUME,
    CollectiveError,
    LauncherError,
    StalledError,
    counted,
)

if TYPE_CHECKING:
    from launcher.config.composition import Request
    from launcher.config.schema import Config


@dataclass
class SweepProgress:
    """Progress of a sweep. A job that fails is reported at once and does not end the sweep."""

    num_jobs: int
    leader: Leader
    started: int = 0
    exit_codes: list[int] = field(default_factory=list)  # of the jobs that failed, in order
    stopped: bool = False  # by a signal
    broken: bool = False  # the ranks have lost each other, or a stop was requested: run no further job

    def run(self, config: Config, overrides: Sequence[str]) -> None:
        from launcher.telemetry.tracker.wandb_environment import in_sweep, with_environment

        if self.broken:
            return
        self.started += 1
        print(f"sweep: job {self.started} of {self.num_jobs}: {config.run.dir}", flush=True)
        try:
            tracked = with_environment(config, overrides, os.environ)
            run_one(in_sweep(tracked, Path(config.run.dir).name, self.started - 1), overrides, self.leader)
        except Exception as error:
            self.stopped = isinstance(error, LauncherError) and error.exit_code in STOPPED
            how = "stopped" if self.stopped else "failed"
            print(f"sweep: job {self.started} of {self.num_jobs} {how}", file=sys.stderr, flush=True)
            if self.stopped:  # the sweep says how to resume, all its jobs
                error.args = (str(error).partition(f" {TO_RESUME}")[0],)
            self.exit_codes.append(report_failure(error))
            # In parent mode a rank that is lost is a RunFailed.
            self.broken = self.stopped or isinstance(error, StalledError | CollectiveError)


def run_sweep(
    request: Request, configs: Sequence[Config], leader: Leader, findings: Sequence[int] = ()
) -> int:
    """Run all jobs and compare them; the first exit code of those that failed, `findings` excepted."""
    from launcher.sweep import hydra_sweep

    progress = SweepProgress(len(configs), leader)
    directory = hydra_sweep.run_sweep(request, configs, progress.run)
    done = progress.started - len(progress.exit_codes)
    print(f"sweep: {done} of {counted(len(configs), 'job')} done", flush=True)
    if progress.stopped:
        rest = "it continues with the jobs that are not done"
        again = directory_override("hydra.sweep.dir", directory)
        print(f"sweep: stopped. {TO_RESUME} {again}: {rest}", file=sys.stderr, flush=True)
    compare_jobs(directory)
    return next((code for code in progress.exit_codes if code not in findings), 0)


def compare_jobs(directory: Path) -> None:
    """Write the plot, tables and page of a sweep; a failure is a warning, because the jobs are done."""
    from launcher.report.comparison import SIDE_BY_SIDE, TABLE, job_directories, write_comparison
    from launcher.report.page import write_sweep_report
    from launcher.report.run_record import RunRecord

    try:
        runs = [RunRecord.read(job) for job in job_directories(directory)]
        written = write_comparison(directory, runs)
        if runs:
            written.append(write_sweep_report(directory, runs))
        for path in written:
            if path.name == SIDE_BY_SIDE:
                print(f"\n{path.read_text(encoding='utf-8')}")
            elif path.name == TABLE and directory / SIDE_BY_SIDE not in written:
                rows = path.read_text(encoding="utf-8").splitlines()
                print("", *(row for row in rows if row.startswith(("|", "Best: "))), "", sep="\n")
            print(f"sweep: {path}", flush=True)
    except Exception as error:
        print(f"warning: the jobs could not be compared: {type(error).__name__}: {error}", file=sys.stderr)
