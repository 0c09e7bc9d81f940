"""Comparison of the runs of a sweep: one plot of their curves, and a table.

Owns the grouping of runs (those that differ only in the seed) and the files comparison.png, summary.md,
summary.csv and, for runs in several precisions, side_by_side.md. Reads only the files of the runs, and
accepts missing ones.
"""

from __future__ import annotations

import csv
import io
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launcher.config.groups import choice_file, conf_dir, description, group_choices, natural_order
from launcher.report.plots import FAINT, INK, figure_of, plain, points_of, save, use_log_scale
from launcher.report.reading import (
    Warn,
    evaluations_of,
    events_of,
    result_of,
    silent,
    text_of,
    training_seconds_of,
)
from launcher.report.run_record import MARKS, is_run
from launcher.report.side_by_side import Side, measured, side_by_side
from launcher.run_dir.atomic import write_text
from launcher.run_dir.records import CONFIG, OVERRIDES
from launcher.telemetry.formatting import duration, markdown_row, markdown_text, metric, metric_title, number

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COMPARISON, TABLE, ROWS = "comparison.png", "summary.md", "summary.csv"
SIDE_BY_SIDE = "side_by_side.md"
COLORS = ("#2f6ca3", "#d4722a", "#b3261e", "#3a8f5c", "#7a5aa6", "#8c6d3f", "#4a4a4a", "#c2528b")
REPEATED = "seed"  # the key whose values repeat a setting instead of making a new one
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

    directory: Path
    overrides: dict[str, str]
    result: dict[str, Any]
    events: list[dict[str, Any]]
    steps: dict[int, float]  # training loss by step
    accuracies: dict[int, float]  # held out


@dataclass(frozen=True)
class Setting:
    """The jobs that differ only in the seed."""

    label: str
    jobs: tuple[Job, ...]

    def mean(self, curves: Sequence[Mapping[int, float]]) -> dict[int, float]:
        """The mean at each step that all of these curves have."""
        common = set.intersection(*(set(curve) for curve in curves)) if curves else set()
        return {step: statistics.fmean(curve[step] for curve in curves) for step in sorted(common)}


def is_sweep(directory: Path) -> bool:
    """Whether this is a folder of runs rather than a run."""
    return not is_run(directory) and bool(job_directories(directory))


def job_directories(sweep_dir: Path) -> list[Path]:
    """The runs in the folder, also those that failed before their first event."""
    found = {file.parent for mark in MARKS for file in sweep_dir.glob(f"*/{mark}")}
    return sorted(found, key=lambda path: (not path.name.split("_")[0].isdigit(), natural_order(path.name)))


def write_comparison(sweep_dir: Path, warn: Warn = silent) -> list[Path]:
    """Write plot and tables to the sweep's directory. Raises OSError."""
    jobs = [read_job(directory, warn) for directory in job_directories(sweep_dir)]
    settings = settings_of(jobs)
    note = note_of(jobs)
    table, rows = sweep_dir / TABLE, sweep_dir / ROWS
    write_text(table, markdown(sweep_dir.name, settings, note))
    write_text(rows, as_csv(jobs))
    written = [draw(settings, sweep_dir / COMPARISON), table, rows]
    if of_precisions(jobs):
        sides = [
            Side(s.label, tuple(measured(seed_of(j), j.result, j.events, config_of(j)) for j in s.jobs))
            for s in settings
        ]
        written.append(sweep_dir / SIDE_BY_SIDE)
        write_text(written[-1], side_by_side(sweep_dir.name, sides))
    return written


def read_job(directory: Path, warn: Warn = silent) -> Job:
    events = events_of(directory, warn)
    steps = points_of([event for event in events if event["event"] == "step"], "loss")
    accuracies = points_of(evaluations_of(events), "accuracy")
    return Job(
        directory,
        overrides_of(directory),
        {"state": "not finished", **result_of(directory, warn)},
        events,
        dict(steps),
        dict(accuracies),
    )


def overrides_of(directory: Path) -> dict[str, str]:
    """What the run was started with, by key. Raises OSError."""
    lines = text_of(directory / OVERRIDES).splitlines()
    return {key: value for key, _, value in (line.partition("=") for line in lines)}


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


def seed_of(job: Job) -> str:
    """The seed of a run: of its command line, else of its config.yaml; "-" where neither says it."""
    return job.overrides.get(REPEATED) or str(config_of(job).get(REPEATED, "-"))


def config_of(job: Job) -> dict[str, Any]:
    """The run's config.yaml; empty where it cannot be read."""
    import yaml

    try:
        tree = yaml.safe_load((job.directory / CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
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
    name = next(
        (str(j.result["metric_name"]) for s in settings for j in s.jobs if "metric_name" in j.result), ""
    )
    lines = [f"# {markdown_text(title)}", "", *([note, ""] if note else [])]
    head = ["", "runs", metric_title(name) or "metric", "training loss, last", "skipped steps", "time"]
    lines += [markdown_row(head), f"|{' --- |' * len(head)}"]
    lines += [markdown_row(cells(setting, name)) for setting in settings]
    return "\n".join(
        [*lines, "", "Mean ± standard deviation over the seeds.", "", f"![curves]({COMPARISON})", ""]
    )


def cells(setting: Setting, metric_name: str) -> list[str]:
    done = [job for job in setting.jobs if job.result["state"] == "done"]
    ended = f"{len(done)}" if len(done) == len(setting.jobs) else f"{len(done)} of {len(setting.jobs)} done"
    values = [job.result["metric"] for job in done if job.result.get("metric") is not None]
    losses = [job.steps[max(job.steps)] for job in done if job.steps]
    seconds = [value for job in done if (value := training_seconds_of(job.result)) is not None]
    return [
        setting.label,
        ended,
        spread(values, lambda value: metric(metric_name, value)),
        spread(losses, number),
        number(sum(job.result.get("skipped_steps") or 0 for job in done)) if done else "-",
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
    metrics = list(dict.fromkeys(name for job in jobs for name in job.result.get("metrics", ())))
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["job", *keys, *RESULT_KEYS, *metrics])
    for job in jobs:
        measured = job.result.get("metrics", {})
        writer.writerow(
            [job.directory.name]
            + [job.overrides.get(key, "") for key in keys]
            + [job.result.get(key, "") for key in RESULT_KEYS]
            + [measured.get(name, "") for name in metrics]
        )
    return text.getvalue()


def draw(settings: Sequence[Setting], path: Path) -> Path:
    """Loss and accuracy: a colour per setting, a thin line per seed, a bold one for their mean."""
    figure = figure_of(11.0, 4.6)
    loss, accuracy = figure.subplots(1, 2)
    values = draw_curves_of(loss, settings, [[job.steps for job in s.jobs] for s in settings], 1.0)
    draw_curves_of(accuracy, settings, [[job.accuracies for job in s.jobs] for s in settings], 100.0)
    positive = [value for value in values if value > 0]
    if positive and max(positive) / min(positive) > 20:
        use_log_scale(loss, positive)
    loss.set_ylabel("loss, training")
    accuracy.set_ylabel("accuracy, held out (%)")
    if any(len(setting.jobs) > 1 for setting in settings):
        accuracy.set_title("thin: one seed, bold: their mean", loc="right", fontsize=9, color=FAINT)
    for axes in (loss, accuracy):
        axes.set_xlabel("step")
    if any(axes.lines for axes in (loss, accuracy)):
        (loss if loss.lines else accuracy).legend(frameon=False)
    return save(figure, path)


def draw_curves_of(
    axes: Axes, settings: Sequence[Setting], curves: Sequence[Sequence[Mapping[int, float]]], factor: float
) -> list[float]:
    """Draw the curves; returns the drawn values."""
    drawn: list[float] = []
    for index, (setting, of_jobs) in enumerate(zip(settings, curves, strict=True)):
        color = COLORS[index % len(COLORS)]
        present = [curve for curve in of_jobs if curve]
        marker = "o" if present and max(map(len, present)) < 30 else None
        for curve in present if len(present) > 1 else ():
            axes.plot(
                list(curve), [factor * v for v in curve.values()], color=color, linewidth=0.7, alpha=0.45
            )
            drawn += curve.values()
        mean = setting.mean(present)
        if mean:
            axes.plot(
                list(mean),
                [factor * value for value in mean.values()],
                label=plain(setting.label),
                color=color,
                linewidth=4.5 if index == 0 else 2.2,  # the first remains visible below the others
                marker=marker,
                markersize=3.5,
            )
            drawn += mean.values()
    if not drawn:
        axes.text(0.5, 0.5, "not recorded", transform=axes.transAxes, ha="center", color=INK)
    return [value for value in drawn if math.isfinite(value)]
