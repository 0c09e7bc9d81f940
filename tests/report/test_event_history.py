"""What the events of a run say, also while it grows."""

from __future__ import annotations

import pytest

from launcher.report.event_history import EventHistory, HistoryReader, read_history
from launcher.run_dir.atomic import json_line
from launcher.telemetry.event_log import EventLog
from tests.telemetry.console.test_console import shares_of


def step(number, **fields):
    values = {"event": "step", "time": 100.0 + number, "step": number, "epoch": 0, "loss": 2.0 / number}
    times = {
        "step_ms": 10.0 + number % 3,
        "data_ms": 1e-05,
        "compute_ms": 7.25,
        "communication_ms": 2.0,
        "update_ms": 0.5,
    }
    return values | times | fields


def history_of(*events):
    found = EventHistory()
    found.add(events)
    return found


def test_the_averages_of_the_time_are_those_of_the_console():
    events = [step(k) for k in range(1, 50)]
    found = history_of(*events[:30])
    found.add(events[30:])
    expected = shares_of(*events)
    assert found.time_shares.num_steps == expected.num_steps
    assert found.time_shares.step_ms == pytest.approx(expected.step_ms)
    assert found.time_shares.parts_ms == pytest.approx(expected.parts_ms)
    assert history_of(events[0]).time_shares == shares_of(*events[:1])
    assert history_of().time_shares is None


def test_a_run_lasts_from_its_first_start_to_its_last_event():
    found = history_of(
        {"event": "decision", "time": 1.0, "step": 0, "topic": "a", "text": "b"},
        {"event": "start", "time": 2.0, "step": 0},
        step(2, time=9.0),
        {"event": "start", "time": 52.0, "step": 2},
        step(3, time=60.0),
    )
    assert (found.began, found.last_time) == (2.0, 60.0)


def test_each_gpu_has_its_curves(tmp_path):
    gpu = {"index": 1, "uuid": "GPU-x", "power_w": 200.0, "throttled_s": {"power": 1.0, "heat": 0.5}}
    event = {"event": "gpu", "time": 1.0, "step": 5, "power_w": 400.0, "gpus": [gpu]}
    (tmp_path / "metrics.jsonl").write_bytes(json_line(event))
    ((name, curves),) = read_history(tmp_path).gpus.items()
    assert name == "GPU 1"
    points = {field: [values.tolist() for values in curve.points()] for field, curve in curves.items()}
    assert points == {"power_w": [[5.0], [200.0]], "throttled_s": [[5.0], [1.5]]}


def test_a_metric_that_is_named_like_one_of_another_set_has_a_curve_of_its_own():
    evaluation = {"event": "eval", "time": 1.0, "step": 1, "epoch": 0, "val_loss": 0.5}
    found = history_of({**evaluation, "set": "a", "b/f1": 0.25}, {**evaluation, "set": "b", "f1": 0.75})
    assert (found.evaluations["a/b/f1"].last, found.evaluations["b/f1"].last) == (0.25, 0.75)


def test_a_run_that_is_resumed_from_an_earlier_step_is_read_again(tmp_path):
    log, reader = EventLog(tmp_path / "metrics.jsonl"), HistoryReader(tmp_path)
    for number in range(1, 11):
        log.append(step(number))
    assert reader.poll().last_step.step == 10
    log.truncate_after(4, evaluates_again=False)
    log.append(step(5, loss=77.0))
    log.close()
    assert [values.tolist() for values in reader.poll().steps["loss"].points()] == [
        [1, 2, 3, 4, 5],
        [2.0, 1.0, 2 / 3, 0.5, 77.0],
    ]


def test_what_is_unknown_or_damaged_is_left_out_and_damaged_lines_are_counted(tmp_path):
    lines = [json_line(step(1)), b"{}\n", json_line({"event": "quantum", "step": 1}), json_line(step(2))]
    (tmp_path / "metrics.jsonl").write_bytes(b"".join(lines))
    found = read_history(tmp_path)
    assert (found.steps["loss"].num_points, found.num_damaged) == (2, 1)
