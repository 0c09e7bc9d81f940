"""`report RUN...`: one page for several runs, the table in the terminal, and what it refuses."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import time
from pathlib import Path

import pytest

from launcher.cli import main
from launcher.report.charts.run_charts import best_of
from launcher.report.run import Run
from launcher.report.run_groups import NUM_COLORS, grouped
from launcher.report.watching import RunView, run_screen
from launcher.run_dir.atomic import json_line, write_json
from launcher.telemetry.event_log import EventLog
from tests.limits import at_most
from tests.report.test_page import HOSTILE, Page

SERIES = re.compile(r'data-name="([^"]*)" data-x="([^"]*)" data-y="([^"]*)"')


def write_run(
    directory: Path, *, seed=0, lr=0.1, steps=40, metric="accuracy", result=None, config=True
) -> Path:
    directory.mkdir(parents=True)
    events = [{"event": "start", "time": 100.0, "step": 0, "total_steps": steps, "format": 1}]
    for step in range(1, steps + 1):
        values = {"loss": 2.0 / step + seed, "lr": lr, "scale": 1024.0, "samples_per_s": 10.0, "skipped": 0}
        times = {
            "step_ms": 10.0,
            "data_ms": 7.0,
            "compute_ms": 2.0,
            "communication_ms": 0.5,
            "update_ms": 0.5,
        }
        events.append({"event": "step", "time": 100.0 + step, "step": step, "epoch": 0, **values, **times})
    if metric:
        events.append(
            {
                "event": "eval",
                "time": 200.0,
                "step": steps,
                "epoch": 0,
                "val_loss": 0.5,
                metric: 0.5 + seed / 10,
            }
        )
    (directory / "metrics.jsonl").write_bytes(b"".join(json_line(event) for event in events))
    done = {
        "state": "done",
        "exit": 0,
        "metric_name": metric or "val_loss",
        "metrics": {},
        "steps": steps,
        "seconds": 60.0,
    }
    done["metric"] = 0.5 + seed / 10 if metric else None
    if result is None or result:
        write_json(directory / "result.json", done | (result or {}))
    if config:
        (directory / "config.yaml").write_text(
            f"seed: {seed}\noptim:\n  lr: {lr}\nrun:\n  dir: {directory}\n"
        )
        given = [f"seed={seed}", f"run.dir={directory}", *([] if lr == 0.1 else [f"optim.lr={lr}"])]
        (directory / "overrides.txt").write_text("".join(f"{line}\n" for line in given))
    return directory


def series_of(page: Path) -> dict[str, list[tuple[str, str]]]:
    """By name of the line: x and y of each chart that has it."""
    found: dict[str, list[tuple[str, str]]] = {}
    for name, x, y in SERIES.findall(page.read_text(encoding="utf-8")):
        found.setdefault(name, []).append((x, y))
    return found


@pytest.fixture
def runs(tmp_path) -> list[Path]:
    return [
        write_run(tmp_path / "a", seed=0),
        write_run(tmp_path / "b", seed=1),
        write_run(
            tmp_path / "c", lr=0.2, result={"state": "failed", "exit": 5, "error": f"diverged {HOSTILE}"}
        ),
    ]


def test_runs_are_laid_over_each_other_and_seeds_have_a_mean(runs, tmp_path, capsys):
    place = tmp_path / "all.html"
    assert main(["report", *map(str, runs), "--out", str(place)]) == 0
    out = capsys.readouterr().out.splitlines()
    titles = ("run", "state", "steps", "train_loss", "accuracy", "time", "samples / s", "skipped", "bound by")
    assert out[0].split() == " ".join(titles).split()
    assert [line.split()[1] for line in (out[1], out[2], out[3])] == ["done", "done", "failed"]
    assert "input" in out[1]
    assert out[4] == f"  diverged {HOSTILE}"
    assert out[-1] == str(place)
    series = series_of(place)
    assert {"a", "b", "optim.lr=0.2", "optim.lr=0.1, mean"} <= series.keys()
    first, second, mean = (
        dict(zip(*map(str.split, series[n][0]), strict=True)) for n in ("a", "b", "optim.lr=0.1, mean")
    )
    assert (first["1"], second["1"], mean["1"]) == ("2", "3", "2.5")
    page = Page(place)
    for text in (
        "Over the seeds",
        "55.00 % ± 7.07 %",
        "optim.lr",
        "c: failed, exit 5",
    ):
        assert text in page.text
    assert page.tags.count("script") == 1


def test_without_out_the_page_of_several_runs_is_in_the_working_directory(
    runs, tmp_path, capsys, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    words = [str(run) for run in runs]
    assert main(["report", *words]) == 0
    assert main(["report", *words]) == 0, "a page of ours is replaced"
    assert capsys.readouterr().out.endswith("\nreport.html\n")
    assert not (runs[0] / "report.html").exists()
    (tmp_path / "report.html").write_text("my own page")
    assert main(["report", *words]) == 2
    assert "no page of a report. Give another name" in capsys.readouterr().err
    assert (tmp_path / "report.html").read_text() == "my own page"


@pytest.mark.parametrize("out", ["missing/x.html", "folder"])
def test_a_place_that_cannot_be_written_is_an_error_of_the_disk(runs, tmp_path, capsys, monkeypatch, out):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    assert main(["report", str(runs[0]), "--out", out]) == 8
    assert "Traceback" not in capsys.readouterr().err


def test_a_folder_that_is_no_run_is_refused(tmp_path, capsys):
    (tmp_path / "config.yaml").write_text("a: 1\n")
    assert main(["report", str(tmp_path)]) == 2
    assert "this is no run and no sweep" in capsys.readouterr().err
    assert sorted(os.listdir(tmp_path)) == ["config.yaml"]


def test_a_run_without_an_evaluation_and_one_that_is_still_going(tmp_path, capsys):
    going = write_run(tmp_path / "a", metric=None, result={})
    shutil.rmtree(going)
    going = write_run(tmp_path / "a", metric=None)
    (going / "result.json").unlink()
    status = {"state": "running", "step": 40, "total_steps": 100, "updated": time.time() - 3}
    write_json(going / "status.json", status)
    assert main(["report", str(going)]) == 0
    row = capsys.readouterr().out.splitlines()[1]
    assert "running" in row
    assert "40 of 100" in row
    write_json(going / "status.json", status | {"updated": time.time() - 300})
    assert main(["report", str(going)]) == 0
    assert "no sign of life for 5:00" in capsys.readouterr().out
    assert "no sign of life" in Page(going / "report.html").text


def test_markup_and_long_names_stay_text(tmp_path):
    name = "class " * 50
    run = write_run(
        tmp_path / "<b>x",
        result={"classes": [HOSTILE, name], "confusion_matrix": [[5, 1], [0, 7]], "note": HOSTILE},
    )
    write_json(run / "env.json", {"devices": [HOSTILE]})
    (run / "config.yaml").write_text(f"seed: 0\nlabel: '{'<img src=x onerror=alert(1)>' * 3}'\n")
    assert main(["report", str(run)]) == 0
    page = Page(run / "report.html")
    assert page.tags.count("script") == 1
    assert "img" not in page.tags
    assert "<b>x" in page.text
    assert "12 of 13 right" in page.text
    assert ("title", name) in page.attributes


@pytest.mark.parametrize(
    "event",
    [
        {"event": "gradients", "step": 1},
        {"event": "gradients", "step": 1, "scale": 0, "histogram": [1], "zeros": 0, "layers": {}},
        {"event": "checkpoint", "step": 1},
        {"event": "gpu", "step": 1},
        {"event": "decision", "step": 1},
        {"event": "eval", "step": 1, "val_loss": 0.5},
        {"event": "overflow", "step": 1},
        {"event": "end", "step": 1},
    ],
    ids=lambda event: event["event"],
)
def test_events_without_their_fields_break_nothing(tmp_path, event, capsys):
    run = write_run(tmp_path / "a", result={})
    with (run / "metrics.jsonl").open("ab") as file:
        file.write(json.dumps(event).encode() + b"\n" + b'{"event": "st')
    assert main(["report", str(run)]) == 0
    assert "Traceback" not in capsys.readouterr().err
    assert "Loss" in Page(run / "report.html").text
    assert run_screen(RunView(run).view())


def test_a_sweep_has_a_page_of_its_runs(tmp_path, capsys):
    for seed in range(2):
        run = write_run(tmp_path / "sweep" / f"{seed}_seed={seed}", seed=seed)
        (run / "overrides.txt").write_text(f"seed={seed}\n")
    assert main(["report", str(tmp_path / "sweep")]) == 0
    out = capsys.readouterr().out
    assert str(tmp_path / "sweep" / "report.html") in out
    assert Page(tmp_path / "sweep" / "report.html").text.strip().startswith("sweep")


def test_that_a_sweep_prunes_a_job_is_shown_as_no_failure(tmp_path, capsys):
    for state, reason in (("pruned", "not among the best third"), ("failed", "diverged at step 3")):
        write_run(tmp_path / "sweep" / state, result={"state": state, "error": reason})
    assert main(["report", str(tmp_path / "sweep")]) == 0
    page = (tmp_path / "sweep" / "report.html").read_text()
    assert "diverged at step 3" in page
    assert page.count('class="failure"') == 1


def test_of_more_settings_than_colours_the_best_are_drawn(tmp_path, capsys):
    runs = [write_run(tmp_path / str(k), seed=0, lr=k, result={"metric": k / 20}) for k in range(12)]
    drawn = best_of(grouped([Run.read(run) for run in runs]))
    assert [group.label for group in drawn] == [f"optim.lr={k}" for k in range(4, 12)]
    assert len(drawn) == NUM_COLORS
    assert main(["report", *map(str, runs), "--out", str(tmp_path / "all.html")]) == 0
    assert "Of the best 8 of 12 settings." in (tmp_path / "all.html").read_text()


def test_a_key_that_one_run_has_set_is_compared_with_the_config_of_the_others(tmp_path):
    runs = [write_run(tmp_path / "a", lr=0.1), write_run(tmp_path / "b", lr=0.2)]
    groups = grouped([Run.read(run) for run in runs])
    assert [group.label for group in groups] == ["optim.lr=0.1", "optim.lr=0.2"]
    (runs[0] / "overrides.txt").unlink()
    assert len(grouped([Run.read(runs[0])] * 2)) == 1


CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
POINTER = """
<script>
const plot = document.querySelector('.plot[data-low]');
plot.dispatchEvent(new PointerEvent('pointermove', {clientX: plot.getBoundingClientRect().left + 1}));
document.title = plot.querySelector('.tip').textContent;
</script></body>
"""


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="no chromium here")
def test_the_pointer_reads_values_in_a_browser(runs, tmp_path):
    place = tmp_path / "all.html"
    assert main(["report", *map(str, runs), "--out", str(place)]) == 0
    policy = r'<meta http-equiv="Content-Security-Policy"[^>]*>'  # does not allow the test's script
    place.write_text(re.sub(policy, "", place.read_text()).replace("</body>", POINTER))
    words = [
        str(CHROMIUM),
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--dump-dom",
        f"file://{place}",
    ]
    profile = f"--user-data-dir={tmp_path / 'profile'}"
    done = subprocess.run([*words[:1], profile, *words[1:]], capture_output=True, text=True, timeout=90)
    assert "<title>step 1\na: 2\nb: 3\noptim.lr=0.1, mean: 2.5\noptim.lr=0.2: 2</title>" in done.stdout


@pytest.mark.slow
def test_five_runs_of_100000_steps(tmp_path):
    first = write_run(tmp_path / "run0", steps=100_000)
    for number in range(1, 5):
        shutil.copytree(first, tmp_path / f"run{number}")
    began = time.perf_counter()
    runs = (str(tmp_path / f"run{k}") for k in range(5))
    assert main(["report", *runs, "--out", str(tmp_path / "x.html")]) == 0
    assert time.perf_counter() - began < at_most(60.0)
    assert (tmp_path / "x.html").stat().st_size < 3_000_000


@pytest.mark.parametrize(("name", "value"), [("far/accuracy", "48.75 %"), ("near/accuracy", "90.00 %")])
@pytest.mark.parametrize("with_value", [True, False])
def test_the_metric_that_runs_are_compared_by_is_shown_of_any_set(tmp_path, capsys, name, value, with_value):
    number = {"metric": float(value[:-2]) / 100} if with_value else {"metric": None}
    run = write_run(tmp_path / "a", metric=None, result={"metric_name": name, **number})
    with (run / "metrics.jsonl").open("ab") as file:
        for place, accuracy in (("near", 0.9), ("far", 0.4875)):
            fields = {"event": "eval", "time": 200.0, "step": 40, "set": place, "val_loss": 0.5}
            file.write(json_line({**fields, "accuracy": accuracy}))
    write_json(run / "status.json", {"state": "done", "exit": 0, "updated": 200.0})
    assert main(["report", str(run)]) == 0
    head, row = capsys.readouterr().out.splitlines()[:2]
    assert (name in head, value in row) == (True, True)
    page = (run / "report.html").read_text()
    assert name in page
    assert f"{name[:1].upper()}{name[1:]}, validation" in page
    assert f"{name} {value}" in "\n".join(run_screen(RunView(run).view()))


def test_of_several_validation_sets_each_number_and_curve_names_its_own(tmp_path, capsys):
    counts = {"confusion_matrix": [[9, 1], [0, 10]], "classes": ["a", "b"]}
    runs = []
    for name in "ab":
        run = write_run(
            tmp_path / name, metric=None, result={"metric_name": "accuracy", "metric": 0.95, **counts}
        )
        runs.append(str(run))
        with (run / "metrics.jsonl").open("ab") as file:
            for step in (20, 40):
                for place, accuracy in (("near", 0.95), ("far", 0.4)):
                    fields = {"event": "eval", "time": 200.0, "step": step, "set": place, "val_loss": 0.5}
                    file.write(json_line({**fields, "accuracy": accuracy}))
    assert main(["report", runs[0]]) == 0
    assert "near/accuracy" in capsys.readouterr().out.splitlines()[0]
    page = (tmp_path / "a" / "report.html").read_text()
    assert "19 of 20 right in near." in page
    for part in ("<dt>near/accuracy</dt>", "near/val_loss", "far/val_loss"):
        assert part in page
    for part in ("Near/accuracy, validation", "Far/accuracy, validation"):
        assert page.count(f'<figure class="chart" aria-label="{part}">') == 1
    assert "near/accuracy 95.00 %" in "\n".join(run_screen(RunView(Path(runs[0])).view()))
    assert main(["report", *runs, f"--out={tmp_path / 'both.html'}"]) == 0
    both = (tmp_path / "both.html").read_text()
    for part in ("Far/accuracy, validation", "near/val_loss", "far/val_loss"):
        assert f'<figure class="chart" aria-label="{part}">' in both


def test_a_config_that_was_edited_between_two_runs_makes_two_settings(tmp_path):
    for name, width, seed in (("a", 32, 0), ("b", 32, 1), ("c", 64, 0)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "overrides.txt").write_text(f"recipe=mine\nseed={seed}\n")
        (tmp_path / name / "config.yaml").write_text(
            f"model:\n  width: {width}\nseed: {seed}\nrun:\n  dir: {name}\n"
        )
    groups = grouped([Run.read(tmp_path / name) for name in "abc"])
    assert [(group.label, len(group.runs)) for group in groups] == [
        ("model.width=32", 2),
        ("model.width=64", 1),
    ]


def test_the_rate_of_an_unfinished_run_leaves_out_its_first_steps(tmp_path):
    log = EventLog(tmp_path / "metrics.jsonl")
    for step, rate in ((10, 1.0), (20, 100.0), (30, 200.0)):
        log.append({"event": "step", "time": 0.0, "step": step, "samples_per_s": rate})
    log.close()
    assert Run.read(tmp_path).samples_per_s == 150.0
