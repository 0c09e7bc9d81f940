"""Runs of several precisions side by side: means, pairs, and what the verdicts say of them."""

from __future__ import annotations

import re
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from launcher.report.comparison import SIDE_BY_SIDE
from launcher.report.curve import Spread, joined
from launcher.report.recording import Recording
from launcher.report.run_record import RunRecord
from launcher.report.run_state import RunState
from launcher.report.settings import RunSetting
from launcher.report.side_by_side import metric_verdict, side_by_side, time_verdict, verdicts
from launcher.run_dir.atomic import json_line, read_json, write_json
from launcher.run_dir.codec import decoded
from launcher.run_dir.result import Result
from launcher.run_dir.status import Status
from launcher.telemetry.events import DecisionEvent
from tests.report.test_comparison import write_comparison, write_job


def spread_of(*values: float) -> Spread:
    return Spread.of(np.array(values))


def record_of(seed: int, recording: Recording, state: str = "", **result: Any) -> RunRecord:
    """A run that ended without a result where there is no state."""
    status, found = Status(state=state), decoded(Result, {"state": state, **result})
    life = RunState(now=0.0, status=status)
    return RunRecord(Path(str(seed)), "", recording, found, status, life, overrides={"seed": str(seed)})


def run_of(seed: int = 0, metric: float | None = 0.9, **parts: float) -> RunRecord:
    """A step of 100 ms of computation unless the parts say otherwise."""
    parts_ms = [parts.get(part, 0.0) for part in ("data", "compute", "wire", "update")]
    parts_ms[1] = parts.get("compute", 100.0)
    found, step_ms = Recording(), sum(parts_ms)
    steps, times = np.array([1.0, 1 + parts.get("steps", 10.0)]), np.array([[step_ms, *parts_ms]] * 2)
    found._time.add_all(steps, times)
    found.windows_ms = spread_of(*(step_ms + k * parts.get("noise", 1.0) for k in (-1, 0, 1)))
    found.steps["memory_bytes"].add_point(1.0, parts.get("memory", 100e6))
    text = "fp16, emulated: this CPU has no fp16 arithmetic" if parts.get("emulated") else "fp16"
    found.of(DecisionEvent).add(DecisionEvent(0, topic="precision", text=text))
    return record_of(
        seed,
        found,
        "done" if metric is not None else "failed",
        training_seconds=60.0,
        wire_bytes_per_step=parts.get("sent", 4e6),
        state_bytes=16e6,
        metrics={"loss": 0.3},
        metric=metric,
        metric_name="accuracy",
        skipped_steps=1,
    )


def side_of(name: str, *runs: RunRecord) -> RunSetting:
    return RunSetting(name, 0, runs, (name,) * len(runs))


def side(name: str, *metrics: float, **parts: float) -> RunSetting:
    return side_of(name, *(run_of(seed, value, **parts) for seed, value in enumerate(metrics or (0.9,))))


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ({}, {"compute": 50.0}, ["is faster", "(0.50)", "forward and backward (-50 ms)"]),
        ({}, {"compute": 130.0}, ["is slower", "(1.30)", "(+30 ms)"]),
        ({}, {"compute": 101.0}, ["gains no time", "the model or its batch is too small"]),
        ({"wire": 300.0}, {"wire": 150.0}, ["is faster", "60 % of it waits for the exchange of gradients"]),
        (
            {"data": 200.0},
            {"data": 201.0},
            ["67 % of a step of fp16 waits for data, which no precision"],
        ),
        ({"update": 200.0}, {"update": 200.0}, ["gains no time", "67 % of it updates the weights"]),
        ({}, {"compute": 120.0, "emulated": 1.0}, ["is slower", "emulated here", "computes no faster"]),
        ({}, {"compute": 80.0, "emulated": 1.0}, ["is faster", "faster arithmetic is not the reason"]),
        ({}, {"compute": 50.0, "steps": 1}, ["Nothing can be said of the time", "(0.50)", "1 measured step"]),
        (
            {},
            {"compute": 107.0, "noise": 9.0},
            ["Too noisy to say which of", "(1.07)", "within the spread"],
        ),
    ],
)
def test_the_time_has_a_reason(before: dict[str, Any], after: dict[str, Any], said: list[str]) -> None:
    text = time_verdict(side("fp32", **before), side("fp16", **after))
    assert all(part in text for part in said), text


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_a_step_that_waits_for_data_makes_no_precision_slower_or_faster(precision: str) -> None:
    sides = [side(name, data=500.0 if name == precision else 40.0) for name in ("fp32", "fp16")]
    text = time_verdict(*sides)
    assert text.startswith(f"83 % of a step of {precision} waits for data")
    assert not {"slower", "faster"} & set(text.split())


@pytest.mark.parametrize(
    ("config", "advised"),
    [
        ({"data.name": "digits"}, False),
        ({"data.name": "cifar10", "data.cache": "auto"}, False),  # it is used already
        ({"data.name": "cifar10", "data.cache": "none"}, True),
        ({"data": "null"}, False),
        ({}, False),
    ],
)
def test_a_cache_is_advised_only_where_the_data_has_one_that_is_off(
    config: dict[str, str], advised: bool
) -> None:
    slow = side_of("fp16", replace(run_of(data=500.0), config=config))
    assert ("set data.cache=auto" in time_verdict(side("fp32"), slow)) == advised


@pytest.mark.parametrize(
    ("times", "said"),
    [
        ((110.0, 120.0, 115.0), "fp16 is slower than fp32: a step takes 115 ms against 100 ms (1.15), in 3"),
        ((80.0, 90.0, 170.0), "Too noisy to say which of fp32 and fp16 is faster"),
        ((110.0, 130.0), "that vary as much"),  # two pairs prove little
    ],
)
def test_times_of_several_seeds_are_compared_in_pairs_like_the_metric(
    times: tuple[float, ...], said: str
) -> None:
    runs = [run_of(seed, compute=ms) for seed, ms in enumerate(times)]
    assert said in time_verdict(side("fp32", *[0.9] * len(times)), side_of("fp16", *runs))


def test_the_spread_over_log_lines_leaves_out_the_first_and_needs_two_more() -> None:
    steps = [{"event": "step", "step": 10 * n, "step_ms": ms} for n, ms in enumerate((900, 90, 110), start=1)]
    found = Recording()
    for lines in ([json_line(step)[:-1] for step in steps[:2]], [json_line(steps[2])[:-1]]):
        found.add(lines)
    windows = found.windows_ms
    assert (windows.count, windows.mean, windows.deviation) == (
        2,
        100.0,
        pytest.approx(statistics.stdev((90, 110))),
    )
    short = run_of(compute=50.0)
    short.recording.windows_ms = spread_of(50.0)
    assert "too few log lines" in time_verdict(side("fp32"), side_of("fp16", short))


@pytest.mark.parametrize("sizes", [(1, 1), (0, 3), (3, 0), (2, 5, 1), (40, 60)])
def test_a_spread_of_parts_is_that_of_all_values(sizes: tuple[int, ...]) -> None:
    parts = [1e6 + np.random.default_rng(size).random(size) for size in sizes]
    found, values = joined(map(Spread.of, parts)), np.concatenate(parts).tolist()
    assert found.count == len(values)
    assert found.mean == pytest.approx(statistics.fmean(values), rel=1e-12)
    assert found.deviation == pytest.approx(statistics.stdev(values), rel=1e-6)


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ((0.90, 0.91, 0.92), (0.91, 0.90, 0.92), "no difference that these seeds show"),
        ((0.90, 0.91, 0.92), (0.80, 0.81, 0.82), "is -10.00 points in 3 pairs"),
        ((0.90, 0.91, 0.92), (0.80, 0.81, 0.821), "a difference, beyond"),
        ((0.90, 0.91), (0.80, 0.84), "no difference that these seeds show"),  # two pairs prove little
        ((0.9,), (0.8,), "with one seed, which says little"),
    ],
)
def test_a_difference_is_one_only_beyond_what_seeds_make(
    before: tuple[float, ...], after: tuple[float, ...], said: str
) -> None:
    assert said in metric_verdict(side("fp32", *before), side("fp16", *after))


def test_pairs_are_formed_by_seed_and_runs_without_a_partner_left_out() -> None:
    first = side_of("fp32", run_of(1, 0.5), run_of(0, 0.9), run_of(2, 0.7))
    other = side_of("fp16", run_of(0, 0.91), run_of(1, 0.51), run_of(3, 0.1))
    assert "+1.00 points in 2 pairs, with a standard error of 0.00 points" in metric_verdict(first, other)
    page = side_by_side("x", [first, other])
    assert "| 1 | 50.00 % | 51.00 % | +1.00 points |" in page
    assert "| 2 | 70.00 % | - | - |" in page


def test_the_page_has_means_deviations_and_shares() -> None:
    page = side_by_side("mine", [side("fp32", 0.8, 0.9), side("fp16", 0.9, 0.9, sent=2e6, memory=60e6)])
    assert page.startswith("# mine: fp32 and fp16\n")
    assert "- fp16 needs less memory than fp32: 60.0 MB against 100.0 MB." in page
    assert "| sent per step and rank | 4.0 MB ± 0 B | 2.0 MB ± 0 B | 0.50 |" in page
    assert "| accuracy | 85.00 % ± 7.07 % | 90.00 % ± 0.00 % |  |" in page


def test_what_a_run_lacks_is_a_dash() -> None:
    page = side_by_side("x", [side_of("fp32", record_of(0, Recording())), side("fp16")])
    assert "- fp32 with seed 0 has failed: it has no result (ended without a result)" in page
    assert "| memory | - | 100.0 MB |  |" in page


def test_a_sweep_over_precisions_has_the_page_and_others_have_none(tmp_path: Path) -> None:
    for number, precision in enumerate(("fp32", "fp16")):
        write_job(tmp_path / "precisions", number, ["recipe=cnn", f"precision={precision}"])
        write_job(tmp_path / "more", number, [f"precision={precision}", f"optim.lr=0.{number}"])
    (tmp_path / "precisions" / "0_recipe=cnn,precision=fp32" / "config.yaml").write_text("seed: 7\n")
    page = write_comparison(tmp_path / "precisions")[-1]
    assert page.name == SIDE_BY_SIDE
    assert "| 7 | 90.00 % | - | - |" in page.read_text(), (
        "the seed of the recipe's YAML, and a run without it"
    )
    assert SIDE_BY_SIDE not in [path.name for path in write_comparison(tmp_path / "more")]


def test_markup_in_the_name_of_a_metric_is_shown_and_ends_no_cell(tmp_path: Path) -> None:
    for number, precision in enumerate(("fp32", "fp16")):
        run_dir = write_job(tmp_path, number, [f"precision={precision}"])
        result = read_json(run_dir / "result.json") | {"metric_name": "x<b>|y"}
        write_json(run_dir / "result.json", result)
    summary, _, page = (path.read_text(errors="replace") for path in write_comparison(tmp_path))
    for text in (summary, page):
        assert r"x&lt;b&gt;\|y" in text
        assert "<b>" not in text
        tables = re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE)
        for table in tables:
            assert len({len(re.findall(r"(?<!\\)\|", row)) for row in table.splitlines()}) == 1, table


BEYOND = (
    "the loss was not finite in 3 steps in a row, the last being step 3. Check the input for NaN.\n"
    "The batch of that step, run again:\n  rank 0: micro-batch of 8 samples 0, 1; first module whose "
    "output was not finite: 0 (Scale), inf, from inputs between -4 and 4; weights not finite: a"
)


@pytest.mark.parametrize(
    ("first", "said"),
    [
        (
            run_of(0),
            "fp16 with seed 0 exceeds the range of fp16, which ends at 65504, where fp32 stays finite: first "
            "module whose output was not finite: 0 (Scale), inf, from inputs between -4 and 4. To compute "
            "such modules in fp32: "
            "python -m launcher recipe=mine 'a=b c' precision=fp16 precision.rescue=true",
        ),
        (run_of(0, metric=None), "fp16 with seed 0 has failed: the loss was not finite in 3 steps in a row"),
        (run_of(1), "fp16 with seed 0 has failed: the loss was not finite in 3 steps in a row"),
    ],
)
def test_what_only_half_cannot_hold_is_said_with_the_command_that_helps(first: RunRecord, said: str) -> None:
    """Where the other precision is finite on the same data, the data is not the cause."""
    words = {"recipe": "mine", "a": "b c", "precision": "fp16"}
    failed = record_of(0, Recording(), "failed", error=BEYOND)
    run = replace(failed, overrides=words, config={"seed": "0"})
    sides = side_of("fp32", first), side_of("fp16", run)
    found = [text for text in verdicts(*sides) if "fp16 with" in text]
    assert len(found) == 1
    assert found[0].startswith(said)
    assert "NaN" not in found[0] or "has failed" in said
