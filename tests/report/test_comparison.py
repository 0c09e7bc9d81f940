"""Runs of a sweep side by side, from files alone."""

from __future__ import annotations

import csv
import math
from pathlib import Path

import pytest

from launcher.report import comparison
from launcher.report.charts.run_charts import mean_of, run_charts
from launcher.report.comparison import is_sweep, job_directories
from launcher.report.curve import Curve
from launcher.report.run import Run
from launcher.report.run_groups import grouped
from launcher.report.watching import rest_of_sweep
from launcher.run_dir.atomic import write_json
from launcher.telemetry.event_log import EventLog


def runs_of(sweep: Path) -> list[Run]:
    return [Run.read(directory) for directory in job_directories(sweep)]


def write_comparison(sweep: Path) -> list[Path]:
    return comparison.write_comparison(sweep, runs_of(sweep))


def write_job(sweep: Path, number: int, overrides: list[str], loss: float = 1.0, state: str = "done") -> Path:
    directory = sweep / f"{number}_{','.join(overrides)}"
    directory.mkdir(parents=True)
    (directory / "overrides.txt").write_text("".join(f"{line}\n" for line in overrides))
    log = EventLog(directory / "metrics.jsonl")
    for step in (5, 10, 15):
        log.append({"event": "step", "time": 0.0, "step": step, "loss": loss / step})
    log.append({"event": "eval", "time": 0.0, "step": 15, "accuracy": 1 - loss / 10})
    log.close()
    result = {"state": state, "exit": 0 if state == "done" else 5}
    if state == "done":
        result |= {"metric_name": "accuracy", "metric": 1 - loss / 10, "metrics": {"accuracy": 1 - loss / 10}}
        result |= {
            "steps": 15,
            "skipped_steps": 1,
            "seconds": 1.0,
            "training_seconds": 61.0,
            "samples_per_s": 10.0,
        }
    write_json(directory / "result.json", result)
    return directory


@pytest.fixture
def sweep(tmp_path) -> Path:
    number = 0
    for precision in ("fp32", "fp16"):
        for seed in range(6):
            common = ["recipe=resnet18", f"precision={precision}", f"seed={seed}"]
            write_job(tmp_path, number, common, loss=1 + seed + (precision == "fp16"))
            number += 1
    return tmp_path


def test_runs_that_differ_in_the_seed_alone_belong_together_in_the_order_they_ran(sweep) -> None:
    jobs = runs_of(sweep)
    assert [job.directory.name.split("_")[0] for job in jobs] == [str(number) for number in range(12)]
    settings = grouped(jobs)
    assert [(setting.label, len(setting.runs)) for setting in settings] == [("fp32", 6), ("fp16", 6)]


def test_several_keys_are_named_and_equal_runs_are_one_setting(tmp_path) -> None:
    for number, (lr, wd) in enumerate([(1, 2), (1, 3), (2, 2)]):
        write_job(tmp_path, number, [f"optim.lr={lr}", f"optim.weight_decay={wd}"])
    jobs = runs_of(tmp_path)
    assert next(s.label for s in grouped(jobs)) == "optim.lr=1, optim.weight_decay=2"
    assert [s.label for s in grouped(jobs[:1] * 2)] == ["all"]


def test_the_files_hold_means_spreads_and_every_job(sweep) -> None:
    table, rows, _ = write_comparison(sweep)
    text = table.read_text()
    mean, deviation = 1 - 3.5 / 10, math.sqrt(3.5) / 10
    assert f"| fp32 | 6 | {mean:.2%}".replace("%", " %") + f" ± {deviation:.2%} |".replace("%", " %") in text
    assert "| 6 | 1:01 |" in text
    with open(rows, newline="") as file:
        table_rows = list(csv.DictReader(file))
    assert len(table_rows) == 12
    assert (table_rows[7]["precision"], table_rows[7]["seed"]) == ("fp16", "1")
    assert float(table_rows[7]["accuracy"]) == pytest.approx(0.7)


def test_a_chart_has_a_bold_mean_and_a_thin_line_per_seed(sweep) -> None:
    charts = {chart.title: chart for chart in run_charts(grouped(runs_of(sweep)))}
    loss, accuracy = charts["train_loss"], charts["Accuracy, validation"]
    assert len(loss.lines) == len(accuracy.lines) == 2 * (6 + 1)
    bold = [line for line in loss.lines if line.style == "mean"]
    assert [line.name for line in bold] == ["fp32, mean", "fp16, mean"]
    assert list(bold[0].y) == pytest.approx([3.5 / 5, 3.5 / 10, 3.5 / 15])
    assert bold[0].color != bold[1].color, "which selects the dashes too: on grey paper they differ"
    thin = [line for line in loss.lines if line.color == bold[1].color and line is not bold[1]]
    assert [line.style for line in thin] == ["faint"] * 6


def test_a_failed_and_an_unfinished_job_are_told_and_not_averaged(tmp_path) -> None:
    write_job(tmp_path, 0, ["optim.lr=1", "seed=0"])
    write_job(tmp_path, 1, ["optim.lr=1", "seed=1"], state="failed")
    directory = write_job(tmp_path, 2, ["optim.lr=9", "seed=0"], loss=math.nan)
    (directory / "result.json").unlink()
    table, rows = write_comparison(tmp_path)
    assert "| optim.lr=1 | 1 of 2 done | 90.00 % |" in table.read_text()
    assert "| optim.lr=9 | 0 of 1 done | - |" in table.read_text()
    assert "ended without a result" in rows.read_text()


def test_jobs_that_were_pruned_or_failed_have_their_numbers_and_reasons(tmp_path) -> None:
    write_job(tmp_path, 0, ["optim.lr=1", "sweep.stop.max_trials=3"])
    pruned, failed = (write_job(tmp_path, n, [f"optim.lr={n + 1}"], state="failed") for n in (1, 2))
    write_json(pruned / "result.json", {"state": "pruned", "exit": 11})
    write_json(failed / "result.json", {"state": "failed", "exit": 5, "error": "diverged | at step 3\nmore"})
    verdict = {"metric": 0.25, "metric_name": "accuracy", "error": "not among the best third"}
    jobs = [{"name": pruned.name, "state": "pruned", **verdict}, {"name": failed.name, "state": "failed"}]
    write_json(tmp_path / "sweep.json", {"jobs": jobs})
    table, rows = write_comparison(tmp_path)
    text = table.read_text()
    assert f"- {pruned.name}: pruned, accuracy 25.00 %: not among the best third" in text
    assert f"- {failed.name}: failed, accuracy 90.00 %: diverged \\| at step 3\n" in text
    with open(rows, newline="") as file:
        found = {row["job"]: row for row in csv.DictReader(file)}
    assert (found[pruned.name]["metric"], found[pruned.name]["error"]) == ("0.25", "not among the best third")
    assert (found[failed.name]["state"], found[failed.name]["error"]) == ("failed", "diverged | at step 3")
    assert "sweep.stop.max_trials" not in text + rows.read_text().splitlines()[0]


def test_a_job_that_failed_before_its_first_event_is_a_failed_job(tmp_path) -> None:
    write_job(tmp_path, 0, ["precision=fp32"])
    directory = write_job(tmp_path, 1, ["precision=fp16"], state="failed")
    (directory / "metrics.jsonl").unlink()
    (tmp_path / "notes").mkdir()
    table, rows, _ = write_comparison(tmp_path)
    assert "| fp16 | 0 of 1 done | - |" in table.read_text()
    assert len(rows.read_text().splitlines()) == 3
    assert not is_sweep(directory)


def test_a_run_is_no_sweep(sweep) -> None:
    assert is_sweep(sweep)
    assert not is_sweep(comparison.job_directories(sweep)[0])
    assert not is_sweep(sweep / "nothing")


def curve_of(*points: tuple[float, float]) -> Curve:
    found = Curve()
    for x, y in points:
        found.add(x, y)
    return found


def means_of(curves: list[Curve]) -> dict[float, float]:
    x, y = mean_of(curves)
    return dict(zip(x.tolist(), y.tolist(), strict=True))


def test_the_mean_is_taken_where_all_lines_are_and_between_their_steps() -> None:
    early, late = curve_of((0, 0.0), (10, 10.0), (20, 0.0)), curve_of((5, 3.0), (15, 3.0), (30, 3.0))
    assert means_of([early, late]) == {5: 4.0, 10: 6.5, 15: 4.0, 20: 1.5}
    assert means_of([curve_of((0, 1.0)), curve_of((1, 1.0))]) == {}
    assert means_of([]) == {}


@pytest.mark.parametrize(
    ("metric_name", "higher", "order"),
    [
        ("accuracy", True, ["2", "3", "1"]),
        ("rmse", False, ["1", "3", "2"]),
        ("val_loss", None, ["1", "3", "2"]),
    ],
)
def test_the_table_begins_with_the_best_and_says_its_command(tmp_path, metric_name, higher, order) -> None:
    values = {"1": 0.1, "2": 0.9, "3": 0.5}
    for number, (lr, value) in enumerate(values.items()):
        directory = write_job(tmp_path, number, ["recipe=resnet18", f"optim.lr={lr}", "seed=0"])
        result = {"state": "done", "metric_name": metric_name, "metric": value, "metrics": {"val_loss": 0.25}}
        write_json(
            directory / "result.json", result | ({} if higher is None else {"higher_is_better": higher})
        )
    write_job(tmp_path, 3, ["recipe=resnet18", "optim.lr=4", "seed=0"], state="failed")
    text = write_comparison(tmp_path)[0].read_text()
    rows = [line.split("|")[1].strip() for line in text.splitlines() if line.startswith("|")]
    assert rows == ["setting", "---", *(f"optim.lr={lr}" for lr in (*order, 4))]
    assert "| val_loss |" in text
    assert "| 0.25 |" in text
    assert f"Best: `python -m launcher recipe=resnet18 optim.lr={order[0]}`" in text


def test_the_command_of_the_best_has_the_tree_that_the_sweep_was_composed_from(tmp_path) -> None:
    for number in range(2):
        directory = write_job(tmp_path, number, ["recipe=rings", f"optim.lr={number + 1}"])
        write_json(directory / "result.json", {"state": "done", "metric_name": "accuracy", "metric": 0.5})
    write_json(tmp_path / "sweep.json", {"jobs": [], "config_dir": "/my tree"})
    text = write_comparison(tmp_path)[0].read_text()
    assert "Best: `python -m launcher --config-dir '/my tree' recipe=rings optim.lr=" in text


def test_all_jobs_of_a_large_sweep_are_read(tmp_path):
    jobs = [{"name": str(k), "state": "waiting"} for k in range(10_000 + 1)]
    write_json(tmp_path / "sweep.json", {"jobs": jobs})
    assert len(comparison.jobs_of(tmp_path)) == 10_000 + 1
    assert rest_of_sweep(tmp_path, {})[0].startswith("10,001 jobs planned, 10001 left")
