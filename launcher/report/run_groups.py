"""Groups runs that differ only in the seed, and names what differs between the others.

Pure: records in, names and tables out.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from pathlib import Path

from launcher.report.run import Run
from launcher.run_dir.result import Result
from launcher.telemetry.formatting import duration, metric, metric_title, number

REPEATED = "seed"  # the key whose values repeat a setting instead of making a new one
OF_EACH_RUN = ("run", "tracker", "sweep")  # sections that change no result
MAX_KEYS = 3  # in the name of a setting
NUM_COLORS = 8  # that page.css has
OfRun = Callable[[Run], float | None]


@dataclass(frozen=True)
class RunGroup:
    """Runs that differ only in the seed."""

    label: str
    place: int  # among the groups
    runs: tuple[Run, ...]

    @property
    def done(self) -> list[Run]:
        return [run for run in self.runs if run.state == "done"]

    @property
    def mean_metric(self) -> float | None:
        """Over the runs that are done; None where none has it, or where it is no number."""
        mean = self.mean(attrgetter("metric"))
        return mean if mean is not None and math.isfinite(mean) else None

    def mean(self, of: OfRun) -> float | None:
        """Over the runs that are done and have the value."""
        values = [value for run in self.done if (value := of(run)) is not None]
        return statistics.fmean(values) if values else None

    @property
    def metric_name(self) -> str:
        """What its runs are compared by; "" if nothing was evaluated."""
        return compared_by(self.runs)

    def mean_std(self, of: OfRun, shown: Callable[[float], str]) -> str:
        """Mean ± standard deviation over the runs that are done; a dash where none has the value."""
        known = [value for run in self.done if (value := of(run)) is not None]
        if len(known) < 2:
            return shown(known[0]) if known else "-"
        return f"{shown(statistics.fmean(known))} ± {shown(statistics.stdev(known))}"


def grouped(runs: Sequence[Run]) -> list[RunGroup]:
    """Runs with the same overrides but for the seed, in the order of the first runs."""
    keys, names = [key for key in varied_keys(runs) if key != REPEATED], short_names(runs)
    groups: dict[tuple[str, ...], list[Run]] = {}
    for run in runs:
        groups.setdefault(tuple(value_of(run, key) for key in keys), []).append(run)
    return [
        RunGroup(_label(keys, values, [names[run.directory] for run in members]), place, tuple(members))
        for place, (values, members) in enumerate(groups.items())
    ]


def _label(keys: Sequence[str], values: Sequence[str], names: Sequence[str]) -> str:
    if not keys or len(keys) > MAX_KEYS:
        return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more" if keys else "all"
    if len(keys) == 1 and "." not in keys[0]:  # such as of precision=fp16: it says what it is
        return values[0]
    return ", ".join(f"{key}={value}" for key, value in zip(keys, values, strict=True))


def value_of(run: Run, key: str) -> str:
    """The value of a key that some run has set: its own, else that of its config."""
    return run.overrides.get(key) or run.config.get(key, "-")


def varied_keys(runs: Sequence[Run]) -> list[str]:
    """The keys whose values differ between runs: those that were overridden, and those of edited files."""
    keys = dict.fromkeys(key for run in runs for key in run.overrides)
    found = [key for key in keys if _may_vary(key) and len({value_of(run, key) for run in runs}) > 1]
    return [*found, *_edited_keys(runs, found)]


def _edited_keys(runs: Sequence[Run], keys: Sequence[str]) -> list[str]:
    """What differs in the configs of runs with equal overrides: files that were edited in between."""
    of_setting: dict[tuple[str, ...], list[Run]] = {}
    for run in runs:
        if run.config:
            of_setting.setdefault(tuple(value_of(run, key) for key in keys if key != REPEATED), []).append(
                run
            )
    found: dict[str, None] = {}
    for members in of_setting.values():
        found |= dict.fromkeys(varied([run.config for run in members]))
    return [key for key in found if key != REPEATED and _may_vary(key)]


def _may_vary(key: str) -> bool:
    return key.partition(".")[0] not in OF_EACH_RUN


def varied(values: Sequence[Mapping[str, str]]) -> list[str]:
    """The keys whose values differ, in the order of their first use."""
    keys = dict.fromkeys(key for each in values for key in each)
    return [key for key in keys if len({each.get(key) for each in values}) > 1]


def short_names(runs: Sequence[Run]) -> dict[Path, str]:
    """A short name for each directory: the last part of its path, or as many parts as make it distinct."""
    paths = [run.directory.absolute() for run in runs]
    for length in range(1, max(len(path.parts) for path in paths) + 1):
        names = ["/".join(path.parts[-length:]) for path in paths]
        if len(set(names)) == len(set(paths)):
            break
    return {run.directory: name for run, name in zip(runs, names, strict=True)}


def higher_is_better(results: Sequence[Result], metric_name: str) -> bool:
    """Whether the results compare by a metric of which more is better."""
    known = (each.higher_is_better for each in results if each.higher_is_better is not None)
    return next(known, not metric_name.endswith("loss"))


def compared_by(runs: Sequence[Run]) -> str:
    """The name of the metric by which these runs are compared; "" if none was evaluated."""
    return next((name for run in runs if (name := run.metric_name)), "")


def best_first(groups: Sequence[RunGroup]) -> list[RunGroup]:
    """Sort by the mean metric. Groups without it are last, in the order in which they ran."""
    name = compared_by([run for group in groups for run in group.runs])

    def rank(group: RunGroup) -> tuple[bool, float]:
        if group.mean_metric is None or group.metric_name != name:
            return True, 0.0
        sign = -1.0 if higher_is_better([run.result for run in group.runs], name) else 1.0
        return False, sign * group.mean_metric

    return sorted(groups, key=rank)


def group_rows(groups: Sequence[RunGroup]) -> list[dict[str, str]]:
    """One row per group: mean and deviation over its runs that are done."""
    name = compared_by([run for group in groups for run in group.runs])
    return [
        {
            "setting": group.label,
            "runs": ended(group),
            metric_title(name) or "metric": metric_cell(group, name),
            "val_loss": group.mean_std(lambda run: run.result.metrics.get("val_loss"), number),
            "train_loss": group.mean_std(lambda run: run.history.steps["loss"].last, number),
            "skipped steps": number(sum(run.result.skipped_steps or 0 for run in group.done))
            if group.done
            else "-",
            "time": duration(group.mean(lambda run: run.result.training_seconds)),
        }
        for group in groups
    ]


def ended(group: RunGroup) -> str:
    done, runs = len(group.done), len(group.runs)
    return f"{runs}" if done == runs else f"{done} of {runs} done"


def metric_cell(group: RunGroup, name: str) -> str:
    """Mean and deviation of the group's metric, with its name where that is not `name`."""
    value = group.mean_std(attrgetter("metric"), partial(metric, group.metric_name))
    has_name = group.mean_metric is not None and group.metric_name != name
    return f"{metric_title(group.metric_name)} {value}" if has_name else value
