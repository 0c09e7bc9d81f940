"""Runs the jobs of a sweep, and compares them at the end.

Owns what a process does as the parent of a sweep: it prepares all jobs, gives them to a launcher, and says
how the sweep ended. Under torchrun the jobs run in place, one after another, on the ranks that it started.
"""

from __future__ import annotations

import os
import shlex
import signal
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

from launcher import errors
from launcher.commands.run import run_in, run_worker
from launcher.config.composition import Request
from launcher.config.messages import command_name, directory_override
from launcher.config.schema import Config, SweepConfig
from launcher.distributed.env import LaunchEnv
from launcher.errors import TO_RESUME, counted
from launcher.launch.config_broadcast import ConfigBroadcast
from launcher.launch.parent import preload
from launcher.launch.worker_count import num_workers, refuse_small_batch, visible_gpus
from launcher.os.signals import StopSignal, save_means_stop, signal_handlers_installed, signals_blocked
from launcher.os.stdio import say, write
from launcher.sweep.asha import Pruner
from launcher.sweep.launchers import JobEvent, JobLauncher
from launcher.sweep.launchers.devices import DeviceLauncher, DevicePool
from launcher.sweep.prepare import prepared
from launcher.sweep.progress import SweepProgress
from launcher.sweep.scheduler import Scheduler
from launcher.sweep.search import Searching, imported_optuna
from launcher.sweep.state import JobState, SweepJob, SweepState

# The first backward pass of each job imports it, in 0.3 s: it is imported once, before the forks.
FOR_JOBS = ("torch.fx.experimental.symbolic_shapes",)


def run_sweep(
    request: Request, configs: Sequence[Config], broadcast: ConfigBroadcast, findings: Sequence[int]
) -> int:
    """Run all jobs and compare them; the first exit code of those that failed, `findings` excepted."""
    settings, in_place = configs[0].sweep, broadcast.launch.has_external_launcher
    searches = settings.name != "grid"
    if in_place and (searches or settings.prune != "none"):
        how = f"Start it without torchrun: {command_name()} -m ... launch.nproc=N."
        raise errors.ConfigError(f"a search, and sweep.prune, need jobs in processes of their own. {how}")
    if not searches and settings.stop.max_trials is not None:
        advice = "List fewer values, or draw them at random: sweep=random."
        raise errors.ConfigError(f"sweep.stop.max_trials: a grid runs all of its jobs. {advice}")
    if settings.name == "tpe" or settings.prune == "asha":
        imported_optuna()  # refused before the sweep's directory is made

    def devices_of(config: Config) -> int:
        nproc = broadcast.launch.world_size if in_place else devices_of_a_job(config)
        refuse_small_batch(config, broadcast.launch, nproc)
        return nproc

    signals = StopSignal(save_means_stop(configs[0].launch.preempt_signals))
    smallest = min(map(devices_of, configs))  # also refused before that
    launcher, alone = launcher_of(settings, smallest, broadcast, signals)
    with (
        prepared(request, configs) as (directory, record, placed),
        # In place each job has handlers of its own; between two jobs there is nothing to save.
        nullcontext() if in_place else signal_handlers_installed(signals),
    ):
        for job, config in zip(record.jobs, placed, strict=False):  # of a search each has its own already
            job.nproc = devices_of(config)
        pruner = None if settings.prune == "none" else Pruner(directory, settings.grace_period, record.jobs)
        search = None
        if searches:
            search = Searching(request, directory, record, configs[0], devices_of, launcher.has_capacity)
        if (record.left or searches) and isinstance(launcher, DeviceLauncher):
            of_tracker = [name for name in configs[0].tracker.names if name == "wandb"]
            with signals_blocked():
                preload([*FOR_JOBS, *of_tracker])  # wandb takes 1 s to import
        progress = SweepProgress(
            directory, record.jobs, alone, settings.stop.max_trials if searches else None
        )
        scheduler = Scheduler(directory, record, launcher, settings, progress, signals, pruner, search)
        if searches:
            findings = (*findings, errors.DIVERGED)  # it says of a point of the space what others say
        if not alone:
            say(
                f"sweep: to follow the jobs: {command_name()} watch {shlex.quote(str(directory))}", sys.stdout
            )
        with launcher:
            scheduler.run()
        done = sum(job.state == JobState.DONE for job in record.jobs)
        took = f"{record.device_seconds / 3600:.3g} device hours"
        say(f"sweep: {done} of {counted(len(record.jobs), 'job')} done in {took}", sys.stdout)
        if record.left and scheduler.asked:
            lost_a_rank = isinstance(launcher, InPlaceLauncher) and launcher.lost_a_rank
            say_stopped(directory_override("sweep.resume", directory), lost_a_rank)
        compare_jobs(directory)
        return exit_code_of(record, scheduler, findings)


class InPlaceLauncher(JobLauncher):
    """Runs jobs on the ranks that torchrun or a scheduler has started: `submit` returns when its job is over.

    No job follows one that a signal has stopped, nor one in which a rank has failed alone and the others have
    lost it.
    """

    def __init__(self, broadcast: ConfigBroadcast, signals: StopSignal) -> None:
        self.lost_a_rank = False
        self._broadcast, self._signals = broadcast, signals
        self._ended: list[JobEvent] = []

    def has_capacity(self, job: SweepJob) -> bool:
        return not self._ended

    def submit(self, job: SweepJob, directory: Path) -> None:
        code = run_in(directory, self._broadcast)
        self._ended.append(JobEvent(job.number, code))
        self.lost_a_rank = self._broadcast.group_broken or code == errors.StalledError.exit_code
        if self.lost_a_rank or code in errors.STOPPED:
            self._signals.handler(signal.SIGTERM)

    def poll(self, wait_s: float) -> Sequence[JobEvent]:
        ended, self._ended = self._ended, []
        return ended

    def stop(self, job: SweepJob, at_once: bool = False) -> None:
        return  # none runs while the scheduler asks


def devices_of_a_job(config: Config) -> int:
    """The workers of a job; auto shares the GPUs out among the jobs that run at a time.

    Raises PreflightError for more workers than GPUs.
    """
    sweep, nproc = config.sweep, config.launch.nproc
    if sweep.launcher != "devices":
        return 1 if nproc == "auto" else int(nproc)  # this machine's GPUs say nothing of those elsewhere
    workers = num_workers(config.launch, LaunchEnv()) or 1
    if nproc == "auto" and (num_gpus := len(visible_gpus())):
        return 1 if sweep.parallel == "auto" else max(1, num_gpus // int(sweep.parallel))
    return workers


def launcher_of(
    settings: SweepConfig, nproc: int, broadcast: ConfigBroadcast, signals: StopSignal
) -> tuple[JobLauncher, bool]:
    """The launcher of the jobs, and whether it runs one job at a time, which prints itself.

    `nproc` is of the smallest job.
    """
    if broadcast.launch.has_external_launcher:
        return InPlaceLauncher(broadcast, signals), True
    if settings.launcher == "slurm":
        from launcher.sweep.launchers.slurm import SlurmLauncher

        return SlurmLauncher(settings), False
    pool = pool_of(settings)
    alone = pool.at_a_time(nproc) == 1
    return DeviceLauncher(pool, run_in_child, alone), alone


def pool_of(settings: SweepConfig) -> DevicePool:
    """The devices of this machine, as a sweep shares them out."""
    gpus, cores = visible_gpus(), sorted(os.sched_getaffinity(0))
    parallel = None if settings.parallel == "auto" else int(settings.parallel)
    if not gpus:
        # On a CPU one job at a time by itself: the bits of a result may depend on the number of threads, and
        # a job of a sweep is to have those of the same job alone.
        parallel = parallel or 1
    return DevicePool(gpus, cores, settings.jobs_per_gpu, parallel)


def run_in_child(directory: Path) -> int:
    """`run_in` for a process that was forked from the sweep's."""
    try:
        return run_in(directory, ConfigBroadcast(LaunchEnv(), run_worker))
    except (KeyboardInterrupt, errors.Interrupted):
        return errors.INTERRUPTED


def say_stopped(again: str, lost_a_rank: bool) -> None:
    """How to continue. The same command would begin with the job in which a rank was lost, and end again."""
    if lost_a_rank:
        how = "a rank failed alone, and the others have lost it: these processes run no further job. "
        how += f"To run the rest, each job on processes of its own: {command_name()} -m {again}"
    else:
        how = f"stopped. {TO_RESUME} {again}: it continues with the jobs that are not done"
    write(f"sweep: {how}\n", sys.stderr)


def exit_code_of(record: SweepState, scheduler: Scheduler, findings: Sequence[int]) -> int:
    """The first code of a job that failed; of a sweep that was stopped, that of its jobs, else 75."""
    saved = errors.PreemptedError.exit_code
    codes = [job.exit for job in record.jobs if job.state == "failed" and job.exit not in findings]
    stopped = [job.exit for job in record.jobs if job.state == "stopped"]
    if not codes and scheduler.asked_at_once and any(code != saved for code in stopped):
        return errors.INTERRUPTED  # killed by a second Ctrl-C, not by themselves
    if not codes and scheduler.asked and record.left:
        stopped.append(saved)
    return next((code for code in (*codes, *stopped) if code), 0)


def compare_jobs(directory: Path) -> None:
    """Write the tables and the page of a sweep; a failure is a warning, because the jobs are done."""
    from launcher.report.comparison import SIDE_BY_SIDE, TABLE, job_directories, write_comparison
    from launcher.report.page import write_sweep_report
    from launcher.report.run import Run

    try:
        runs = [Run.read(job) for job in job_directories(directory)]
        if not runs:
            return
        written = [*write_comparison(directory, runs), write_sweep_report(directory, runs)]
        for path in written:
            if path.name == SIDE_BY_SIDE:
                write(f"\n{path.read_text(encoding='utf-8')}\n", sys.stdout)
            elif path.name == TABLE and directory / SIDE_BY_SIDE not in written:
                rows = path.read_text(encoding="utf-8").splitlines()
                shown = "\n".join(row for row in rows if row.startswith(("|", "Best")))
                write(f"\n{shown}\n\n", sys.stdout)
            say(f"sweep: {path}", sys.stdout)
    except Exception as error:
        say(f"warning: the jobs could not be compared: {type(error).__name__}: {error}", sys.stderr)
