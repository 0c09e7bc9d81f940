"""Runs that differ only in precision and seed, side by side: a table of time, memory, loss and metric.

Owns the rows of the table and the comparison by seed. Pure: records in, cells out. A setting is one
precision; the first is what the others are compared with.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from operator import attrgetter

from launcher.errors import counted
from launcher.report.run import Run
from launcher.report.run_groups import OfRun, RunGroup
from launcher.telemetry.formatting import (
    markdown_table,
    markdown_text,
    metric,
    metric_title,
    number,
    size,
)
from launcher.telemetry.step_time import TITLES, TimeShares

# Student's t at 95 %, by the number of pairs less one: half the interval of a mean, in standard errors.
STUDENT_T = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26)
QUANTITY = "quantity"  # the title of the first column
NOTE = (
    "Mean ± standard deviation over the runs that are done. Differences are those of the pairs of runs with "
    "one seed, with the 95 % interval of their mean; runs with the same seed count as one. Differences of "
    "shares are percentage points."
)


def markdown_page(title: str, sides: Sequence[RunGroup]) -> str:
    """The table as a page of Markdown."""
    rows = comparison_rows(sides)
    lines = [markdown_text(f"# {title}: {' and '.join(side.label for side in sides)}"), ""]
    lines += [*markdown_table([*rows[0]], [[*row.values()] for row in rows]), "", NOTE, ""]
    lines += [f"- {markdown_text(sentence)}" for sentence in notes(sides)]
    return "\n".join([*lines, ""])


def notes(sides: Sequence[RunGroup]) -> Iterator[str]:
    """What bounds the steps of each precision, and which runs are not done."""
    for side in sides:
        shares = next((run.history.time_shares for run in side.done if run.history.time_shares), None)
        if shares is not None:
            yield f"{side.label}: {shares.verdict}"
        for run in side.runs:
            if run.state != "done":
                reason = run.error.partition("\n")[0] or f"it has no result ({run.state})"
                yield f"{side.label} with seed {run.seed} has failed: {reason}"


def comparison_rows(sides: Sequence[RunGroup]) -> list[dict[str, str]]:
    """A row for each quantity: its mean for each precision, and the difference from the first one."""
    first, *others = sides
    found = [
        {QUANTITY: "runs done"} | {side.label: f"{len(side.done)} of {len(side.runs)}" for side in sides}
    ]
    for title, of, shown in _quantities(first.metric_name or "val_loss"):
        cells = {QUANTITY: title, first.label: first.mean_std(of, shown)}
        for side in others:
            cells[side.label] = side.mean_std(of, shown)
            cells[f"{side.label} - {first.label}"] = difference(first, side, of, shown)
        found.append(cells)
    titles = [QUANTITY, first.label]
    for side in others:
        titles += [side.label, f"{side.label} - {first.label}"]
    return [{title: row.get(title, "") for title in titles} for row in found]


def difference(first: RunGroup, other: RunGroup, of: OfRun, shown: Callable[[float], str]) -> str:
    """The mean difference of the pairs of runs with one seed, with its interval; a dash without a pair."""
    before, after = by_seed(first, of), by_seed(other, of)
    pairs = [after[seed] - before[seed] for seed in after if seed in before]
    if not pairs:
        return "-"
    mean = statistics.fmean(pairs)
    signed = f"{'-' if mean < 0 else '+'}{shown(abs(mean))}"
    if len(pairs) == 1:
        return f"{signed} (1 seed)"
    error = statistics.stdev(pairs) / math.sqrt(len(pairs))
    half = STUDENT_T[min(len(pairs) - 1, len(STUDENT_T)) - 1] * error
    return f"{signed} ± {shown(half)} ({counted(len(pairs), 'seed')})"


def by_seed(side: RunGroup, of: OfRun) -> dict[str, float]:
    """The value of each seed: the mean of the runs that repeat it."""
    values: dict[str, list[float]] = {}
    for run in side.done:
        if (value := of(run)) is not None:
            values.setdefault(run.seed, []).append(value)
    return {seed: statistics.fmean(found) for seed, found in values.items()}


def _quantities(metric_name: str) -> list[tuple[str, OfRun, Callable[[float], str]]]:
    """Title, value and text of each quantity."""
    parts = [(f"... {title}", timed(partial(_part_ms, part)), milliseconds) for part, title in TITLES.items()]
    loss = ("val_loss", lambda run: run.result.metrics.get("val_loss"), number)
    return [
        ("training time", lambda run: run.result.training_seconds, seconds),
        ("time of a step", timed(attrgetter("step_ms")), milliseconds),
        *parts,
        ("... everything else", timed(attrgetter("other_ms")), milliseconds),
        ("memory", lambda run: run.history.steps["memory_bytes"].highest, size),
        ("weights, masters, optimizer", lambda run: run.result.state_bytes, size),
        ("sent per step and rank", lambda run: run.result.wire_bytes_per_step, size),
        ("skipped steps", lambda run: run.skipped, number),
        *([] if metric_name == "val_loss" else [loss]),
        (metric_title(metric_name), lambda run: run.result.metric, partial(metric, metric_name)),
    ]


def seconds(value: float) -> str:
    return f"{value:.1f} s"


def milliseconds(value: float) -> str:
    return f"{number(value)} ms"


def timed(of: Callable[[TimeShares], float]) -> OfRun:
    """What is known of the average step of a run; None where its time was not recorded."""

    def found(run: Run) -> float | None:
        shares = run.history.time_shares
        return None if shares is None else of(shares)

    return found


def _part_ms(part: str, shares: TimeShares) -> float:
    return shares.parts_ms[part]
