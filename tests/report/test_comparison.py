"""Runs of a sweep side by side, from files alone."""

from __future__ import annotations

import csv
import math
from pathlib import Path

import pytest

from launcher.report import comparison
from launcher.report.comparison import is_sweep, read_job, settings_of, write_comparison
from launcher.run_dir.atomic import write_json
from launcher.telemetry.events import EventLog


def write_job(sweep: Path, number: int, overrides: list[str], loss: float = 1.0, state: str = "done") -> Path:
    directory = sweep / f"{number}_{','.join(overrides)}"
    directory.mkdir(parents=True)
    (directory / "overrides.txt").write_text("".join(f"{line}\n" for line in overrides))
    log = EventLog(directory / "metrics.jsonl")
    for step in (5, 10, 15):
        log.write({"event": "step", "time": 0.0, "step": step, "loss": loss / step})
    log.write({"event": "eval", "time": 0.0, "step": 15, "accuracy": 1 - loss / 10})
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
    jobs = [read_job(directory) for directory in comparison.job_directories(sweep)]
    assert [job.directory.name.split("_")[0] for job in jobs] == [str(number) for number in range(12)]
    settings = settings_of(jobs)
    assert [(setting.label, len(setting.jobs)) for setting in settings] == [("fp32", 6), ("fp16", 6)]


def test_several_keys_are_named_and_equal_runs_are_one_setting(tmp_path) -> None:
    for number, (lr, wd) in enumerate([(1, 2), (1, 3), (2, 2)]):
        write_job(tmp_path, number, [f"optim.lr={lr}", f"optim.weight_decay={wd}"])
    jobs = [read_job(directory) for directory in comparison.job_directories(tmp_path)]
    assert next(s.label for s in settings_of(jobs)) == "optim.lr=1, optim.weight_decay=2"
    assert [s.label for s in settings_of(jobs[:1])] == ["all"]


def test_the_files_hold_means_spreads_and_every_job(sweep) -> None:
    picture, table, rows, _ = write_comparison(sweep)
    assert picture.read_bytes().startswith(b"\x89PNG")
    text = table.read_text()
    mean, deviation = 1 - 3.5 / 10, math.sqrt(3.5) / 10
    assert f"| fp32 | 6 | {mean:.2%}".replace("%", " %") + f" ± {deviation:.2%} |".replace("%", " %") in text
    assert "| 6 | 1:01 |" in text
    with open(rows, newline="") as file:
        table_rows = list(csv.DictReader(file))
    assert len(table_rows) == 12
    assert (table_rows[7]["precision"], table_rows[7]["seed"]) == ("fp16", "1")
    assert float(table_rows[7]["accuracy"]) == pytest.approx(0.7)


def test_the_picture_has_a_bold_mean_and_a_thin_line_per_seed(sweep, monkeypatch) -> None:
    drawn = []
    monkeypatch.setattr(comparison, "save", lambda figure, path: drawn.append(figure) or path)
    write_comparison(sweep)
    loss, accuracy = drawn[0].axes
    assert len(loss.lines) == len(accuracy.lines) == 2 * (6 + 1)
    bold = [line for line in loss.lines if line.get_linewidth() > 2]
    assert [line.get_label() for line in bold] == ["fp32", "fp16"]
    assert list(bold[0].get_ydata()) == pytest.approx([3.5 / 5, 3.5 / 10, 3.5 / 15])
    assert bold[0].get_color() != bold[1].get_color()
    thin = [line for line in loss.lines if line.get_color() == bold[1].get_color() and line is not bold[1]]
    assert len(thin) == 6


def test_a_failed_and_an_unfinished_job_are_told_and_not_averaged(tmp_path) -> None:
    write_job(tmp_path, 0, ["optim.lr=1", "seed=0"])
    write_job(tmp_path, 1, ["optim.lr=1", "seed=1"], state="failed")
    directory = write_job(tmp_path, 2, ["optim.lr=9", "seed=0"], loss=math.nan)
    (directory / "result.json").unlink()
    _, table, rows = write_comparison(tmp_path)
    assert "| 1 | 1 of 2 done | 90.00 % |" in table.read_text()
    assert "| 9 | 0 of 1 done | - |" in table.read_text()
    assert "not finished" in rows.read_text()


def test_a_job_that_failed_before_its_first_event_is_a_failed_job(tmp_path) -> None:
    write_job(tmp_path, 0, ["tracker=none"])
    directory = write_job(tmp_path, 1, ["tracker=trackio"], state="failed")
    (directory / "metrics.jsonl").unlink()
    (tmp_path / "notes").mkdir()
    _, table, rows = write_comparison(tmp_path)
    assert "| trackio | 0 of 1 done | - |" in table.read_text()
    assert len(rows.read_text().splitlines()) == 3
    assert not is_sweep(directory)


def test_an_experiment_says_what_it_shows(tmp_path) -> None:
    write_job(tmp_path, 0, ["experiment=precision_ablation", "precision=fp16"])
    write_job(tmp_path, 1, ["experiment=precision_ablation", "precision=fp32"])
    _, table, *_ = write_comparison(tmp_path)
    assert "The effect of fp32 masters" in table.read_text()


def test_markup_in_names_is_shown_as_it_is(tmp_path) -> None:
    sweep = tmp_path / "a<b>|c"
    write_job(sweep, 0, ["model=<i>x"])
    write_job(sweep, 1, ["model=y|z"])
    page = next(path for path in write_comparison(sweep) if path.name == "summary.md").read_text()
    assert page.startswith("# a&lt;b&gt;\\|c\n")
    assert "| &lt;i&gt;x | 1 |" in page
    assert r"| y\|z | 1 |" in page


def test_a_run_is_no_sweep(sweep) -> None:
    assert is_sweep(sweep)
    assert not is_sweep(comparison.job_directories(sweep)[0])
    assert not is_sweep(sweep / "nothing")


def test_dollars_in_overrides_are_no_formulas(tmp_path) -> None:
    for number, name in enumerate((r"$\frac{x$", "b")):
        write_job(tmp_path, number, [f"model.name={name}"])
    assert tmp_path / comparison.COMPARISON in write_comparison(tmp_path)
