"""The last lines of a run: metrics, speed, bottleneck, and the location of its files.

Pure: values in, lines out.
"""

from __future__ import annotations

from pathlib import Path

from launcher.telemetry.events import EndEvent
from launcher.telemetry.formatting import duration, metric, metric_title
from launcher.telemetry.step_time import PARTS, TimeShares


def end_lines(
    end: EndEvent, report: str, shares: TimeShares | None, run_dir: Path, sync: str = ""
) -> list[str]:
    """`report` is the classification report, `sync` the command that uploads an offline run; "" if none."""
    lines = ["", report.rstrip(), ""] if report else [""]
    lines.append(_headline(end))  # an error is printed once, on stderr, by whoever ends the run
    if shares is not None:
        lines += [shares.verdict, _parts(shares)]
    lines.append(f"files: {run_dir}")
    if sync:
        lines.append(f"upload the offline tracker run: {sync}")
    return lines


def _headline(end: EndEvent) -> str:
    parts = [f"{end.state} after {end.step:,} steps"]
    if end.seconds is not None:
        since = f" since step {end.since_step:,}" if end.since_step else ""
        parts.append(f"in {duration(end.seconds)}{since}")
    if end.samples_per_s is not None:
        parts.append(f"at {end.samples_per_s:,.0f} samples/s")
    metrics = end.metrics or {}
    shown = ", ".join(f"{metric_title(name)} {metric(name, value)}" for name, value in metrics.items())
    return " ".join(parts) + (f": {shown}" if shown else "")


def _parts(shares: TimeShares) -> str:
    parts = ", ".join(f"{part.removesuffix('_ms')} {shares.parts_ms[part]:.1f}" for part in PARTS)
    return f"step {shares.step_ms:.1f} ms on average: {parts}, other {shares.other_ms:.1f}"
