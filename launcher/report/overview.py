"""The runs at a glance: the beginning of a page, and the table of a terminal, each with what failed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from launcher.report.html import failure, folded, section, table, tiles, words
from launcher.report.run import Run
from launcher.report.run_groups import RunGroup, group_rows, short_names, value_of, varied_keys
from launcher.telemetry.formatting import duration, metric, metric_title, number, rate

MAX_DETAILED = 6  # runs of which a page shows more than curves and a row of the table, unfolded
LEFT = ("run", "state", "bound by")
MAX_NAME = 48


def headline(run: Run) -> str:
    """The most important numbers."""
    cells = {"state": state_text(run)}
    if run.metric is not None and run.metric_name is not None:
        cells[run.metric_label] = metric(run.metric_name, run.metric)
        cells |= best_of(run)
    if run.seconds is not None:
        cells["training time"] = duration(run.seconds)
    if run.samples_per_s is not None:
        cells["samples / s"] = rate(run.samples_per_s)
    if run.steps:
        cells["steps"] = _steps(run)
    if run.skipped is not None:
        cells["skipped"] = number(run.skipped)
    return tiles(cells) + words("Set for this run:", _common_overrides([run]))


def best_of(run: Run) -> dict[str, str]:
    """The best evaluation with its step, by title; nothing where it is the last one."""
    name, best, step = run.result.metric_name, run.result.best_metric, run.result.best_step
    if name is None or best is None or step in (None, run.result.steps):
        return {}
    return {f"best {metric_title(name)}": f"{metric(name, best)} (step {number(step)})"}


def table_of_runs(runs: Sequence[Run], groups: Sequence[RunGroup]) -> str:
    """The runs with the keys that differ, means over the seeds, and what is set for all runs."""
    keys, names = varied_keys(runs), short_names(runs)
    rows = [
        {"run": names[run.directory]} | {key: value_of(run, key) for key in keys} | row_of(run)
        for run in runs
    ]
    seeds = group_rows(groups) if len(groups) < len(runs) else []
    return (
        table("Runs", rows, texts=("run",))
        + section("Over the seeds", table("Over the seeds", seeds, texts=("setting",)))
        + words("Set for all runs:", _common_overrides(runs))
    )


def failures(runs: Sequence[Run]) -> str:
    """Why runs failed; of many, the others are folded. That a sweep prunes a job is no failure."""
    failed = [run for run in runs if run.state != "pruned" and (run.error or run.note)]
    shown = [failure(_failure_title(run, len(runs) > 1), run.error or run.note) for run in failed]
    left_out = len(shown) - MAX_DETAILED
    more = folded(f"{left_out} more that failed", "".join(shown[MAX_DETAILED:])) if left_out > 0 else ""
    return "".join(shown[:MAX_DETAILED]) + more


def row_of(run: Run) -> dict[str, str]:
    """The run in one row of a table, without its name."""
    name = run.metric_name
    return {
        "state": state_text(run),
        "steps": _steps(run),
        "train_loss": number(run.history.steps["loss"].last),
        run.metric_label if name else "val_loss": metric(name or "val_loss", run.metric),
        "time": duration(run.seconds),
        "samples / s": "-" if run.samples_per_s is None else rate(run.samples_per_s),
        "skipped": number(run.skipped),
        "bound by": run.bound or "-",
    }


def state_text(run: Run) -> str:
    """The state, or for how long a run that should be going has been silent."""
    silent_s = run.life.silent_s
    return f"no sign of life for {duration(silent_s)}" if silent_s else run.state


def _steps(run: Run) -> str:
    total = run.total_steps
    return number(run.steps) if total in (None, run.steps) else f"{run.steps:,} of {total:,}"


def _failure_title(run: Run, with_name: bool) -> str:
    code = run.status.exit
    name = f"{run.name}: " if with_name else ""
    return f"{name}{state_text(run)}" + (f", exit {code}" if code is not None else "")


def _common_overrides(runs: Sequence[Run]) -> list[str]:
    """What differs from the defaults in all runs, as it was typed."""
    first = runs[0].overrides
    common = [key for key in first if all(run.overrides.get(key) == first[key] for run in runs)]
    return [f"{key}={first[key]}" for key in common]


def run_table(runs: Sequence[Run]) -> str:
    """A row for each run, and below it why it failed."""
    rows = [{"run": shortened(run.name, MAX_NAME), **row_of(run)} for run in runs]
    titles = list(dict.fromkeys(title for row in rows for title in row))
    widths = {title: max(len(title), *(len(row.get(title, "-")) for row in rows)) for title in titles}
    lines = [_line({title: title for title in widths}, widths)]
    for run, row in zip(runs, rows, strict=True):
        lines.append(_line(row, widths))
        if text := run.error or run.note:
            lines.append(f"  {first_line(text)}")
    return "\n".join(lines)


def shortened(name: str, longest: int) -> str:
    """The end of the name, where runs differ, without control characters."""
    name = printable(name)
    return name if len(name) <= longest else f"...{name[3 - longest :]}"


def first_line(text: str) -> str:
    """The first line, without control characters."""
    return printable(text.strip().partition("\n")[0])


def printable(text: str) -> str:
    return "".join(character if character.isprintable() else "?" for character in text)


def _line(row: Mapping[str, str], widths: Mapping[str, int]) -> str:
    cells = (
        row.get(title, "-").ljust(width) if title in LEFT else row.get(title, "-").rjust(width)
        for title, width in widths.items()
    )
    return printable("  ".join(cells).rstrip())
