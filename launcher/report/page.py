"""`report.html`: one run on one self-contained page, to be mailed or archived.

Owns the parts of the page and their order; `html` owns their markup. Reads only the files of the run, accepts
missing ones, and escapes their content.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launcher.errors import listed
from launcher.report.gradient_plot import GRADIENTS
from launcher.report.html import facts, listing, page, picture, preformatted, section, table, tiles
from launcher.report.plots import CONFUSION_MATRIX, CURVES
from launcher.report.reading import Warn, bytes_of, events_of, json_of, result_of, silent, text_of
from launcher.run_dir.atomic import write_text
from launcher.run_dir.records import CONFIG, ENVIRONMENT, REPORT
from launcher.telemetry.events import FILE_NAME
from launcher.telemetry.formatting import duration, evaluation_cells, metric, metric_title, number
from launcher.telemetry.step_time import PARTS, time_shares

MAX_OVERFLOWS = 40  # rows; for more, the plot is enough
MAX_PARAMETERS = 4  # names in a row of the overflow table
TILES = ("metrics", "sets", "classes", "confusion_matrix", "metric", "metric_name", "state", "exit", "error")


@dataclass(frozen=True)
class RunFiles:
    """The files of a run; missing ones are empty."""

    name: str
    events: list[dict[str, Any]]
    result: dict[str, Any]
    environment: dict[str, Any]
    config: str
    classification_report: str
    curves: bytes
    confusion_matrix: bytes
    gradients: bytes

    @classmethod
    def read(cls, run_dir: Path, warn: Warn = silent) -> RunFiles:
        """Read the files, omitting damaged content with a warning. Raises OSError for an unreadable file."""
        return cls(
            name="/".join(run_dir.absolute().parts[-2:]),
            events=events_of(run_dir, warn),
            result=result_of(run_dir, warn),
            environment=json_of(run_dir, ENVIRONMENT, warn),
            config=text_of(run_dir / CONFIG),
            classification_report=text_of(run_dir / "classification_report.txt"),
            curves=bytes_of(run_dir / CURVES),
            confusion_matrix=bytes_of(run_dir / CONFUSION_MATRIX),
            gradients=bytes_of(run_dir / GRADIENTS),
        )

    def of(self, event: str) -> list[dict[str, Any]]:
        return [record for record in self.events if record["event"] == event]


def write_report(run_dir: Path, warn: Warn = silent) -> Path:
    """Write report.html from the other files, during or after a run. Raises OSError."""
    path = run_dir / REPORT
    write_text(path, render(RunFiles.read(run_dir, warn)))
    return path


def render(run: RunFiles) -> str:
    """The whole page."""
    parts = [
        _headline(run),
        section("Curves", picture(run.curves, "loss, accuracy, learning rate and loss scale over the steps")),
        section("Evaluations", _evaluations(run)),
        section("Mistakes by class", picture(run.confusion_matrix, "confusion matrix")),
        section("Classification report", preformatted(run.classification_report)),
        section("Gradients in the range of fp16", picture(run.gradients, "histogram of gradient exponents")),
        section("Where the time goes", _time(run)),
        section("Skipped steps", _overflows(run)),
        section("Decisions", listing(f"{one.get('topic')} {one.get('text')}" for one in run.of("decision"))),
        section("Warnings", listing(f"step {one['step']:,}: {one.get('text')}" for one in run.of("warning"))),
        section("Result", _result(run)),
        section("Environment", _environment(run)),
        section("Config", preformatted(_config(run))),
    ]
    return page(run.name, "".join(parts))


def _headline(run: RunFiles) -> str:
    """The most important numbers, or the error that ended the run."""
    result, state = run.result, _state(run)
    cells = {"state": state}
    if result.get("metric") is not None:
        name = str(result.get("metric_name", "metric"))
        cells[metric_title(name)] = metric(name, result["metric"])
    if result.get("seconds") is not None:
        cells["training time"] = duration(result["seconds"])
    for key, title in (("samples_per_s", "samples / s"), ("steps", "steps"), ("skipped_steps", "skipped")):
        if result.get(key) is not None:
            cells[title] = number(result[key])
    return tiles(cells) + preformatted(str(result.get("error", "")))


def _state(run: RunFiles) -> str:
    ends = run.of("end")
    return str(run.result.get("state") or (ends[-1].get("state", "done") if ends else "not finished"))


def _config(run: RunFiles) -> str:
    """config.yaml, with a comment at the model and the data set if the recipe does not use them."""
    used = (run.of("start") or [{}])[-1]
    group, lines = "", []
    for line in run.config.splitlines():
        group = group if line.startswith(" ") else line.rstrip(":")
        name = used.get(group) if group in ("model", "data") else None
        if name is not None and line.startswith("  name: ") and line != f"  name: {name}":
            line += f"  # not used: the recipe has its own, {name}"
        lines.append(line)
    return "\n".join(lines)


def _evaluations(run: RunFiles) -> str:
    return table([evaluation_cells(record) for record in run.of("eval")])


def _time(run: RunFiles) -> str:
    shares = time_shares(run.of("step"))
    if shares is None:
        return ""
    rows = [
        {
            "part": part.removesuffix("_ms"),
            "ms per step": f"{shares.parts_ms[part]:.2f}",
            "share": f"{shares.share(part):.1%}".replace("%", " %"),
        }
        for part in PARTS
    ]
    rows.append({"part": "whole step", "ms per step": f"{shares.step_ms:.2f}", "share": ""})
    return listing([shares.verdict]) + table(rows)


def _overflows(run: RunFiles) -> str:
    overflows = run.of("overflow")
    rows = [
        {
            "step": number(record["step"]),
            "loss scale": number(record.get("scale")),
            "ranks": ", ".join(map(str, record.get("ranks") or ())),
            "first parameters": listed(record.get("parameters") or [], MAX_PARAMETERS),
        }
        for record in overflows[:MAX_OVERFLOWS]
    ]
    left_out = len(overflows) - len(rows)
    return table(rows) + listing([f"and {left_out:,} more, in {FILE_NAME}"] if left_out else [])


def _result(run: RunFiles) -> str:
    cells = {key: number(value) for key, value in run.result.items() if key not in TILES}
    metrics = run.result.get("metrics") or {}
    return facts({**{metric_title(name): metric(name, value) for name, value in metrics.items()}, **cells})


def _environment(run: RunFiles) -> str:
    flat: dict[str, str] = {}
    for key, value in run.environment.items():
        if isinstance(value, dict):
            flat.update({f"{key} {name}": str(item) for name, item in value.items() if item is not None})
        elif value is not None:
            flat[key] = ", ".join(map(str, value)) if isinstance(value, list) else str(value)
    return facts(flat)
