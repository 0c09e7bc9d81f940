"""Comparison of the runs of a sweep: one plot of their curves, and a table.

Owns the grouping of runs (those that differ only in the seed) and the files comparison.png, summary.md,
summary.csv and, for runs in several precisions, side_by_side.md. Reads only the files of the runs, one after
the other in bounded memory, and accepts missing ones.
"""

from __future__ import annotations

import csv
import io
import math
import shlex
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from launcher.config.groups import choice_file, conf_dir, description, group_choices, natural_order
from launcher.config.messages import program
from launcher.report.pictures import draw_comparison
from launcher.report.run_record import MARKS, RunRecord, is_run, overrides_of
from launcher.report.settings import REPEATED, RunSetting, higher_is_better
from launcher.report.side_by_side import Measured, Side, measured, side_by_side
from launcher.run_dir.atomic import write_text
from launcher.run_dir.result import Result
from launcher.telemetry.formatting import duration, markdown_row, markdown_text, metric, metric_title, number

COMPARISON, TABLE, ROWS = "comparison.png", "summary.md", "summary.csv"
SIDE_BY_SIDE = "side_by_side.md"
RESULT_KEYS = (
    "state",
    "metric_name",
    "metric",
    "steps",
    "skipped_steps",
    "seconds",
    "training_seconds",
    "samples_per_s",
)


@dataclass(frozen=True)
class Job:
    """One run of a sweep, finished or not."""

    run: RunRecord
    result: Result  # with the state that the run's other files say
    measured: Measured

    @property
    def overrides(self) -> dict[str, str]:
        return self.run.overrides


@dataclass(frozen=True)
class Setting:
    """The jobs that differ only in the seed."""

    label: str
    jobs: tuple[Job, ...]


def is_sweep(directory: Path) -> bool:
    """Whether this is a folder of runs rather than a run."""
    return not is_run(directory) and bool(job_directories(directory))


def job_directories(sweep_dir: Path) -> list[Path]:
    """The runs in the folder, also those that failed before their first event."""
    found = {file.parent for mark in MARKS for file in sweep_dir.glob(f"*/{mark}")}
    return sorted(found, key=lambda path: (not path.name.split("_")[0].isdigit(), natural_order(path.name)))


def write_comparison(sweep_dir: Path, runs: Sequence[RunRecord]) -> list[Path]:
    """Write picture and tables of these runs to the sweep's directory. Raises OSError."""
    jobs = [job_of(run) for run in runs]
    settings = settings_of(jobs)
    table, rows, picture = (sweep_dir / name for name in (TABLE, ROWS, COMPARISON))
    write_text(table, markdown(sweep_dir.name, settings, note_of(jobs)))
    write_text(rows, as_csv(jobs))
    drawn = [
        RunSetting(s.label, place, tuple(job.run for job in s.jobs), tuple(s.label for _ in s.jobs))
        for place, s in enumerate(settings)
    ]
    written = [draw_comparison(drawn, metric_name_of(settings), picture), table, rows]
    if of_precisions(jobs):
        sides = [Side(s.label, tuple(job.measured for job in s.jobs)) for s in settings]
        written.append(sweep_dir / SIDE_BY_SIDE)
        write_text(written[-1], side_by_side(sweep_dir.name, sides))
    return written


def job_of(run: RunRecord) -> Job:
    config = config_of(run)
    result = replace(run.result, state=run.state)
    seed = run.overrides.get(REPEATED) or str(config.get(REPEATED, "-"))
    words = tuple(f"{key}={value}" for key, value in run.overrides.items())
    return Job(run, result, measured(seed, result, run.recording, config, words))


def settings_of(jobs: Sequence[Job]) -> list[Setting]:
    """Jobs grouped by their settings, in the order in which they ran."""
    keys = [key for key in varied_keys(jobs) if key != REPEATED]
    groups: dict[str, list[Job]] = {}
    for job in jobs:
        values = [job.overrides.get(key, "-") for key in keys]
        named = values if len(keys) == 1 else [f"{k}={v}" for k, v in zip(keys, values, strict=True)]
        groups.setdefault(", ".join(named) or "all", []).append(job)
    return [Setting(label, tuple(members)) for label, members in groups.items()]


def of_precisions(jobs: Sequence[Job]) -> bool:
    """Whether these jobs differ in their precision, and in nothing else but the seed."""
    return _only_precision([job.overrides for job in jobs])


def compares_precisions(directories: Sequence[Path]) -> bool:
    """`of_precisions` of the runs in these directories. Raises OSError."""
    return _only_precision([overrides_of(directory) for directory in directories])


def _only_precision(overrides: Sequence[Mapping[str, str]]) -> bool:
    varied = _varied(overrides)
    return "precision" in varied and set(varied) <= {"precision", REPEATED}


def config_of(run: RunRecord) -> dict[str, Any]:
    """The run's config.yaml as a tree; empty where it cannot be read."""
    import yaml

    try:
        tree = yaml.safe_load(run.config_text)
    except (ValueError, RecursionError, yaml.YAMLError):
        return {}
    return tree if isinstance(tree, dict) else {}


def varied_keys(jobs: Sequence[Job]) -> list[str]:
    """The overridden keys whose values differ between jobs."""
    return _varied([job.overrides for job in jobs])


def _varied(overrides: Sequence[Mapping[str, str]]) -> list[str]:
    keys = dict.fromkeys(key for of_job in overrides for key in of_job)
    return [key for key in keys if len({of_job.get(key) for of_job in overrides}) > 1]


def note_of(jobs: Sequence[Job]) -> str:
    """The description of the experiment of these jobs; empty without one."""
    names = {job.overrides.get("experiment", "") for job in jobs}
    known = group_choices(conf_dir()).get("experiment", ())
    if len(names) != 1 or not names <= set(known):
        return ""
    return description(choice_file([conf_dir()], "experiment", names.pop()))


def markdown(title: str, settings: Sequence[Setting], note: str) -> str:
    """One row per setting: mean and standard deviation over its seeds."""
    name = metric_name_of(settings)
    lines = [f"# {markdown_text(title)}", "", *([note, ""] if note else [])]
    varied = [key for key in varied_keys([job for s in settings for job in s.jobs]) if key != REPEATED]
    of_rows = varied[0] if len(varied) == 1 else "setting"
    title = metric_title(name) or "metric"
    head = [of_rows, "runs", title, "loss, held out", "training loss, last", "skipped steps", "time"]
    lines += [markdown_row(head), f"|{' --- |' * len(head)}"]
    ranked = best_first(settings, name)
    lines += [markdown_row(cells(setting, name)) for setting in ranked]
    lines += ["", "Mean ± standard deviation over the seeds; the best first.", ""]
    if len(ranked) > 1 and mean_metric(ranked[0]) is not None:
        lines += [f"Best: `{command_of(ranked[0])}`", ""]
    return "\n".join([*lines, f"![curves]({COMPARISON})", ""])


def best_first(settings: Sequence[Setting], metric_name: str) -> list[Setting]:
    """By the mean of what the runs are compared by; those without it are last, in the order they ran."""
    results = [job.result for setting in settings for job in setting.jobs]
    sign = -1.0 if higher_is_better(results, metric_name) else 1.0
    means = {setting.label: mean_metric(setting) for setting in settings}
    return sorted(settings, key=lambda each: math.inf if (mean := means[each.label]) is None else sign * mean)


def mean_metric(setting: Setting) -> float | None:
    """Over the jobs that are done; None where none has it, or where it is no number."""
    done = [job.result.metric for job in setting.jobs if job.result.state == "done"]
    numbers = [value for value in done if value is not None]
    mean = statistics.fmean(numbers) if numbers else math.nan
    return mean if math.isfinite(mean) else None


def command_of(setting: Setting) -> str:
    """What runs this setting alone, without the seed."""
    given = setting.jobs[0].overrides.items()
    return f"{program()} {shlex.join(f'{key}={value}' for key, value in given if key != REPEATED)}"


def cells(setting: Setting, metric_name: str) -> list[str]:
    done = [job for job in setting.jobs if job.result.state == "done"]
    ended = f"{len(done)}" if len(done) == len(setting.jobs) else f"{len(done)} of {len(setting.jobs)} done"
    values = [job.result.metric for job in done if job.result.metric is not None]
    losses = [loss for job in done if (loss := job.run.recording.steps["loss"].last) is not None]
    seconds = [value for job in done if (value := job.result.training_seconds) is not None]
    return [
        setting.label,
        ended,
        spread(values, lambda value: metric(metric_name, value)),
        spread([job.measured.loss for job in done if job.measured.loss is not None], number),
        spread(losses, number),
        number(sum(job.result.skipped_steps or 0 for job in done)) if done else "-",
        duration(statistics.fmean(seconds)) if seconds else "-",
    ]


def spread(values: Sequence[float], shown: Any) -> str:
    if not values:
        return "-"
    if len(values) == 1:
        return str(shown(values[0]))
    return f"{shown(statistics.fmean(values))} ± {shown(statistics.stdev(values))}"


def as_csv(jobs: Sequence[Job]) -> str:
    """One row per job, with the keys that vary."""
    keys = varied_keys(jobs)
    metrics = list(dict.fromkeys(name for job in jobs for name in job.result.metrics))
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["job", *keys, *RESULT_KEYS, *metrics])
    for job in jobs:
        found = [getattr(job.result, key) for key in RESULT_KEYS]
        found += [job.result.metrics.get(name) for name in metrics]
        writer.writerow(
            [job.run.directory.name]
            + [job.overrides.get(key, "") for key in keys]
            + ["" if value is None else value for value in found]
        )
    return text.getvalue()


def metric_name_of(settings: Sequence[Setting]) -> str:
    """What these runs are compared by; "" if none was evaluated."""
    jobs = [job for setting in settings for job in setting.jobs]
    known = [job.result.metric_name for job in jobs] + [job.run.metric_name for job in jobs]
    return next((str(name) for name in known if name), "")
