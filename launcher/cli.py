"""The front door: argv to exit code.

Owns the choice of command, the role of this process among the ranks, and what is printed when something
fails. Composition and checks come first and without torch; workers get the resolved config as data.
"""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from launcher.commands import help
from launcher.commands.arguments import Arguments, parse
from launcher.config.groups import conf_dir
from launcher.distributed.handoff import JobFailed, Leader, follow
from launcher.distributed.process_group import LaunchEnv
from launcher.errors import (
    CollectiveError,
    ConfigError,
    LauncherError,
    PreemptedError,
    StalledError,
    StorageError,
)
from launcher.process.shortage import shortage_of
from launcher.process.terminal import columns_of, wrapped
from launcher.supervisor.worker_count import num_workers, refuse_small_batch

if TYPE_CHECKING:
    import torch.distributed as dist

    from launcher.config.composition import Request
    from launcher.config.schema import Config

HYDRA_ANSWERS = ("--cfg", "--info", "--hydra-help", "--shell-completion")
INTERRUPTED = 130
STOPPED = (75, 129, INTERRUPTED, 131, 143)  # by a signal, saved or not


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code; errors are on stderr by then."""
    try:
        launch = LaunchEnv.from_environ(os.environ)
        if launch.rank > 0:
            return follow_leader(launch)
        return lead(launch, sys.argv[1:] if argv is None else argv)
    except KeyboardInterrupt:
        return INTERRUPTED
    except Exception as error:
        return report_failure(error)


def lead(launch: LaunchEnv, argv: Sequence[str]) -> int:
    """Rank 0, or the only process: do what argv says, then let the other ranks go with the same code."""
    leader = Leader(launch, run_worker)
    exit_code, reason = 1, "rank 0 ended unexpectedly"
    try:
        exit_code, reason = obey(parse(argv), leader), ""
    except KeyboardInterrupt:
        exit_code, reason = INTERRUPTED, "interrupted"
    except SystemExit as stop:  # Hydra answers some questions by leaving
        exit_code, reason = stop.code if isinstance(stop.code, int) else 0, ""
    except Exception as error:
        # Printed before the others are let go: torchrun kills whoever is left once the first has failed.
        exit_code, reason = report_failure(error), str(error)
    if launch.world_size > 1:
        ignore_sigterm()
        leader.dismiss(exit_code, reason)
    return exit_code


def follow_leader(launch: LaunchEnv) -> int:
    exit_code, reason = follow(launch, run_worker, on_end=ignore_sigterm)
    if reason and launch.local_rank == 0:  # another machine than rank 0's: nothing has been printed here
        print(wrapped(f"error on rank 0: {reason}", columns_of(sys.stderr)), file=sys.stderr, flush=True)
    return exit_code


def ignore_sigterm() -> None:
    """Leave with our own exit code: torchrun sends SIGTERM to all as soon as the first rank has gone."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def obey(arguments: Arguments, leader: Leader) -> int:
    directories = config_directories(arguments)
    if "--help" in arguments.flags:
        print(help.help_text(directories), end="")
    elif "--version" in arguments.flags:
        print(version_text())
    elif arguments.command == "recipes":
        print(help.recipes_text(directories), end="")
    elif arguments.command == "report":
        write_reports(arguments.words)
    elif arguments.command == "export":
        export_weights(arguments)
    else:
        return train(arguments, leader)
    return 0


def train(arguments: Arguments, leader: Leader) -> int:
    """Compose and check everything that was asked for, then run it, or let Hydra answer about it."""
    from launcher.config.experiments import with_experiment
    from launcher.config.resolve import compose_jobs
    from launcher.telemetry.tracker.wandb_environment import with_environment

    request = request_of(arguments)
    if "--hydra-help" in arguments.flags:
        return ask_hydra(request, ["--hydra-help"])
    if "--shell-completion" in arguments.flags:
        from launcher.commands.completion import answer

        return answer(request, ask_hydra)
    configs = compose_jobs(expanded := with_experiment(request))
    if any(flag in arguments.flags for flag in HYDRA_ANSWERS):
        return ask_hydra(request, [*arguments.hydra_flags(), request.search_path, *request.overrides])
    for config in configs:
        refuse_small_batch(config, leader.launch)  # what cannot be started is refused before anything is
    if expanded.multirun:
        return run_sweep(expanded, configs, leader)
    (config,) = configs
    run_one(with_environment(config, request.overrides, os.environ), request.overrides, leader)
    return 0


def run_one(config: Config, overrides: Sequence[str], leader: Leader) -> None:
    """In parent mode on workers of its own, else on the ranks that have been started with this process."""
    from launcher.run_dir.claim import claimed
    from launcher.supervisor.supervise import supervise, write_down

    workers = num_workers(config.launch, leader.launch)
    with claimed(leader.recalled(config), overrides) as claim:
        if claim.finished:
            print(wrapped(claim.finished, columns_of(sys.stdout)), flush=True)
        elif workers is None:
            leader.remember(claim.config)
            try:
                leader.run(claim.config)
            except JobFailed as error:
                if (
                    error.exit_code != PreemptedError.exit_code
                ):  # what rank 0 wrote is about a lost connection
                    write_down(Path(claim.config.run.dir), error)
                raise
        else:
            supervise(claim.config, workers)


@dataclass
class SweepProgress:
    """What became of the jobs of a sweep so far. A job that fails is told at once and does not end it."""

    num_jobs: int
    leader: Leader
    started: int = 0
    exit_codes: list[int] = field(default_factory=list)  # of the jobs that failed, in order
    broken: bool = False  # the ranks have lost each other, or all was asked to stop: no further job

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
            print(f"sweep: job {self.started} of {self.num_jobs} failed", file=sys.stderr, flush=True)
            self.exit_codes.append(report_failure(error))
            stopped = self.exit_codes[-1] in STOPPED
            self.broken = stopped or isinstance(
                error, StalledError | CollectiveError
            )  # in parent mode that is a RunFailed


def run_sweep(request: Request, configs: Sequence[Config], leader: Leader) -> int:
    from launcher.sweep import hydra_sweep

    progress = SweepProgress(len(configs), leader)
    directory = hydra_sweep.run_sweep(request, [config.recipe.name for config in configs], progress.run)
    done = progress.started - len(progress.exit_codes)
    print(f"sweep: {done} of {len(configs)} jobs done", flush=True)
    if directory is not None:
        compare_jobs(directory)
    return progress.exit_codes[0] if progress.exit_codes else 0


def compare_jobs(directory: Path) -> None:
    """Picture and tables of a sweep; what goes wrong there is a warning, for the jobs are done."""
    from launcher.report.comparison import write_comparison

    try:
        for path in write_comparison(directory):
            print(f"sweep: {path}", flush=True)
    except Exception as error:
        print(f"warning: the jobs could not be compared: {type(error).__name__}: {error}", file=sys.stderr)


def ask_hydra(request: Request, argv: Sequence[str]) -> int:
    from launcher.sweep import hydra_sweep

    hydra_sweep.call_hydra(request, argv, lambda composed: None)
    return 0


def request_of(arguments: Arguments) -> Request:
    from launcher.config.composition import Request

    multirun = "--multirun" in arguments.flags
    clashing = [flag for flag in (*HYDRA_ANSWERS, "--run") if multirun and flag in arguments.flags]
    if clashing:
        raise ConfigError(f"--multirun and {clashing[0]} exclude each other. Leave one of them out.")
    directory, name = arguments.flags.get("--config-dir"), arguments.flags.get("--config-name")
    return Request(arguments.words, Path(directory) if directory else None, name or "config", multirun)


def config_directories(arguments: Arguments) -> list[Path]:
    directory = arguments.flags.get("--config-dir")
    return [conf_dir(), *([Path(directory)] if directory else [])]


def write_reports(words: Sequence[str]) -> None:
    from launcher.report.comparison import is_sweep, write_comparison
    from launcher.report.page import write_report

    if not words:
        raise ConfigError(
            "report: which run? Give its directory: python -m launcher report outputs/<recipe>/<run>"
        )
    for word in words:
        if not os.path.isdir(word):
            raise ConfigError(f"report {word}: there is no such directory.")
        directory = Path(word)
        try:
            several = is_sweep(directory)
            written = write_comparison(directory, warn) if several else [write_report(directory, warn)]
        except OSError as error:
            raise StorageError(f"report {word}: {error.filename}: {error.strerror}.") from error
        print(*written, sep="\n")


def warn(text: str) -> None:
    print(wrapped(f"warning: {text}", columns_of(sys.stderr)), file=sys.stderr, flush=True)


def export_weights(arguments: Arguments) -> None:
    from launcher.checkpoint.export import export

    if len(arguments.words) != 2:
        raise ConfigError(
            "export: give a run and a file: "
            "python -m launcher export outputs/<recipe>/<run> weights.safetensors [--dtype fp16] [--best]"
        )
    run_dir, file = map(Path, arguments.words)
    done = export(run_dir, file, arguments.flags.get("--dtype") or "fp32", "--best" in arguments.flags)
    print(f"{done.file}: {done.num_tensors} tensors of {done.checkpoint}")


def run_worker(config: Config, launch: LaunchEnv, store: dist.Store | None, job: str) -> None:
    from launcher import worker

    worker.run(config, launch, store, job)


def report_failure(error: Exception) -> int:
    """Print what happened, with a traceback only if nobody foresaw it; returns the exit code."""
    error = shortage_of(error, "this process") or error
    if isinstance(error, LauncherError):
        kind = "stopped" if error.exit_code == PreemptedError.exit_code else "error"
        print(wrapped(f"{kind}: {error}", columns_of(sys.stderr)), file=sys.stderr, flush=True)
        return error.exit_code
    traceback.print_exception(error)
    return 1


def version_text() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return f"fp16-launcher {version('fp16-launcher')}"
    except PackageNotFoundError:
        return "fp16-launcher, not installed (run from its sources)"
