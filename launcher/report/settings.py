"""Groups runs that differ only in the seed, and names what differs between the others.

Pure: records in, names and tables out.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from launcher.report.curve import mean_and_deviation
from launcher.report.run_record import RunRecord
from launcher.run_dir.result import Result
from launcher.telemetry.formatting import duration, metric, metric_title, number

REPEATED = "seed"  # the key whose values repeat a setting instead of making a new one
OF_EACH_RUN = ("run.", "tracker.", "launch.", "sweep.")  # sections that change no result
MAX_KEYS = 3  # in the name of a setting
NUM_COLORS = 8  # that page.css has
OfRun = Callable[[RunRecord], float | None]


@dataclass(frozen=True)
class RunGroup:
    """Runs that differ only in the seed."""

    label: str
    place: int  # among the settings
    runs: tuple[RunRecord, ...]
    names: tuple[str, ...]  # of the runs, distinct over all settings

    @property
    def color(self) -> int:
        return self.place % NUM_COLORS

    @property
    def done(self) -> list[RunRecord]:
        return [run for run in self.runs if run.state == "done"]

    @property
    def mean_metric(self) -> float | None:
        """Over the runs that are done; None where none has it, or where it is no number."""
        mean = self.mean(compared)
        return mean if mean is not None and math.isfinite(mean) else None

    def mean(self, of: OfRun) -> float | None:
        """Over the runs that are done and have the value."""
        values = [value for run in self.done if (value := of(run)) is not None]
        return statistics.fmean(values) if values else None

    @property
    def metric_name(self) -> str:
        """What its runs are compared by; "" if nothing was evaluated."""
        return compared_by(self.runs)

    def spread(self, of: OfRun, shown: Callable[[float], str]) -> str:
        """Mean and deviation over the runs that are done."""
        return mean_and_deviation([of(run) for run in self.done], shown)


def run_settings(runs: Sequence[RunRecord]) -> list[RunGroup]:
    """Group runs by setting, in the order of first runs. A run without a config is a setting by itself."""
    keys = [key for key in differing_keys(runs) if key != REPEATED]
    groups: dict[tuple[str, ...], list[RunRecord]] = {}
    for place, run in enumerate(runs):
        group = tuple(run.config.get(key, "-") for key in keys) if run.config else (f"\0{place}",)
        groups.setdefault(group, []).append(run)
    names = short_names(runs)
    return [
        RunGroup(
            _label(keys, values, [names[run.directory] for run in members]),
            place,
            tuple(members),
            tuple(names[run.directory] for run in members),
        )
        for place, (values, members) in enumerate(groups.items())
    ]


def can_choose(settings: Sequence[RunGroup]) -> bool:
    """Whether there are too many for one chart, so that one chooses whose curves are shown."""
    return len(settings) > NUM_COLORS


def differing_keys(runs: Sequence[RunRecord]) -> list[str]:
    """The config keys on which the runs differ."""
    keys = varied([run.config for run in runs if run.config])
    return [key for key in keys if not key.startswith(OF_EACH_RUN)]


def varied(values: Sequence[Mapping[str, str]]) -> list[str]:
    """The keys whose values differ, in the order of their first use."""
    keys = dict.fromkeys(key for each in values for key in each)
    return [key for key in keys if len({each.get(key) for each in values}) > 1]


def short_names(runs: Sequence[RunRecord]) -> dict[Path, str]:
    """A short name for each directory: the last part of its path, or as many parts as make it distinct."""
    paths = [run.directory.absolute() for run in runs]
    for length in range(1, max(len(path.parts) for path in paths) + 1):
        names = ["/".join(path.parts[-length:]) for path in paths]
        if len(set(names)) == len(set(paths)):
            break
    return {run.directory: name for run, name in zip(runs, names, strict=True)}


def difference_rows(runs: Sequence[RunRecord]) -> list[dict[str, str]]:
    """One row per run: the values of the keys that differ."""
    keys = differing_keys(runs)
    return [{key: run.config.get(key, "-") for key in keys} for run in runs]


def higher_is_better(results: Sequence[Result], metric_name: str) -> bool:
    """Whether the results compare by a metric of which more is better."""
    known = (each.higher_is_better for each in results if each.higher_is_better is not None)
    return next(known, not metric_name.endswith("loss"))


def compared(run: RunRecord) -> float | None:
    """What the run is compared by."""
    return run.metric if run.result.metric is None else run.result.metric


def compared_by(runs: Sequence[RunRecord]) -> str:
    """The name of the metric by which these runs are compared; "" if none was evaluated."""
    named = [run.result.metric_name for run in runs] + [run.metric_name for run in runs]
    return next((str(name) for name in named if name), "")


def metric_names(settings: Sequence[RunGroup]) -> list[str]:
    """The metrics by which the settings are compared: several where recipes or data sets differ in theirs."""
    return list(dict.fromkeys(setting.metric_name for setting in settings if setting.mean_metric is not None))


def best_first(settings: Sequence[RunGroup]) -> list[RunGroup]:
    """Sort by the mean metric, the settings of each metric by themselves.

    Settings without one are last, in the order in which they ran.
    """
    names = metric_names(settings)

    def rank(setting: RunGroup) -> tuple[int, float]:
        if setting.mean_metric is None:
            return len(names), 0.0
        name = setting.metric_name
        sign = -1.0 if higher_is_better([run.result for run in setting.runs], name) else 1.0
        return names.index(name), sign * setting.mean_metric

    return sorted(settings, key=rank)


def best_places(settings: Sequence[RunGroup]) -> list[int]:
    """The places of the best settings, as many as there are colours, the best first."""
    return [setting.place for setting in best_first(settings)[:NUM_COLORS]]


def setting_rows(settings: Sequence[RunGroup]) -> list[dict[str, str]]:
    """One row per setting: mean and deviation over its runs that are done; none where each has one run."""
    if all(len(setting.runs) < 2 for setting in settings):
        return []
    return [
        {
            "setting": setting.label,
            "runs done": f"{len(setting.done)} of {len(setting.runs)}",
            metric_column(settings): metric_cell(setting, settings),
            "loss, training": setting.spread(lambda run: run.recording.steps["loss"].last, number),
            "samples / s": setting.spread(lambda run: run.samples_per_s, number),
            "time": setting.spread(lambda run: run.seconds, duration),
        }
        for setting in settings
    ]


def metric_column(settings: Sequence[RunGroup]) -> str:
    """The title of the column of the metric by which the settings are compared."""
    names = metric_names(settings)
    return metric_title(names[0]) if len(names) == 1 else "metric"


def metric_cell(setting: RunGroup, settings: Sequence[RunGroup]) -> str:
    """Mean and deviation of the setting's metric, with its name where the settings have several."""
    name = setting.metric_name
    value = setting.spread(compared, partial(metric, name))
    has_name = setting.mean_metric is not None and len(metric_names(settings)) > 1
    return f"{metric_title(name)} {value}" if has_name else value


def _label(keys: Sequence[str], values: Sequence[str], names: Sequence[str]) -> str:
    if len(names) == 1:
        return names[0]
    if not keys or len(keys) > MAX_KEYS:
        return f"{names[0]} and {len(names) - 1} more"
    return ", ".join(f"{key}={value}" for key, value in zip(keys, values, strict=True))
