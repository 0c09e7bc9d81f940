"""A search on the page and in the table of its sweep: what is drawn is what sweep.json records."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from launcher.config.resolve import space_of
from launcher.config.search_space import Choices, distribution, value_of
from launcher.report.page import write_sweep_report
from launcher.report.run_record import RunRecord
from launcher.report.search import Search
from launcher.run_dir.atomic import write_json
from tests.faults.parent import Parent, write_recipe

needs_optuna = pytest.mark.skipif(
    importlib.util.find_spec("optuna") is None, reason="needs Optuna: pip install optuna"
)
SPACE = ["recipe=resnet18", "sweep=random", "optim.lr=tag(log,interval(1e-4,1))", "optim=sgd,adamw"]
TRIALS = [  # lr, optim, state, accuracy
    ("0.01", "sgd", "done", 0.5),
    ("0.0001", "adamw", "pruned", 0.25),
    ("0.1", "sgd", "done", 0.75),
    ("1", "adamw", "failed", None),
    ("0.001", "adamw", "done", 0.625),
    ("0.5", "sgd", "done", float("nan")),
    ("0.02", "sgd", "done", 0.875),
    ("0.03", "sgd", "running", None),
]


def write_search(sweep: Path, trials=TRIALS, name: str = "random", space=SPACE) -> list[RunRecord]:
    jobs: list[dict[str, Any]] = []
    for number, (lr, optim, state, metric) in enumerate(trials):
        overrides = ["recipe=resnet18", f"optim.lr={lr}", f"optim={optim}"]
        job = {"number": number, "name": f"{number}_job", "overrides": overrides, "state": state}
        if metric is not None:
            job |= {"metric": metric, "metric_name": "accuracy", "higher_is_better": True}
        jobs.append(job)
        directory = sweep / f"{number}_job"
        directory.mkdir(parents=True)
        (directory / "config.yaml").write_text(f"sweep:\n  name: {name}\noptim:\n  lr: {lr}\n")
        (directory / "overrides.txt").write_text("\n".join(overrides))
        write_json(directory / "result.json", {"state": state, "metric_name": "accuracy", "metric": metric})
    (sweep / "sweep.json").write_text(json.dumps({"jobs": jobs, "overrides": list(space), "version": 1}))
    return [RunRecord.read(sweep / job["name"]) for job in jobs]


def search_of(sweep: Path, **more: Any) -> Search:
    found = Search.read(sweep, write_search(sweep, **more))
    assert found is not None
    return found


class Drawn(HTMLParser):
    """Charts of a page by their names, each with the attributes of its paths and the labels beside it."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.paths: dict[str, list[dict[str, str | None]]] = {}
        self.labels: dict[str, list[tuple[str, str]]] = {}
        self._chart, self._label = "", ""
        self.feed(page.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        if tag == "figure":
            self._chart = str(given["aria-label"])
        elif tag == "path" and self._chart:
            self.paths.setdefault(self._chart, []).append(given)
        self._label = f"{given.get('class')} {given.get('style')}" if tag == "span" else ""

    def handle_data(self, data: str) -> None:
        if self._label:
            self.labels.setdefault(self._chart, []).append((self._label, data))

    def lines(self, chart: str) -> dict[str, dict[str, str | None]]:
        return {str(each["data-name"]): each for each in self.paths[chart] if "data-name" in each}


def test_the_history_has_the_best_so_far_and_marks_what_was_pruned_or_failed(tmp_path: Path) -> None:
    chart = search_of(tmp_path).chart()
    lines = {line.name: (line.x.tolist(), line.y.tolist()) for line in chart.lines}
    assert lines["best so far"] == ([0, 2, 4, 6, 6], [50, 75, 75, 87.5, 87.5])
    assert lines["done"] == ([0, 2, 4, 6], [50, 75, 62.5, 87.5])
    assert lines["pruned"] == ([1], [25])
    assert list(chart.marks) == [(3.0, "failed"), (5.0, "failed")], "the metric of one is NaN"
    assert chart.unit == "%"


def test_of_a_loss_the_lowest_is_the_best(tmp_path: Path) -> None:
    write_search(tmp_path)
    text = (tmp_path / "sweep.json").read_text().replace('better": true', 'better": false')
    (tmp_path / "sweep.json").write_text(text.replace('"accuracy"', '"loss"'))
    search = Search.read(tmp_path, [RunRecord.read(tmp_path / "0_job")])
    assert search is not None
    best, *_ = search.chart().lines
    assert best.y.tolist() == [0.5, 0.5, 0.5, 0.5, 0.5]


@needs_optuna
@pytest.mark.parametrize("words", ["0,1,0.1", "0.1,0.7,0.2", "0,0.8,0.1", "1,10,3", "1e-3,2e-2,3e-3"])
def test_each_value_of_a_range_is_in_its_distribution(words: str) -> None:
    import optuna

    (dimension,) = space_of([f"w=range({words})"]).dimensions
    assert isinstance(dimension, Choices)
    kind = distribution(dimension, optuna.distributions)
    for value in dimension.values:
        optuna.trial.create_trial(
            params={"w": value_of(dimension, value)}, distributions={"w": kind}, value=1.0
        )


@pytest.mark.parametrize(
    "damage",
    [
        "",
        "[]",
        '{"jobs": [{"number": 0}]}',
        '{"jobs": 3, "overrides": []}',
    ],
)
def test_a_damaged_record_leaves_the_search_out(tmp_path: Path, damage: str) -> None:
    runs = write_search(tmp_path)
    (tmp_path / "sweep.json").write_text(damage)
    assert "<h2>Search</h2>" not in write_sweep_report(tmp_path, runs).read_text()


def test_a_grid_has_no_search_and_a_search_without_an_ended_trial_has_no_charts(tmp_path: Path) -> None:
    assert Search.read(tmp_path / "a", write_search(tmp_path / "a", name="grid")) is None
    runs = write_search(tmp_path / "b", trials=[("0.1", "sgd", "running", None)])
    assert "<figure" not in write_sweep_report(tmp_path / "b", runs).read_text()


def test_a_page_of_a_grid_imports_no_optuna() -> None:
    code = "import sys, launcher.report.page, launcher.report.comparison; assert 'optuna' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_real_search_has_its_trials_on_the_page(tmp_path: Path) -> None:
    write_recipe(tmp_path)
    words = ("sweep=random", "optim.lr=tag(log,interval(1e-3,1))", "optim.momentum=0.5,0.9")
    short = ("sweep.stop.max_trials=5", "train.epochs=1", "-m", "hydra.sweep.dir=sweep")
    with Parent(tmp_path, *short, *words, nproc=1) as parent:
        assert parent.end(90) == 0, parent.stderr
    drawn = Drawn(tmp_path / "sweep" / "report.html")
    jobs = json.loads((tmp_path / "sweep" / "sweep.json").read_text())["jobs"]
    done = drawn.lines("Accuracy of each trial")["done"]
    assert [float(y) for y in str(done["data-y"]).split()] == pytest.approx([100 * j["metric"] for j in jobs])
