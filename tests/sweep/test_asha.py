"""Which jobs are pruned, and what is read of their evaluations."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path

import pytest

from launcher.run_dir.records import METRICS
from launcher.sweep.asha import Asha, Evaluations, Pruner
from launcher.sweep.record import State, SweepJob

START = {"event": "start", "time": 0, "step": 0, "compare_by": None}


def evaluation(step: int, **fields: object) -> dict[str, object]:
    usual = {"epoch": 0, "loss": 1.0, "samples": 1, "seconds": 0, "higher_is_better": {"accuracy": True}}
    return {"event": "eval", "time": 0, "step": step, **usual, **fields}


def write(directory: Path, *events: dict[str, object], end: str = "\n") -> None:
    directory.mkdir(exist_ok=True)
    with open(directory / METRICS, "a") as file:
        file.write("\n".join(map(json.dumps, events)) + end)


def test_the_best_third_of_those_that_came_as_far_continues() -> None:
    asha = Asha(patience=1)
    assert asha.reached(0, [0.9]) is None, "one job is no third"
    assert asha.reached(1, [0.8]) is None
    assert asha.reached(2, [0.7]) is None, "the best of three"
    assert asha.reached(3, [0.75]) == 1
    assert asha.reached(4, [0.6]) is None
    assert asha.reached(5, [0.65]) is None, "the second of six"
    assert asha.reached(6, [0.68]) == 1


def test_a_verdict_is_given_once_at_each_rung() -> None:
    asha = Asha(patience=2)
    for job, cost in enumerate((0.5, 0.6, 0.7)):
        assert asha.reached(job, [0.1]) is None, "before the patience is over"
        found = asha.reached(job, [0.1, cost])
        assert found == (2 if job == 2 else None)
    assert asha.reached(1, [0.1, 0.6]) is None, "decided already"
    for job, cost in enumerate((0.5, 0.4)):
        assert asha.reached(job, [0.1, 0.5, 0.5, 0.5, 0.5, cost]) is None
    assert asha.reached(3, [0.1, 0.2, 0.5, 0.5, 0.5, 0.6]) == 6, "two evaluations times three"


def test_jobs_of_different_metrics_are_not_compared() -> None:
    asha = Asha(patience=1)
    for job, cost in enumerate((-0.9, -0.8, -0.95)):
        assert asha.reached(job, [cost], "accuracy") is None or cost == -0.8
    assert asha.reached(3, [50.0], "rmse") is None
    assert asha.reached(4, [60.0], "rmse") is None


def test_a_value_that_is_no_number_is_the_worst() -> None:
    asha = Asha(patience=1)
    for job, cost in enumerate((0.5, math.inf)):
        assert asha.reached(job, [cost]) is None
    assert asha.reached(2, [math.inf]) == 1


def test_evaluations_are_read_as_they_are_written(tmp_path: Path) -> None:
    found = Evaluations(tmp_path / "job")
    found.poll()
    assert found.costs == []
    write(
        tmp_path / "job",
        START,
        evaluation(5, accuracy=0.5),
        {"event": "step", "time": 0, "step": 6, "loss": 3.0},
    )
    write(tmp_path / "job", evaluation(10, accuracy=0.75), end="")
    found.poll()
    assert found.costs == [-0.5], "the second line is not whole"
    write(tmp_path / "job", end="\n")
    write(tmp_path / "job", evaluation(10, accuracy=0.75), evaluation(15, accuracy=None))
    found.poll()
    assert found.costs == [-0.5, -0.75, math.inf], "a resumed job repeats an evaluation"
    os.truncate(tmp_path / "job" / METRICS, 0)
    write(tmp_path / "job", START, evaluation(20, accuracy=0.25), *[START] * 9)
    found.poll()
    assert found.costs == [-0.5, -0.75, math.inf, -0.25], "its file was cut and is longer again"


@pytest.mark.parametrize(
    ("compare_by", "expected"), [("loss", [1.0]), ("b/f1", [-0.25]), ("f1", [-0.5]), ("error", [0.125])]
)
def test_the_metric_is_the_one_that_runs_are_compared_by(tmp_path: Path, compare_by: str, expected) -> None:
    better = {"higher_is_better": {"f1": True, "error": False}}
    write(
        tmp_path / "job",
        START | {"compare_by": compare_by},
        evaluation(5, set="a", f1=0.5, error=0.125, **better),
        evaluation(5, set="b", f1=0.25, error=0.5, **better),
    )
    found = Evaluations(tmp_path / "job")
    found.poll()
    assert found.costs == expected


def test_a_sweep_that_continues_prunes_by_what_its_jobs_have_shown(tmp_path: Path) -> None:
    jobs = [SweepJob(number, f"{number}", (), state=State.DONE) for number in range(3)]
    for job, accuracy in zip(jobs, (0.5, 0.75, 0.625), strict=True):
        write(tmp_path / job.name, START, evaluation(5, accuracy=accuracy))
    running = SweepJob(3, "3", (), state=State.RUNNING)
    pruner = Pruner(tmp_path, 1, jobs)
    assert pruner.to_prune([running]) == [], "it has no file yet"
    write(tmp_path / "3", START, evaluation(5, accuracy=0.7), evaluation(10, accuracy=0.9))
    assert pruner.to_prune([running]) == [running]
    assert (running.metric, running.higher_is_better) == (0.7, True), "of the evaluation that decided"
    assert pruner.to_prune([running]) == []
