"""The jobs of a search: the next one is asked for when a device is free, and composed and checked then.

Owns how what a search draws becomes a job: its config, folder and place in sweep.json.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from launcher.config.composition import Composer, Request
from launcher.config.resolve import compose_one, space_of
from launcher.config.schema import Config
from launcher.errors import ConfigError, first_line
from launcher.run_dir.records import JOB
from launcher.sweep.job import FAILED, WAITING, Job, differences, write_job
from launcher.sweep.prepare import is_setting, job_name, made, place
from launcher.sweep.record import Record, refuse_differences
from launcher.sweep.search import drawn_at_random, drawn_by_tpe

REFUSED_IN_A_ROW = 20  # jobs that cannot be composed, after which the space is taken for a mistake


class Searching:
    """Adds jobs to the record. `devices_of` checks a config and says how many devices it takes."""

    def __init__(
        self,
        request: Request,
        directory: Path,
        record: Record,
        sample: Config,
        devices_of: Callable[[Config], int],
        has_room: Callable[[Job], bool],
    ) -> None:
        """`sample` is the config of any job, `has_room` is the carrier's.

        Raises ConfigError for the directory of another search.
        """
        self._request, self._directory, self._record = request, directory, record
        self._devices_of, self._has_room = devices_of, has_room
        self._composer = Composer(request)
        self._jobs = record.jobs = [*record.jobs]
        self._trials = sample.sweep.stop.trials
        self._settings = tuple(line for line in request.overrides if is_setting(line))
        self._refuse_another_search()
        self.refuse_several_metrics()
        self._space = space_of(request.overrides)
        self._draw = drawn_by_tpe if sample.sweep.name == "tpe" else drawn_at_random
        self._seed = sample.seed
        # What the carrier is asked about before a job is drawn: one drawn later has more results to go by.
        self._probe = Job(-1, "", (), nproc=devices_of(sample))

    def next(self) -> Job | None:
        """A further job, waiting, in the record and with its folder; None if there is none now."""
        for _ in range(REFUSED_IN_A_ROW):
            if not self._may_ask() or (lines := self._draw(self._space, self._seed, self._jobs)) is None:
                return None
            job = self._added(lines)
            if job.state == WAITING:
                return job
        raise ConfigError(f"{REFUSED_IN_A_ROW} jobs of the search in a row cannot run. The last: {job.error}")

    def _may_ask(self) -> bool:
        more = self._trials is None or len(self._jobs) < self._trials
        return more and self._has_room(self._probe)

    def _added(self, lines: tuple[str, ...]) -> Job:
        """The job with these overrides, in the record: waiting, or failed where it cannot be composed."""
        number = len(self._jobs)
        job = Job(number, job_name(self._space, number, lines), lines)
        self._jobs.append(job)
        try:
            config = compose_one(self._composer, (*lines, *self._settings))
            job.nproc = self._devices_of(config)
            made(self._directory / job.name)
            write_job(place(config, self._directory, job), lines)
        except ConfigError as error:
            job.state, job.exit, job.error = FAILED, error.exit_code, first_line(error)
        # Before it starts: a process that continues the sweep must not draw another job with this number.
        self._record.write(self._directory)
        return job

    def refuse_several_metrics(self) -> None:
        """Raise ConfigError unless all jobs that are over are compared by one metric."""
        names = sorted({job.metric_name for job in self._jobs if job.metric_name})
        if len(names) > 1:
            raise ConfigError(
                f"the jobs of this search are compared by different metrics ({', '.join(names)}), and a "
                "search looks for the best of one. Search for each recipe and each data set by itself, or "
                "list all jobs as a grid: sweep=grid."
            )

    def _refuse_another_search(self) -> None:
        """Raise ConfigError unless the jobs of the record are of this space and this base config."""
        there, here = (
            {line for line in lines if not (is_setting(line) or line.startswith("hydra."))}
            for lines in (self._record.overrides, self._request.overrides)
        )
        found = [f"{line} is there and not here" for line in sorted(there - here)]
        found += [f"{line} is here and not there" for line in sorted(here - there)]
        first = next((job for job in self._jobs if (self._directory / job.name / JOB).exists()), None)
        if first is not None and not found:
            config = compose_one(self._composer, (*first.overrides, *self._settings))
            found = differences(self._directory / first.name, config)
        refuse_differences(self._directory, found)
