"""The jobs of a search: each is drawn when a device is free, composed and checked, and added to sweep.json.

Owns the draws, at random or by Optuna from the results so far, which depend on the seed and on the jobs in
sweep.json alone. A search that is continued after its parent was killed therefore asks for the same jobs as
one that was left alone. Only the sweep's process draws: jobs never import Optuna.
"""

from __future__ import annotations

import math
import random
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launcher.config.composition import Composer, Request
from launcher.config.resolve import compose_one, space_of
from launcher.config.schema import Config
from launcher.config.search_space import Choices, Dimension, Space, distribution, value_of
from launcher.errors import ConfigError, first_line
from launcher.run_dir.records import write_failure
from launcher.run_dir.result import Failure
from launcher.sweep.prepare import is_setting, job_name, place
from launcher.sweep.state import JobState, SweepJob, SweepState, write_job

if TYPE_CHECKING:
    from optuna.trial import FrozenTrial

DRAWS = 100  # for a job that differs from all before it; a space that yields none by then has hardly any left
DRAWS_OF_TPE = 10  # the same; where its few best points have all been tried, a random one is drawn


def drawn_at_random(space: Space, seed: int, jobs: Sequence[SweepJob]) -> tuple[str, ...] | None:
    """The overrides of the job after these, from the seed and its number; None where no point is left."""
    known = {tuple(job.overrides) for job in jobs}
    for draw in range(DRAWS):
        numbers = random.Random(f"{seed}/{len(jobs)}/{draw}")
        lines = space.overrides_of([each.sample(numbers.random()) for each in space.dimensions])
        if lines not in known:
            return lines
    return None


def drawn_by_tpe(space: Space, seed: int, jobs: Sequence[SweepJob]) -> tuple[str, ...] | None:
    """Draw what `drawn_at_random` does by Optuna's tree-structured Parzen estimator (Bergstra et al., 2011).

    `constant_liar` makes jobs that still run count as bad ones, so that those side by side differ.
    """
    optuna = imported_optuna()
    distributions = {each.key: distribution(each, optuna.distributions) for each in space.dimensions}
    trials = [_trial_of(job, space, distributions, optuna) for job in jobs]
    direction = "maximize" if any(job.higher_is_better for job in jobs) else "minimize"
    known = {tuple(job.overrides) for job in jobs}
    for draw in range(DRAWS_OF_TPE):
        of_sampler = random.Random(f"{seed}/{len(jobs)}/{draw}").getrandbits(32)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)  # constant_liar, in 4.9
            sampler = optuna.samplers.TPESampler(seed=of_sampler, constant_liar=True)
        study = optuna.create_study(direction=direction, sampler=sampler)
        study.add_trials(trials)
        params = study.ask(distributions).params
        lines = space.overrides_of([_written(each, params[each.key]) for each in space.dimensions])
        if lines not in known:
            return lines
    return drawn_at_random(space, seed, jobs)


def _trial_of(job: SweepJob, space: Space, distributions: Mapping[str, Any], optuna: Any) -> FrozenTrial:
    """The trial of a job, whether it runs or is over. One without a finite metric has failed."""
    states, values = optuna.trial.TrialState, dict(line.split("=", 1) for line in job.overrides)
    done = states.COMPLETE if job.metric is not None and math.isfinite(job.metric) else states.FAIL
    over: dict[str, object] = {
        JobState.DONE: done,
        JobState.PRUNED: states.PRUNED,
        JobState.FAILED: states.FAIL,
    }
    state = over.get(job.state, states.RUNNING)
    trial: FrozenTrial = optuna.trial.create_trial(
        params={each.key: value_of(each, values[each.key]) for each in space.dimensions},
        distributions=distributions,
        value=job.metric if state == states.COMPLETE else None,
        intermediate_values={1: job.metric} if state == states.PRUNED and job.metric is not None else {},
        state=state,
    )
    return trial


def _written(dimension: Dimension, value: Any) -> str:
    """A value of Optuna as it stands in an override."""
    return str(value) if isinstance(dimension, Choices) else dimension.written(value)


def imported_optuna() -> Any:
    """Raises ConfigError, with what to install, where it is absent."""
    try:
        import optuna
    except ImportError as error:
        install = "pip install 'fp16-launcher[sweep]', or pip install 'optuna>=4.9,<6'"
        words = "sweep=tpe and sweep.prune=asha need Optuna"
        raise ConfigError(f"{words}: {install}. sweep=random searches without it.") from error
    optuna.logging.set_verbosity(optuna.logging.ERROR)  # one line per trial would be printed twice
    return optuna


class Searching:
    """Adds jobs to the record. `devices_of` checks a config and says how many devices it takes."""

    def __init__(
        self,
        request: Request,
        directory: Path,
        record: SweepState,
        sample: Config,
        devices_of: Callable[[Config], int],
        has_capacity: Callable[[SweepJob], bool],
    ) -> None:
        """`sample` is the config of any job, `has_capacity` is the launcher's."""
        self._directory, self._record = directory, record
        self._devices_of, self._has_capacity = devices_of, has_capacity
        self._composer, self._space = Composer(request), space_of(request.overrides)
        self._jobs = record.jobs = [*record.jobs]
        self._settings = tuple(line for line in request.overrides if is_setting(line))
        self._draw = drawn_by_tpe if sample.sweep.name == "tpe" else drawn_at_random
        self._seed, self._trials = sample.seed, sample.sweep.stop.max_trials or math.inf
        # What the launcher is asked about before a job is drawn: one drawn later has more results to go by.
        self._probe = SweepJob(-1, "", (), nproc=devices_of(sample))

    def next(self) -> SweepJob | None:
        """A further job, in the record and with its folder; None if there is none now.

        It is waiting, or failed where it cannot be composed. Raises OSError, StorageError where its files
        cannot be written.
        """
        if len(self._jobs) >= self._trials or not self._has_capacity(self._probe):
            return None
        lines = self._draw(self._space, self._seed, self._jobs)
        return None if lines is None else self._added(lines)

    def _added(self, lines: tuple[str, ...]) -> SweepJob:
        """The job with these overrides, in the record: waiting, or failed where it cannot be composed."""
        number = len(self._jobs)
        job = SweepJob(number, job_name(self._space, number, lines), lines)
        self._jobs.append(job)
        try:
            (self._directory / job.name).mkdir(exist_ok=True)
            config = compose_one(self._composer, (*lines, *self._settings))
            job.nproc = self._devices_of(config)
            write_job(place(config, self._directory, job), lines)
        except ConfigError as error:
            job.state, job.exit, job.error = JobState.FAILED, error.exit_code, first_line(error)
            write_failure(self._directory / job.name, Failure.of(error))  # where reports and `watch` look
        # Before it starts: a process that continues the sweep must not draw another job with this number.
        self._record.write(self._directory)
        return job
