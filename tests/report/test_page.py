"""report.html: from files alone, complete, self-contained, and safe to open."""

import base64
import hashlib
import math
from html.parser import HTMLParser

import pytest

from launcher.cli import main
from launcher.report import page
from launcher.report.charts import gradient_chart
from launcher.report.charts.run_charts import run_charts
from launcher.report.event_history import read_history
from launcher.report.run import Run
from launcher.report.run_groups import grouped
from launcher.run_dir.atomic import write_json
from launcher.telemetry import Telemetry
from launcher.telemetry.event_log import EventLog
from launcher.telemetry.events import GradientsEvent, WarningEvent
from launcher.trainer.results import write_page


def write_report(run_dir):
    return page.write_report(Run.read(run_dir))


HOSTILE = "<script>alert('x')</script> & \"quoted\""
TIMES = {"step_ms": 10.0, "data_ms": 7.1, "compute_ms": 2.0, "communication_ms": 0.5, "update_ms": 0.4}


def write_events(run_dir, with_scale=True, with_accuracy=True):
    log = EventLog(run_dir / "metrics.jsonl")
    log.append({"event": "decision", "time": 0.0, "step": 0, "topic": "precision", "text": f"fp16 {HOSTILE}"})
    for step in range(1, 61):
        scale = {"scale": 65536.0 / 2 ** (step // 20)} if with_scale else {}
        if with_scale and step % 20 == 0:
            overflow = {"ranks": [1], "parameters": [f"layer{k}.weight" for k in range(9)], **scale}
            log.append({"event": "overflow", "time": 0.0, "step": step, **overflow})
        if step % 5 == 0:
            loss = math.inf if step == 20 else 2.5 / step
            values = {"epoch": step // 30, "loss": loss, "lr": 0.1, "grad_norm": 1.0 / step, **scale, **TIMES}
            log.append({"event": "step", "time": 0.0, "step": step, **values})
        if step % 30 == 0:
            metrics = {"accuracy": 0.9 + step / 1000, "macro_f1": 0.9} if with_accuracy else {}
            values = {"epoch": step // 30 - 1, "val_loss": 0.3, **metrics, "samples": 30}
            log.append({"event": "eval", "time": 0.0, "step": step, **values})
    log.append({"event": "warning", "time": 0.0, "step": 60, "text": HOSTILE})
    log.close()


def write_run(run_dir, classes=("zero", "one", HOSTILE)):
    write_events(run_dir)
    matrix = [
        [9 if row == column else int(column == 0) for column in range(len(classes))]
        for row in range(len(classes))
    ]
    result = {
        "state": "done",
        "exit": 0,
        "metric_name": "accuracy",
        "metric": 0.96,
        "metrics": {"accuracy": 0.96},
    }
    result |= {
        "steps": 60,
        "seconds": 3.0,
        "training_seconds": 83.0,
        "samples_per_s": 1200.0,
        "skipped_steps": 3,
        "note": HOSTILE,
    }
    write_json(run_dir / "result.json", {**result, "confusion_matrix": matrix, "classes": list(classes)})
    write_json(
        run_dir / "env.json", {"python": "3.11", "packages": {"torch": "2.13.0"}, "devices": [HOSTILE]}
    )
    (run_dir / "config.yaml").write_text(f"seed: 0\nnote: {HOSTILE}\n")
    (run_dir / "classification_report.txt").write_text(f"precision\n{HOSTILE}\n")


class Page(HTMLParser):
    """Tags, attributes and text of a page; tags must be balanced."""

    VOID = ("meta", "img", "br")

    def __init__(self, path):
        super().__init__()
        self.tags, self.attributes, self.text, self.script, self._open = [], [], "", "", []
        self.feed(path.read_text(encoding="utf-8"))
        assert self._open == []

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.attributes += attributes
        if tag not in self.VOID:
            self._open.append(tag)

    def handle_endtag(self, tag):
        assert self._open.pop() == tag

    def handle_data(self, data):
        if self._open[-1:] == ["script"]:
            self.script += data
        else:
            self.text += data


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("outputs") / "run"
    run_dir.mkdir()
    write_run(run_dir)
    return Page(write_report(run_dir))


SHOWN = "96.00 %|1:23|1,200|input-bound: 71 %|71.0 %|precision fp16|layer0.weight|and 5 more|seed: 0|2.13.0"
SHOWN += "|32,768|93.00 %|step 60: "


@pytest.mark.parametrize("text", SHOWN.split("|"))
def test_the_page_shows(finished, text):
    assert text in finished.text


def test_the_page_escapes_whatever_it_was_given(finished):
    assert finished.tags.count("script") == 1
    assert HOSTILE not in finished.script
    assert finished.text.count(HOSTILE) >= 4, "decision, warning, config, report"


def test_the_page_loads_nothing(finished):
    sources = [
        value for name, value in finished.attributes if name in ("src", "href", "srcset", "action", "data")
    ]
    assert sources == []
    assert not {"link", "iframe", "object", "form", "base"} & set(finished.tags)
    assert dict(finished.attributes)["content"]
    (policy,) = [value for name, value in finished.attributes if value and value.startswith("default-src")]
    digest = base64.b64encode(hashlib.sha256(finished.script.encode()).digest()).decode()
    assert policy == f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"


def test_a_page_can_be_made_of_the_little_that_a_young_run_has(tmp_path):
    page = Page(write_report(tmp_path))
    assert "ended without a result" in page.text
    assert "img" not in page.tags
    assert "h2" not in page.tags


def test_what_the_recipe_showed_last_is_on_the_page(tmp_path):
    log = EventLog(tmp_path / "metrics.jsonl")
    shown = {"texts": {"sample": "an old one"}, "numbers": {}, "pictures": {}}
    log.append({"event": "after_evaluation", "time": 0.0, "step": 1, **shown})
    pictures = {"masks": "/some/pictures/masks.png"}
    shown = {"texts": {"sample": f"once {HOSTILE}"}, "numbers": {"length": 7.5}, "pictures": pictures}
    log.append({"event": "after_evaluation", "time": 0.0, "step": 2, **shown})
    log.close()
    page = Page(write_report(tmp_path))
    for part in ("Shown by the recipe", "After step 2.", f"once {HOSTILE}", "7.5", pictures["masks"]):
        assert part in page.text
    assert "an old one" not in page.text


def test_of_many_skipped_steps_the_first_are_shown_and_the_rest_counted(tmp_path):
    log = EventLog(tmp_path / "metrics.jsonl")
    for step in range(1000):
        log.append({"event": "overflow", "time": 0.0, "step": step, "scale": 1.0, "ranks": [1]})
    straggler = {"rank": 2, "host": "c", "late_ms": 500.0, "step_ms": 800.0, "cause": "data"}
    log.append(
        {"event": "straggler", "time": 0.0, "step": 153, "first_step": 50, "last_step": 103, **straggler}
    )
    log.close()
    path = write_report(tmp_path)
    assert "and 900 more, in metrics.jsonl" in Page(path).text
    assert "<td>data</td>" in path.read_text(), "the slow part of a rank that others wait for"


def test_a_failed_run_shows_its_error(tmp_path):
    write_json(tmp_path / "result.json", {"state": "failed", "exit": 5, "error": f"diverged {HOSTILE}"})
    page = Page(write_report(tmp_path))
    assert "failed" in page.text
    assert f"diverged {HOSTILE}" in page.text


@pytest.mark.parametrize(
    ("name", "content", "warning"),
    [
        ("result.json", b"{", "result.json is damaged: left out (Expecting property name"),
        ("env.json", b"[]", "holds list, not a JSON object"),
        ("metrics.jsonl", b'{"ev\n{"event": "decision", "step": 1}\n', "damaged: left out 1 line"),
    ],
)
def test_a_damaged_file_is_left_out_with_a_warning(tmp_path, capsys, name, content, warning):
    (tmp_path / name).write_bytes(content)
    assert main(["report", str(tmp_path)]) == 0
    out, err = capsys.readouterr()
    assert out.endswith(f"\n{tmp_path / 'report.html'}\n")
    assert err.startswith("warning: ")
    assert err.count("\n") == 1
    assert warning in err


class Matrix(HTMLParser):
    """Rows of the confusion matrix on a page: the share and the text of each cell."""

    def __init__(self, path):
        super().__init__()
        self.rows, self.heads, self._in_table, self._text = [], [], False, None
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attributes):
        given = dict(attributes)
        if tag == "table":
            self._in_table = given.get("class", "").startswith("confusion")
        elif tag == "tr" and self._in_table:
            self.rows.append([])
        elif tag == "td" and self._in_table:
            self.rows[-1].append([given.get("style", ""), ""])
            self._text = self.rows[-1][-1]
        elif tag == "th" and self._in_table:
            self.heads.append(given["title"])

    def handle_endtag(self, tag):
        self._in_table &= tag != "table"
        self._text = None

    def handle_data(self, data):
        if self._text is not None:
            self._text[1] = data


def test_the_confusion_matrix_is_a_table_with_a_colour_and_a_count_in_each_cell(tmp_path):
    write_json(
        tmp_path / "result.json", {"confusion_matrix": [[0, 0, 0], [1, 3, 0], [0, 0, 2]], "classes": [*"ab$"]}
    )
    found = Matrix(write_report(tmp_path))
    assert found.heads == [*"ab$", *"ab$"]
    head, never, *cells = [[(style, text) for style, text in row] for row in found.rows]
    assert head == [("", "")]
    assert never == [("", "")] * 3, "a class that never occurs does not divide by zero"
    assert cells == [
        [("--share:50", "1"), ("--share:87", "3"), ("", "")],
        [("", ""), ("", ""), ("--share:100", "2")],
    ]


def test_a_page_that_cannot_be_drawn_is_a_warning(tmp_path):
    write_run(tmp_path)
    (tmp_path / "report.html").mkdir()
    (tmp_path / "log").mkdir()
    with Telemetry([EventLog(tmp_path / "log" / "metrics.jsonl")]) as telemetry:
        write_page(tmp_path, telemetry)
    (warning,) = [event.text for event in read_history(tmp_path / "log").all(WarningEvent)]
    assert warning.startswith("report.html could not be drawn: IsADirectoryError: ")


def test_the_curves_show_the_recorded_values(tmp_path):
    """The lines themselves, not pixels: each chart holds what the events say, without non-finite values."""
    write_events(tmp_path)
    charts = {chart.title: chart for chart in run_charts(grouped([Run.read(tmp_path)]))}
    lines = {
        name: [list(map(list, zip(line.x, line.y, strict=True))) for line in chart.lines]
        for name, chart in charts.items()
    }
    training, held_out = lines["Loss"]
    assert training == [[step, 2.5 / step] for step in range(5, 61, 5) if step != 20]
    assert held_out == [[30, 0.3], [60, 0.3]]
    assert lines["Accuracy, validation"] == [[[30, 93.0], [60, 96.0]]]
    assert charts["Accuracy, validation"].note == "Best: 96.00 % at step 60."
    scale, skipped = lines["Loss scale"]
    assert skipped == [[20, 32768.0], [40, 16384.0], [60, 8192.0]]
    assert scale[0] == [5, 65536.0]
    assert scale[-1] == [60, 8192.0]


def gradients_event(scale=1024.0, histogram=None):
    """Exponents -20 and -19 hold elements, and 5 of 100 are zero."""
    histogram = histogram or [{-20: 45, -19: 50}.get(exponent, 0) for exponent in range(-40, 17)]
    shares = {"zero_share": 0.05, "zero_share_at_scale_1": 0.5, "near_max_share": 0.0}
    layers = {f"layer{k}.{HOSTILE}": {**shares, "zero_share": k / 100} for k in range(40)}
    numbers = {"zeros": 5, "first_exponent": -40, "histogram": histogram, "layers": layers}
    return {"event": "gradients", "time": 0.0, "step": 100, "scale": scale, **shares, **numbers}


def write_gradients(run_dir, *events):
    log = EventLog(run_dir / "metrics.jsonl")
    for event in events:
        log.append(event)
    log.close()


def test_the_exponents_are_drawn_where_they_travelled_and_where_scale_1_would_have_them(tmp_path):
    write_gradients(tmp_path, gradients_event(scale=1.0), gradients_event())
    histogram = gradient_chart.histogram(read_history(tmp_path).last(GradientsEvent))
    bars = [list(zip(line.x, line.y, strict=True)) for line in histogram.lines]
    assert bars == [[(-30, 45), (-29, 50)], [(-20, 45), (-19, 50)]], "the latest event: 2^10 lower at scale 1"
    assert [line.name for line in histogram.legend] == [
        "at scale 1: another 45.00 % would be zero",
        "as sent, at scale 2^10: 5.00 % are zero",
    ]
    assert [name for _, _, name, _ in histogram.zones] == ["zero", "subnormal", "normal", "inf"]


@pytest.mark.parametrize("event", [gradients_event(), gradients_event(1.0), gradients_event(1.0, [0] * 57)])
def test_any_gradients_can_be_drawn_and_the_page_shows_them(tmp_path, event):
    write_gradients(tmp_path, event)
    assert "Gradients in the range of fp16" in Page(write_report(tmp_path)).text
