"""Where the jobs of a search come from: drawn at random, or by Optuna from the results so far.

Owns the draws, which depend on the seed, the job's number and the results before it alone. A search that is
continued after its parent was killed therefore asks for the same jobs as one that was left alone. Only this
process draws: jobs never import Optuna. What runs is decided by sweep.json; the study is written from it.
"""

from __future__ import annotations

import math
import random
import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from launcher.config.search_space import Choices, Dimension, Space, distribution, value_of
from launcher.errors import ConfigError, StorageError
from launcher.sweep.job import DONE, FAILED, OVER, PRUNED, Job

if TYPE_CHECKING:
    from optuna import Study, Trial
    from optuna.trial import FrozenTrial, TrialState

STUDY, STUDY_NAME = "study.journal", "sweep"  # the file in the sweep's folder, and the study in it
OF_OPTUNA = (STUDY, f"{STUDY}.lock")
DRAWS = 100  # for a job that differs from all before it; a space that yields none by then has hardly any left
DRAWS_OF_TPE = 10  # the same; where its few best points have all been tried, a random one is drawn


class RandomSearch:
    """Independent draws, each from the seed and the number of the job, which counts the calls of `ask`."""

    def __init__(self, space: Space, seed: int, jobs: Sequence[Job]) -> None:
        """`jobs` are those that sweep.json has, in order."""
        self._space, self._seed = space, seed
        self._seen = {tuple(job.overrides): job.number for job in jobs}

    def ask(self) -> tuple[str, ...] | None:
        """The overrides of the next job; None where the space has no further point."""
        for draw in range(DRAWS):
            numbers = random.Random(f"{self._seed}/{len(self._seen)}/{draw}")
            lines = self._space.at([each.at(numbers.random()) for each in self._space.dimensions])
            if self.is_new(lines):
                return self.take(lines)
        return None

    def take(self, lines: tuple[str, ...]) -> tuple[str, ...]:
        """Make these lines the next job."""
        self._seen[lines] = len(self._seen)
        return lines

    def is_new(self, lines: tuple[str, ...]) -> bool:
        """Whether no job has had these lines yet."""
        return lines not in self._seen

    def tell(self, job: Job) -> None:
        """Results teach nothing."""


class OptunaSearch:
    """Optuna's tree-structured Parzen estimator (Bergstra et al., 2011), asked and told in this process.

    `constant_liar` makes jobs that still run count as bad ones, so that those side by side differ.
    The study is in a journal in the sweep's folder, where Optuna's own tools read it.
    """

    def __init__(self, space: Space, seed: int, directory: Path, jobs: Sequence[Job]) -> None:
        """`jobs` are those that sweep.json has, in order. The caller holds the lock of the sweep's folder."""
        self._space, self._seed, self._directory = space, seed, directory
        self._optuna = imported_optuna()
        self._distributions = {
            each.key: distribution(each, self._optuna.distributions) for each in space.dimensions
        }
        self._drawn = RandomSearch(space, seed, jobs)
        self._jobs = [replace(job) for job in jobs]  # as they were told, whatever the caller makes of them
        self._trials: dict[int, Trial] = {}  # that run, by the job's number
        self._write()

    def ask(self) -> tuple[str, ...] | None:
        """As that of RandomSearch."""
        drawn = (self._draw(draw) for draw in range(DRAWS_OF_TPE))
        lines = next(filter(self._drawn.is_new, drawn), None)
        lines = self._drawn.ask() if lines is None else self._drawn.take(lines)
        if lines is not None:
            job = Job(len(self._jobs), "", lines)
            self._jobs.append(job)
            self._run(job)
        return lines

    def tell(self, job: Job) -> None:
        """Report a job that is done, pruned or failed for good."""
        before = self._direction
        self._jobs[job.number] = job = replace(job)
        trial = self._trials.pop(job.number)
        if self._direction != before:  # the first result says whether higher is better
            self._write()
            return
        if job.state == PRUNED and job.metric is not None:
            trial.report(job.metric, step=1)
        state = self._state(job)
        self._study.tell(trial, self._value(job), state)

    def _draw(self, draw: int) -> tuple[str, ...]:
        """The sampler's choice, from a copy of the study in memory: the study then gets what is run.

        It is rounded, so that a study that is written from sweep.json again leads to the same draws.
        """
        optuna = self._optuna
        seed = random.Random(f"{self._seed}/{len(self._jobs)}/{draw}").getrandbits(32)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)  # constant_liar, in 4.9
            sampler = optuna.samplers.TPESampler(seed=seed, constant_liar=True)
        draft = optuna.create_study(direction=self._direction, sampler=sampler)
        draft.add_trials(map(self._frozen, self._jobs))
        params = draft.ask(self._distributions).params
        return self._space.at([_written(each, params[each.key]) for each in self._space.dimensions])

    def _write(self) -> None:
        """Write the study anew, as the jobs are known: no state of a killed parent can contradict them.

        That includes Optuna's lock, for which it would wait 30 s, and a last line that is not whole.
        """
        optuna, journal = self._optuna, self._optuna.storages.journal
        try:
            for name in OF_OPTUNA:
                (self._directory / name).unlink(missing_ok=True)
            backend = journal.JournalFileBackend(str(self._directory / STUDY))
            self._study: Study = optuna.create_study(
                storage=optuna.storages.JournalStorage(backend),
                study_name=STUDY_NAME,
                direction=self._direction,
                sampler=optuna.samplers.RandomSampler(),  # draws nothing: `_draw` does
            )
            for job in self._jobs:
                if job.state in OVER:
                    self._study.add_trial(self._frozen(job))
                else:
                    self._run(job)
        except OSError as error:
            raise StorageError(
                f"{self._directory / STUDY}: the study cannot be written: {error.strerror}."
            ) from error

    @property
    def _direction(self) -> str:
        return "maximize" if any(job.higher_is_better for job in self._jobs) else "minimize"

    def _run(self, job: Job) -> None:
        """Add a trial that runs to the study."""
        self._study.enqueue_trial(self._params(job))
        self._trials[job.number] = self._study.ask(self._distributions)

    def _frozen(self, job: Job) -> FrozenTrial:
        """The trial of a job, whether it runs or is over."""
        pruned = job.state == PRUNED and job.metric is not None
        frozen: FrozenTrial = self._optuna.trial.create_trial(
            params=self._params(job),
            distributions=self._distributions,
            value=self._value(job),
            intermediate_values={1: job.metric} if pruned else {},
            state=self._state(job),
        )
        return frozen

    def _value(self, job: Job) -> float | None:
        """The value of a trial that counts. To Optuna, a job without a finite metric has failed."""
        return job.metric if self._state(job) == self._optuna.trial.TrialState.COMPLETE else None

    def _state(self, job: Job) -> TrialState:
        states = self._optuna.trial.TrialState
        has_value = job.metric is not None and math.isfinite(job.metric)
        done = states.COMPLETE if has_value else states.FAIL
        known = {DONE: done, PRUNED: states.PRUNED, FAILED: states.FAIL}
        return cast("TrialState", known.get(job.state, states.RUNNING))

    def _params(self, job: Job) -> dict[str, Any]:
        values = dict(line.split("=", 1) for line in job.overrides)
        return {each.key: value_of(each, values[each.key]) for each in self._space.dimensions}


def _written(dimension: Dimension, value: Any) -> str:
    """A value of Optuna as it stands in an override."""
    if not isinstance(dimension, Choices):
        return dimension.written(value)
    if not dimension.ordered:
        return str(value)
    return min(dimension.values, key=lambda each: abs(float(each) - value))


def imported_optuna() -> Any:
    """Raises ConfigError, with what to install, where it is absent."""
    try:
        import optuna
    except ImportError as error:
        raise ConfigError(
            "sweep=tpe needs Optuna: pip install 'fp16-launcher[sweep]', or pip install 'optuna>=4.9,<6'. "
            "sweep=random searches without it."
        ) from error
    optuna.logging.set_verbosity(optuna.logging.ERROR)  # one line per trial would be printed twice
    return optuna
