"""Runs of several precisions side by side: means, and differences of pairs."""

from __future__ import annotations

import math
import statistics
from pathlib import Path
from typing import Any

from launcher.config.codec import decoded
from launcher.report.comparison import SIDE_BY_SIDE
from launcher.report.event_history import EventHistory
from launcher.report.page import write_sweep_report
from launcher.report.precision_comparison import QUANTITY, comparison_rows, markdown_page
from launcher.report.run import Run
from launcher.report.run_groups import RunGroup
from launcher.report.run_state import RunState
from launcher.run_dir.result import Result
from launcher.run_dir.status import Status
from launcher.telemetry.step_time import TIMES
from tests.report.test_comparison import runs_of, write_comparison, write_job


def record_of(seed: int, history: EventHistory, state: str = "", **result: Any) -> Run:
    """A run that ended without a result where there is no state."""
    status, found = Status(state=state), decoded(Result, {"state": state, **result})
    life = RunState(now=0.0, status=status)
    return Run(Path(str(seed)), "", history, found, status, life, overrides={"seed": str(seed)})


def run_of(seed: int = 0, metric: float | None = 0.9, **parts: float) -> Run:
    """A step of 100 ms of computation unless the parts say otherwise."""
    parts_ms = [parts.get(part, 0.0) for part in ("data", "compute", "communication", "update")]
    parts_ms[1] = parts.get("compute", 100.0)
    found, step_ms = EventHistory(), sum(parts_ms)
    times = dict(zip(TIMES, (step_ms, *parts_ms), strict=True)) | {"memory_bytes": parts.get("memory", 100e6)}
    found.add([{"event": "step", "step": step, **times} for step in (1, 11)])
    return record_of(
        seed,
        found,
        "done" if metric is not None else "failed",
        training_seconds=60.0,
        wire_bytes_per_step=parts.get("sent", 4e6),
        state_bytes=16e6,
        metrics={"val_loss": 0.3},
        metric=metric,
        metric_name="accuracy",
        skipped_steps=1,
    )


def side_of(name: str, *runs: Run) -> RunGroup:
    return RunGroup(name, 0, runs)


def side(name: str, *metrics: float, **parts: float) -> RunGroup:
    return side_of(name, *(run_of(seed, value, **parts) for seed, value in enumerate(metrics or (0.9,))))


def cells(*sides: RunGroup) -> dict[str, list[str]]:
    """The row of each quantity, without its title."""
    return {row.pop(QUANTITY): list(row.values()) for row in comparison_rows(sides)}


def test_each_quantity_has_means_and_the_paired_difference_with_its_interval() -> None:
    found = cells(side("fp32", 0.8, 0.9, 0.85), side("fp16", 0.81, 0.9, 0.87, compute=50.0, memory=60e6))
    assert found["runs done"] == ["3 of 3", "3 of 3", ""]
    assert found["time of a step"] == ["100 ms ± 0 ms", "50 ms ± 0 ms", "-50 ms ± 0 ms (3 seeds)"]
    assert found["memory"] == ["100.0 MB ± 0 B", "60.0 MB ± 0 B", "-40.0 MB ± 0 B (3 seeds)"]
    interval = 100 * 4.30 * statistics.stdev((0.01, 0.0, 0.02)) / math.sqrt(3)
    assert found["accuracy"][2] == f"+1.00 % ± {interval:.2f} % (3 seeds)"


def test_one_seed_has_no_interval() -> None:
    assert cells(side("fp32", 0.9), side("fp16", 0.8))["accuracy"][2] == "-10.00 % (1 seed)"


def test_pairs_are_formed_by_seed_and_runs_without_a_partner_left_out() -> None:
    first = side_of("fp32", run_of(1, 0.5), run_of(0, 0.9), run_of(2, 0.7))
    other = side_of("fp16", run_of(0, 0.91), run_of(1, 0.51), run_of(3, 0.1))
    assert cells(first, other)["accuracy"][2] == "+1.00 % ± 0.00 % (2 seeds)"
    assert cells(first, side_of("fp16", run_of(7, 0.9)))["accuracy"][2] == "-"


def test_runs_with_one_seed_are_repetitions_and_no_seeds() -> None:
    first = side_of("fp32", run_of(0, 0.8), run_of(0, 0.9))
    other = side_of("fp16", run_of(0, 0.9), run_of(0, 0.9))
    assert cells(first, other)["accuracy"][2] == "+5.00 % (1 seed)"


def test_the_page_names_what_bounds_a_step_and_what_failed() -> None:
    failed = record_of(1, EventHistory(), "failed", error="diverged at step 3\nmore")
    page = markdown_page("mine", [side("fp32", 0.9, data=300.0), side_of("fp16", run_of(0), failed)])
    assert page.startswith("# mine: fp32 and fp16\n")
    assert "- fp32: input-bound: 75 %" in page
    assert "- fp16 with seed 1 has failed: diverged at step 3\n" in page


def test_what_a_run_lacks_is_a_dash() -> None:
    page = markdown_page("x", [side_of("fp32", record_of(0, EventHistory())), side("fp16")])
    assert "- fp32 with seed 0 has failed: it has no result (ended without a result)" in page
    assert "| memory | - | 100.0 MB | - |" in page


def test_a_sweep_over_precisions_has_the_page_and_others_have_none(tmp_path: Path) -> None:
    for number, precision in enumerate(("fp32", "fp16")):
        write_job(tmp_path / "precisions", number, ["recipe=cnn", f"precision={precision}"])
        write_job(tmp_path / "more", number, [f"precision={precision}", f"optim.lr=0.{number}"])
    (tmp_path / "precisions" / "0_recipe=cnn,precision=fp32" / "config.yaml").write_text("seed: 7\n")
    page = write_comparison(tmp_path / "precisions")[-1]
    assert page.name == SIDE_BY_SIDE
    assert "| accuracy | 90.00 % | 90.00 % | - |" in page.read_text(), "a run without the seed of the YAML"
    html = write_sweep_report(tmp_path / "precisions", runs_of(tmp_path / "precisions")).read_text()
    assert "<h2>Precisions side by side</h2>" in html
    assert SIDE_BY_SIDE not in [path.name for path in write_comparison(tmp_path / "more")]
