"""A search as `sweep.json` shows it: the best metric so far, the importance of keys, each trial drawn.

Reads the file alone, never the study. Optuna is imported where the importance is computed, and nowhere else.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from launcher.config.search_space import Choices, Dimension, distribution, value_of
from launcher.report.charts.chart import Axis, Chart, Line, axis_of, steps_axis
from launcher.report.charts.svg import markup
from launcher.report.html import grid, paragraph
from launcher.report.reading import sweep_of
from launcher.report.run_record import RunRecord
from launcher.telemetry.formatting import SHARES, metric, metric_title, middle_cut

SEARCHES = ("random", "tpe")  # values of sweep.name
COLORS = {"done": 0, "pruned": 4, "failed": 1}  # of a trial by its state; the metric of others may change
BEST_COLORS = (2, 5, 6)  # of the best trials, which are bold
MIN_FINISHED = 4  # trials; the importance from fewer is chance
# The importance says what makes a trial one of the best third. Optuna's own choice, the best tenth, would be
# two trials of a search with 20, and named the wrong key of a made problem more often (2 of 8 against none).
BEST_SHARE = 1 / 3
MAX_LABELS, MAX_LABEL = 12, 20  # choices that are named at an axis; characters


@dataclass(frozen=True)
class Trial:
    """A job that has ended. Without a finite metric it counts as failed."""

    number: int
    state: str
    texts: Sequence[str]  # its values as they stand in its overrides, by dimension
    places: Sequence[float]  # the same as numbers; of a choice, how many are before it
    metric: float  # of a pruned one, that of the evaluation that decided; NaN if it failed


@dataclass(frozen=True)
class Search:
    """The trials in the order in which they were drawn, and the space."""

    dimensions: Sequence[Dimension]
    trials: Sequence[Trial]
    metric_name: str
    higher_is_better: bool

    @classmethod
    def read(cls, sweep_dir: Path, runs: Sequence[RunRecord]) -> Search | None:
        """The search whose jobs these runs are; None for a grid, or where sweep.json cannot be read."""
        if not any(run.config.get("sweep.name") in SEARCHES for run in runs):
            return None
        from hydra.errors import HydraException

        from launcher.config.resolve import space_of

        try:
            record = sweep_of(sweep_dir)
            dimensions = space_of(record["overrides"]).dimensions
            jobs = [job for job in record["jobs"] if job.get("state") in COLORS]
            trials = [_trial(job, dimensions) for job in jobs]
        except (ValueError, KeyError, TypeError, AttributeError, HydraException):
            return None
        named: dict[str, Any] = next((job for job in jobs if job.get("metric_name")), {})
        return cls(
            dimensions, trials, named.get("metric_name", "metric"), bool(named.get("higher_is_better"))
        )

    @property
    def best_first(self) -> list[Trial]:
        """The trials that finished."""
        finished = [trial for trial in self.trials if trial.state == "done"]
        return sorted(finished, key=lambda trial: trial.metric, reverse=self.higher_is_better)

    @property
    def in_percent(self) -> bool:
        return self.metric_name.endswith(SHARES)

    def importance(self) -> dict[str, float] | str:
        """The share of each key in what makes a trial good, the largest first; or why there is none.

        PED-ANOVA (Watanabe et al., 2023): it depends on the order of the metrics alone, so a trial that
        diverged counts no more than any other bad one.
        """
        trials = self.best_first
        if len(trials) < MIN_FINISHED:
            return f"Parameter importance needs {MIN_FINISHED} finished trials. There are {len(trials)}."
        if trials[0].metric == trials[-1].metric:
            return "There is no parameter importance: all finished trials have the same metric."
        try:
            import optuna
        except ImportError:
            return "Parameter importance needs Optuna: pip install 'fp16-launcher[sweep]'."
        optuna.logging.set_verbosity(optuna.logging.ERROR)  # it prints a line for the study
        spaces = {each.key: distribution(each, optuna.distributions) for each in self.dimensions}
        study = optuna.create_study(direction="maximize" if self.higher_is_better else "minimize")
        for trial in trials:
            params = dict(zip(spaces, map(value_of, self.dimensions, trial.texts), strict=True))
            study.add_trial(optuna.create_trial(params=params, distributions=spaces, value=trial.metric))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)  # in 4.9
            evaluator = optuna.importance.PedAnovaImportanceEvaluator(target_quantile=BEST_SHARE)
        return dict(optuna.importance.get_param_importances(study, evaluator=evaluator))


def search_part(search: Search) -> str:
    """The charts of a page."""
    shares = search.importance()
    if isinstance(shares, str):
        first = grid([markup(history(search))]) + paragraph(shares, "note")
    else:
        first = grid(map(markup, (history(search), importance_chart(shares, len(search.best_first)))))
    return first + markup(parallel_coordinates(search))


def history(search: Search) -> Chart:
    """The metric of each trial in the order in which they were drawn, and the best so far."""
    lines, last = [], max((trial.number for trial in search.trials), default=0)
    for state in ("done", "pruned"):
        trials = [trial for trial in search.trials if trial.state == state]
        x = np.array([trial.number for trial in trials], np.float64)
        y = np.array([trial.metric for trial in trials]) * (100 if search.in_percent else 1)
        if state == "done" and trials:
            best = (np.maximum if search.higher_is_better else np.minimum).accumulate(y)
            reached = np.append(x, last), np.append(best, best[-1])
            lines.append(Line("best so far", BEST_COLORS[0], *reached, "steps"))
        lines.append(Line(state, COLORS[state], x, y, "dots"))
    marks = [(float(trial.number), "failed") for trial in search.trials if trial.state == "failed"]
    note = "Dashed lines: trials that failed, or ended without a finite metric." if marks else ""
    title, unit = metric_title(search.metric_name), "%" if search.in_percent else ""
    y_axis = axis_of(np.concatenate([line.y for line in lines]), 1 if search.in_percent else None)
    title = f"{title[:1].upper()}{title[1:]} of each trial"
    return Chart(title, unit, lines, steps_axis(last + 0.5, -0.5), y_axis, "trial", marks, note)


def importance_chart(shares: Mapping[str, float], num_finished: int) -> Chart:
    """A bar for each key."""
    values = 100 * np.array(list(shares.values()))
    bars = Line("importance", 0, np.arange(float(values.size)), values, "bars")
    note = (
        f"What makes a trial one of the best third of {num_finished} (PED-ANOVA). From few it may be chance."
    )
    x, y = Axis(-0.1, float(values.size)), axis_of(values, from_zero=True)
    return Chart("Parameter importance", "%", [bars], x, y, "key", note=note, names=tuple(shares))


def parallel_coordinates(search: Search) -> Chart:
    """A line for each trial over the searched keys and the metric, each on a scale between 0 and 1."""
    best = {trial.number: color for trial, color in zip(search.best_first, BEST_COLORS, strict=False)}
    measured = np.array([trial.metric for trial in search.trials if trial.state != "failed"])
    of_metric = axis_of(measured, 1 if search.in_percent else None)
    scaled = [*map(_scale, search.dimensions), (of_metric, of_metric.ticks())]

    def line(trial: Trial) -> Line:
        texts, places = [*trial.texts], [*trial.places]
        if trial.state != "failed":
            texts, places = [*texts, metric(search.metric_name, trial.metric)], [*places, trial.metric]
        y = np.array([axis.place(value) for (axis, _), value in zip(scaled, places, strict=False)])
        style = "line" if trial.number in best else "faint"
        color = best.get(trial.number, COLORS[trial.state])
        return Line(f"trial {trial.number}", color, np.arange(float(y.size)), y, style, texts=texts)

    lines = [line(trial) for trial in search.trials if trial.number not in best]
    lines += map(line, search.best_first[: len(BEST_COLORS)])
    scales = [[(axis.place(value), text) for value, text in ticks] for axis, ticks in scaled]
    note = "Bold: the best trials. The line of a trial without a finite metric ends before the last axis."
    names = [*(each.key for each in search.dimensions), metric_title(search.metric_name)]
    x, y = Axis(0.0, float(len(search.dimensions))), Axis(0.0, 1.0)
    return Chart("Trials", "", lines, x, y, "key", note=note, names=names, scales=scales)


def _scale(dimension: Dimension) -> tuple[Axis, Sequence[tuple[float, str]]]:
    """The axis and its labels, of many choices some."""
    if not isinstance(dimension, Choices):
        axis = Axis(dimension.low, dimension.high, 10 if dimension.log else 1)
        return axis, axis.ticks()
    axis = axis_of(np.array([_place(dimension, text) for text in dimension.values]), 1)
    shown = dimension.values[:: 1 + len(dimension.values) // MAX_LABELS]
    return axis, [(_place(dimension, text), middle_cut(text, MAX_LABEL)) for text in shown]


def _trial(job: Mapping[str, Any], dimensions: Sequence[Dimension]) -> Trial:
    given = dict(line.split("=", 1) for line in job["overrides"])
    texts = [given[each.key] for each in dimensions]
    places = list(map(_place, dimensions, texts))
    value = math.nan if job["state"] == "failed" else float(job.get("metric", math.nan))
    state = job["state"] if math.isfinite(value) else "failed"
    return Trial(int(job["number"]), state, texts, places, value if math.isfinite(value) else math.nan)


def _place(dimension: Dimension, text: str) -> float:
    if isinstance(dimension, Choices) and not dimension.ordered:
        return float(dimension.values.index(text))
    return float(value_of(dimension, text))
