"""Where the jobs of a search come from: drawn at random, or by Optuna from the results so far.

Owns the draws, which depend on the seed and on the jobs in sweep.json alone. A search that is continued after
its parent was killed therefore asks for the same jobs as one that was left alone. Only the sweep's process
draws: jobs never import Optuna.
"""

from __future__ import annotations

import math
import random
import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from launcher.config.search_space import Choices, Dimension, Space, distribution, value_of
from launcher.errors import ConfigError
from launcher.sweep.job import DONE, FAILED, PRUNED, Job

if TYPE_CHECKING:
    from optuna.trial import FrozenTrial

DRAWS = 100  # for a job that differs from all before it; a space that yields none by then has hardly any left
DRAWS_OF_TPE = 10  # the same; where its few best points have all been tried, a random one is drawn


def drawn_at_random(space: Space, seed: int, jobs: Sequence[Job]) -> tuple[str, ...] | None:
    """The overrides of the job after these, from the seed and its number; None where no point is left."""
    known = {tuple(job.overrides) for job in jobs}
    for draw in range(DRAWS):
        numbers = random.Random(f"{seed}/{len(jobs)}/{draw}")
        lines = space.at([each.at(numbers.random()) for each in space.dimensions])
        if lines not in known:
            return lines
    return None


def drawn_by_tpe(space: Space, seed: int, jobs: Sequence[Job]) -> tuple[str, ...] | None:
    """As `drawn_at_random`, by Optuna's tree-structured Parzen estimator (Bergstra et al., 2011).

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
        lines = space.at([_written(each, params[each.key]) for each in space.dimensions])
        if lines not in known:
            return lines
    return drawn_at_random(space, seed, jobs)


def _trial_of(job: Job, space: Space, distributions: Mapping[str, Any], optuna: Any) -> FrozenTrial:
    """The trial of a job, whether it runs or is over. One without a finite metric has failed."""
    states, values = optuna.trial.TrialState, dict(line.split("=", 1) for line in job.overrides)
    done = states.COMPLETE if job.metric is not None and math.isfinite(job.metric) else states.FAIL
    state = {DONE: done, PRUNED: states.PRUNED, FAILED: states.FAIL}.get(job.state, states.RUNNING)
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
