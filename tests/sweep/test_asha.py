"""Which jobs are pruned, and what is read of their evaluations."""

from __future__ import annotations

import math
import os
import sys
from pathlib import Path

import pytest

from launcher.errors import ConfigError
from launcher.report.event_history import HistoryReader
from launcher.run_dir.atomic import json_line
from launcher.run_dir.records import METRICS
from launcher.sweep.asha import Pruner, compared
from launcher.sweep.state import JobState, SweepJob

START = {"event": "start", "time": 0, "step": 0, "monitor": None}


def evaluation(step: int, **fields: object) -> dict[str, object]:
    usual = {"epoch": 0, "val_loss": 1.0, "samples": 1, "seconds": 0, "higher_is_better": {"accuracy": True}}
    return {"event": "eval", "time": 0, "step": step, **usual, **fields}


def write(directory: Path, *events: dict[str, object], end: str = "\n") -> None:
    directory.mkdir(exist_ok=True)
    with open(directory / METRICS, "a") as file:
        file.write("\n".join(json_line(event).decode().strip() for event in events) + end)


def verdicts(directory: Path, *costs: float, grace_period: int = 1, metric: str = "val_loss") -> list[int]:
    """Which jobs are pruned, where each makes one evaluation after those of the jobs before it."""
    pruner, pruned = Pruner(directory, grace_period, []), []
    for number, cost in enumerate(costs):
        write(directory / f"{number}", START | {"monitor": metric}, evaluation(5, val_loss=cost))
        job = SweepJob(number, f"{number}", (), state=JobState.RUNNING)
        pruned += [job.number for job in pruner.to_prune([job])]
    return pruned


def test_the_best_third_of_those_that_came_as_far_continues(tmp_path: Path) -> None:
    """Of fewer than three the best: a job cannot wait for others."""
    assert verdicts(tmp_path, 0.9, 0.8, 0.7, 0.75, 0.6, 0.65, 0.68) == [3, 6]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_value_that_is_not_finite_is_the_worst_and_counts_as_an_evaluation(
    tmp_path: Path, bad: float
) -> None:
    assert verdicts(tmp_path, 0.9, bad, 0.8, bad) == [1, 3]
    write(tmp_path / "job", START, *(evaluation(5, accuracy=value) for value in (bad, 0.5)))
    assert compared(HistoryReader(tmp_path / "job").poll()) == ("accuracy", True, [-math.inf, 0.5])


def test_a_verdict_is_given_once_at_each_rung(tmp_path: Path) -> None:
    pruner = Pruner(tmp_path, 2, [])
    jobs = [SweepJob(number, f"{number}", (), state=JobState.RUNNING) for number in range(3)]
    for job, cost in zip(jobs, (0.5, 0.6, 0.7), strict=True):
        write(tmp_path / job.name, START, evaluation(5, val_loss=0.1, higher_is_better={}))
        assert pruner.to_prune([job]) == [], "before the grace period is over"
        write(tmp_path / job.name, evaluation(10, val_loss=cost, higher_is_better={}))
    assert pruner.to_prune([jobs[0]]) == []
    assert pruner.to_prune([jobs[2]]) == [jobs[2]]
    assert jobs[2].error is not None
    assert "after evaluation 2 it is not among the best third" in jobs[2].error
    for step in (15, 20, 25, 30):
        write(tmp_path / "0", evaluation(step, val_loss=0.5, higher_is_better={}))
        assert pruner.to_prune([jobs[0]]) == [], "the next rung is six evaluations, where it is alone"
        write(tmp_path / "1", evaluation(step, val_loss=0.6, higher_is_better={}))
    assert pruner.to_prune([jobs[1]]) == [jobs[1]], "the second of two"


def test_jobs_of_different_metrics_are_not_compared(tmp_path: Path) -> None:
    pruner = Pruner(tmp_path, 1, [])
    for number, (name, value) in enumerate([("accuracy", 0.9), ("accuracy", 0.95), ("rmse", 50.0)]):
        better = {"higher_is_better": {"accuracy": True}}
        write(tmp_path / f"{number}", START | {"monitor": name}, evaluation(5, **{name: value}, **better))
        assert pruner.to_prune([SweepJob(number, f"{number}", (), state=JobState.RUNNING)]) == []


def test_without_optuna_pruning_says_how_to_install_it(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(ConfigError, match=r"sweep\.prune=asha need Optuna: pip install"):
        Pruner(tmp_path, 1, [])


def test_evaluations_are_read_as_they_are_written(tmp_path: Path) -> None:
    reader = HistoryReader(tmp_path / "job")
    assert compared(reader.poll())[2] == ()
    write(
        tmp_path / "job",
        START,
        evaluation(5, accuracy=0.5),
        {"event": "step", "time": 0, "step": 6, "loss": 3.0},
    )
    write(tmp_path / "job", evaluation(10, accuracy=0.75), end="")
    assert compared(reader.poll()) == ("accuracy", True, [0.5]), "the second line is not whole"
    write(tmp_path / "job", end="\n")
    assert compared(reader.poll()) == ("accuracy", True, [0.5, 0.75])
    os.truncate(tmp_path / "job" / METRICS, 0)
    write(tmp_path / "job", START, evaluation(20, accuracy=0.25), *[START] * 9)
    assert compared(reader.poll()) == ("accuracy", True, [0.25]), "its file was cut and is longer again"


@pytest.mark.parametrize(
    ("monitor", "expected"), [("val_loss", [1.0]), ("b/f1", [0.25]), ("f1", [0.5]), ("error", [0.125])]
)
def test_the_metric_is_the_one_that_runs_are_compared_by(tmp_path: Path, monitor: str, expected) -> None:
    better = {"higher_is_better": {"f1": True, "error": False}}
    write(
        tmp_path / "job",
        START | {"monitor": monitor},
        evaluation(5, set="a", f1=0.5, error=0.125, **better),
        evaluation(5, set="b", f1=0.25, error=0.5, **better),
    )
    name, higher_is_better, values = compared(HistoryReader(tmp_path / "job").poll())
    assert (name, higher_is_better, values) == (monitor, monitor.endswith("f1"), expected)


def test_a_sweep_that_continues_prunes_by_what_its_jobs_have_shown(tmp_path: Path) -> None:
    jobs = [SweepJob(number, f"{number}", (), state=JobState.DONE) for number in range(3)]
    for job, accuracy in zip(jobs, (0.5, 0.75, 0.625), strict=True):
        write(tmp_path / job.name, START, evaluation(5, accuracy=accuracy))
    running = SweepJob(3, "3", (), state=JobState.RUNNING)
    pruner = Pruner(tmp_path, 1, jobs)
    assert pruner.to_prune([running]) == [], "it has no file yet"
    write(tmp_path / "3", START, evaluation(5, accuracy=0.7), evaluation(10, accuracy=0.9))
    assert pruner.to_prune([running]) == [running]
    assert (running.metric, running.higher_is_better) == (0.7, True), "of the evaluation that decided"
    assert pruner.to_prune([running]) == []
