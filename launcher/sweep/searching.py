"""The plan of a search: its next job is asked for when a device is free, and composed and checked then.

Owns how what a search draws becomes a job: its config, folder and place in sweep.json.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from launcher.config.composition import Request
from launcher.config.resolve import compose_one, space_of
from launcher.config.schema import Config
from launcher.errors import ConfigError, first_line
from launcher.sweep.asha import Pruner
from launcher.sweep.hydra_sweep import Planned, is_setting, made
from launcher.sweep.job import FAILED, OVER, WAITING, Job, settings_that_differ, write_job
from launcher.sweep.prepare import place
from launcher.sweep.record import Record, refuse_differences
from launcher.sweep.search import OptunaSearch, RandomSearch, Search

REFUSED_IN_A_ROW = 20  # jobs that cannot be composed, after which the space is taken for a mistake


class Searching:
    """Implements the scheduler's `Plan`. `devices_of` checks a config and says how many devices it takes."""

    def __init__(
        self,
        request: Request,
        plan: Planned,
        record: Record,
        sample: Config,
        devices_of: Callable[[Config], int],
        pruner: Pruner | None,
    ) -> None:
        """`sample` is the config of any job. Raises ConfigError for the directory of another search."""
        self._request, self._plan, self._record = request, plan, record
        self._devices_of, self._pruner = devices_of, pruner
        self._jobs = record.jobs = [*record.jobs]
        self._trials = sample.sweep.stop.trials
        self._settings = tuple(line for line in request.overrides if is_setting(line))
        self._refuse_another_search()
        self._refuse_several_metrics()
        space = space_of(request.overrides)
        self._search: Search
        if sample.sweep.name == "tpe":
            self._search = OptunaSearch(space, sample.seed, plan.directory, record.jobs)
        else:
            self._search = RandomSearch(space, sample.seed, record.jobs)
        # What the carrier is asked about before a job is drawn: one drawn later has more results to go by.
        self._probe = Job(-1, "", (), nproc=devices_of(sample))
        self.has_room: Callable[[Job], bool] = lambda job: True

    def next(self) -> Job | None:
        waiting = next((job for job in self._jobs if job.state == WAITING), None)
        refused = 0
        while waiting is None and self._may_ask() and (lines := self._search.ask()) is not None:
            job = self._added(lines)
            if job.state == WAITING:
                return job
            refused += 1
            if refused == REFUSED_IN_A_ROW:
                raise ConfigError(f"{refused} jobs of the search in a row cannot run. The last: {job.error}")
        return waiting

    def ended(self, job: Job) -> None:
        """Raises ConfigError for a job that is compared by another metric than those before."""
        self._refuse_several_metrics()
        if job.state in OVER:
            self._search.tell(job)

    def to_prune(self, running: Iterable[Job]) -> Sequence[Job]:
        return [] if self._pruner is None else self._pruner.to_prune(running)

    def _may_ask(self) -> bool:
        more = self._trials is None or len(self._jobs) < self._trials
        return more and self.has_room(self._probe)

    def _added(self, lines: tuple[str, ...]) -> Job:
        """The job with these overrides, in the record: waiting, or failed where it cannot be composed."""
        number, directory = len(self._jobs), self._plan.directory
        job = Job(number, self._plan.name_of(number, lines), lines)
        if any(job.name == other.name for other in self._jobs):
            raise ConfigError(
                f"hydra.sweep.subdir: two jobs of the search would both have the directory {job.name}. Name "
                "each job differently, for instance with ${hydra.job.num}."
            )
        self._jobs.append(job)
        try:
            config = compose_one(self._plan.composer, (*lines, *self._settings))
            job.nproc = self._devices_of(config)
            made(directory / job.name)
            write_job(place(config, directory, job), lines)
        except ConfigError as error:
            job.state, job.exit, job.error = FAILED, error.exit_code, first_line(error)
            self._search.tell(job)
        # Before it starts: a process that continues the sweep must not draw another job with this number.
        self._record.write(directory)
        return job

    def _refuse_several_metrics(self) -> None:
        names = sorted({job.metric_name for job in self._jobs if job.metric_name})
        if len(names) > 1:
            raise ConfigError(
                f"the jobs of this search are compared by different metrics ({', '.join(names)}), and a "
                "search looks for the best of one. Search for each recipe and each data set by itself, or "
                "list all jobs as a grid: sweep=grid."
            )

    def _refuse_another_search(self) -> None:
        """Raise ConfigError unless the jobs of the record are of this space and this base config."""
        directory, jobs = self._plan.directory, self._record.jobs
        there, here = (
            {line for line in lines if not (is_setting(line) or line.startswith("hydra."))}
            for lines in (self._record.overrides, self._request.overrides)
        )
        found = [f"{line} is there and not here" for line in sorted(there - here)]
        found += [f"{line} is here and not there" for line in sorted(here - there)]
        first = next((job for job in jobs if (directory / job.name / "job.json").exists()), None)
        if first is not None and not found:
            config = compose_one(self._plan.composer, (*first.overrides, *self._settings))
            found = [
                f"{key} is {old!r} there and {new!r} here"
                for key, (old, new) in settings_that_differ(directory / first.name, config).items()
            ]
        refuse_differences(directory, found)


def pruner_of(directory: Path, sample: Config, jobs: Sequence[Job]) -> Pruner | None:
    """What `sweep.prune` names."""
    settings = sample.sweep
    return None if settings.prune == "none" else Pruner(directory, settings.patience, jobs)
