"""Comparison of the runs of a sweep in tables.

Owns the grouping of runs (those that differ only in the seed) and the files summary.md, summary.csv and, for
runs in several precisions, side_by_side.md. Works from the records of the runs.
"""

from __future__ import annotations

import csv
import io
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from launcher.config.groups import natural_order
from launcher.config.messages import command_name
from launcher.report.precision_comparison import markdown_page
from launcher.report.reading import json_of
from launcher.report.run import MARKS, Run, is_run
from launcher.report.run_groups import (
    REPEATED,
    RunGroup,
    best_first,
    group_rows,
    grouped,
    varied,
    varied_keys,
)
from launcher.run_dir.atomic import write_text
from launcher.run_dir.records import SWEEP
from launcher.telemetry.formatting import markdown_table, markdown_text, metric, metric_title

TABLE, ROWS = "summary.md", "summary.csv"
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
RECORDED = ("exit", "attempts", "device_seconds")  # of sweep.json


def is_sweep(directory: Path) -> bool:
    """Whether this is a folder of runs rather than a run."""
    return not is_run(directory) and bool(job_directories(directory))


def job_directories(sweep_dir: Path) -> list[Path]:
    """The runs in the folder, also those that failed before their first event."""
    found = {file.parent for mark in MARKS for file in sweep_dir.glob(f"*/{mark}")}
    return sorted(found, key=lambda path: (not path.name.split("_")[0].isdigit(), natural_order(path.name)))


def write_comparison(sweep_dir: Path, runs: Sequence[Run]) -> list[Path]:
    """Write the tables of these runs to the sweep's directory. Raises OSError."""
    groups = grouped(runs)
    written = [sweep_dir / TABLE, sweep_dir / ROWS]
    jobs, record = jobs_of(sweep_dir), json_of(sweep_dir, SWEEP)
    flags = ["--config-dir", record["config_dir"]] if record.get("config_dir") else []
    below = ended_early(runs, jobs)
    write_text(written[0], markdown(sweep_dir.name, groups, below, flags))
    write_text(written[1], as_csv(runs, jobs))
    if only_precision([run.overrides for run in runs]):
        written.append(sweep_dir / SIDE_BY_SIDE)
        write_text(written[-1], markdown_page(sweep_dir.name, groups))
    return written


def jobs_of(sweep_dir: Path) -> dict[str, dict[str, Any]]:
    """What sweep.json records of each job, by the name of its folder. Raises OSError."""
    return {job["name"]: job for job in json_of(sweep_dir, SWEEP).get("jobs", ())}


def ended_early(runs: Sequence[Run], jobs: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """A line for each run that was pruned or failed: its latest metric, and the reason."""
    lines = []
    for run in runs:
        if run.state in ("pruned", "failed"):
            job = jobs.get(run.directory.name, {})
            name, value = job.get("metric_name") or run.metric_name, job.get("metric")
            value = run.metric if value is None else value
            shown = "" if name is None or value is None else f", {metric_title(name)} {metric(name, value)}"
            reason = str(job.get("error") or run.error).partition("\n")[0]
            lines.append(markdown_text(f"- {run.directory.name}: {run.state}{shown}: {reason}"))
    return ["\n".join(lines)] if lines else []


def only_precision(overrides: Sequence[Mapping[str, str]]) -> bool:
    """Whether runs with these overrides differ in their precision, and in nothing else but the seed."""
    keys = varied(overrides)
    return "precision" in keys and set(keys) <= {"precision", REPEATED}


def markdown(title: str, groups: Sequence[RunGroup], below: Sequence[str], flags: Sequence[str]) -> str:
    """One row per group of runs, the best first; then the lines `below`.

    `flags` go before the overrides of the best.
    """
    ranked = best_first(groups)
    rows = group_rows(ranked)
    lines = [f"# {markdown_text(title)}", ""]
    lines += markdown_table([*rows[0]], [[*row.values()] for row in rows])
    lines += ["", "Mean ± standard deviation over the seeds; the best first.", ""]
    lines += [line for text in below if text for line in (text, "")]
    if len(ranked) > 1 and ranked[0].mean_metric is not None:
        lines += [f"Best: `{command_of(ranked[0], flags)}`", ""]
    return "\n".join(lines)


def command_of(group: RunGroup, flags: Sequence[str]) -> str:
    """What runs this setting alone, without the seed."""
    given = [
        f"{key}={value}"
        for key, value in group.runs[0].overrides.items()
        if key != REPEATED and not key.startswith("sweep.")
    ]
    return f"{command_name()} {shlex.join([*flags, *given])}"


def as_csv(runs: Sequence[Run], jobs: Mapping[str, Mapping[str, Any]]) -> str:
    """One row per run, with the keys that vary, and what sweep.json records of it."""
    keys = varied_keys(runs)
    rows: list[dict[str, object]] = []
    for run in runs:
        job = jobs.get(run.directory.name, {})
        # A job that was pruned has the metric by which it was in sweep.json alone.
        found = {**vars(run.result), "state": run.state}
        found = {key: job.get(key) if found[key] is None else found[key] for key in RESULT_KEYS}
        found["error"] = (job.get("error") or run.error).partition("\n")[0] or None
        found |= {key: job.get(key) for key in (RECORDED if jobs else ())}
        overrides = {key: run.overrides.get(key) for key in keys}
        rows.append({"job": run.directory.name, **overrides, **found, **run.result.metrics})
    text = io.StringIO()
    titles = dict.fromkeys(title for row in rows for title in row)
    writer = csv.DictWriter(text, titles, lineterminator="\n")  # None: empty
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()
