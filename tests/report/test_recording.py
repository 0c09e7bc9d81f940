"""metrics.jsonl of any quality is read, and followed while it grows."""

from __future__ import annotations

import pytest

from launcher.report import recording as module
from launcher.report.recording import Recording, TailReader, read_recording
from launcher.run_dir.atomic import json_line
from launcher.telemetry import event_log
from launcher.telemetry.event_log import EventLog
from launcher.telemetry.events import FORMAT, OverflowEvent
from tests.telemetry.console.test_console import shares_of


def step(number, **fields):
    values = {"event": "step", "time": 100.0 + number, "step": number, "epoch": 0, "loss": 2.0 / number}
    times = {
        "step_ms": 10.0 + number % 3,
        "data_ms": 1e-05,
        "compute_ms": 7.25,
        "wire_ms": 2.0,
        "update_ms": 0.5,
    }
    return values | times | fields


def recording_of(*events):
    found = Recording()
    found.add([json_line(event)[:-1] for event in events])
    return found


def test_the_averages_of_the_time_are_those_of_the_console():
    events = [step(k) for k in range(1, 50)]
    found = recording_of(*events[:30])
    found.add([json_line(event)[:-1] for event in events[30:]])
    expected = shares_of(*events)
    assert found.time_shares.num_steps == expected.num_steps
    assert found.time_shares.step_ms == pytest.approx(expected.step_ms)
    assert found.time_shares.parts_ms == pytest.approx(expected.parts_ms)
    assert recording_of(events[0]).time_shares == shares_of(*events[:1])
    assert recording_of().time_shares is None


def test_unknown_events_and_a_newer_format_are_left_out_with_a_warning(tmp_path):
    start = {"event": "start", "time": 1.0, "step": 0, "format": FORMAT + 1}
    found = recording_of(start, {"event": "quantum", "step": 1}, {"event": "quantum", "step": 2}, step(3))
    newer, unknown = found.warnings
    assert f"format {FORMAT + 1}, written by a newer version; this one reads format {FORMAT}" in newer
    assert "unknown events: quantum (2)" in unknown
    assert found.steps["loss"].num_points == 1


def test_a_line_that_is_being_written_waits_for_its_end(tmp_path):
    path = tmp_path / "metrics.jsonl"
    line = json_line(step(1))
    path.write_bytes(line + line[:20])
    follower = TailReader(path)
    assert follower.poll()
    assert follower.recording.steps["loss"].num_points == 1
    assert not follower.poll(), "nothing new"
    with path.open("ab") as file:
        file.write(line[20:])
    assert follower.poll()
    assert follower.recording.steps["loss"].num_points == 2
    assert follower.recording.warnings == []


def test_a_file_that_is_rewound_replaced_or_gone_is_read_again(tmp_path):
    path = tmp_path / "metrics.jsonl"
    follower = TailReader(path)
    assert not follower.poll(), "a run that has not begun"
    log = EventLog(path)
    for number in range(1, 11):
        log.append(step(number))
    follower.poll()
    assert follower.recording.last_step.step == 10
    log.rewind(4, evaluates_again=False)
    log.append(step(5, loss=77.0))
    log.close()
    follower.poll()
    assert follower.recording.steps["loss"].points()[0].tolist() == [1, 2, 3, 4, 5]
    log = EventLog(path)
    log.rewind(4, evaluates_again=False)
    for number in range(5, 12):
        log.append(step(number, loss=78.0))
    log.close()
    follower.poll()
    found = follower.recording.steps["loss"].points()
    assert found[0].tolist() == list(range(1, 12)), "longer again than it was when last read"
    assert set(found[1][4:]) == {78.0}
    path.write_bytes(json_line(step(1)))  # cut in place, the same file
    follower.poll()
    assert follower.recording.steps["loss"].num_points == 1
    path.unlink()
    assert follower.poll()
    assert follower.recording.steps["loss"].num_points == 0


def test_processes_of_a_run_are_told_apart():
    found = recording_of(
        {"event": "decision", "time": 1.0, "step": 0, "topic": "a", "text": "b"},
        {"event": "start", "time": 2.0, "step": 0},
        step(1, time=3.0),
        step(2, time=9.0),
        {"event": "decision", "time": 50.0, "step": 2, "topic": "a", "text": "b"},
        {"event": "restart", "time": 51.0, "step": 2, "attempt": 1},
        {"event": "start", "time": 52.0, "step": 2},
        step(3, time=60.0),
    )
    assert [(each.began, each.ended) for each in found.attempts] == [(2.0, 9.0), (51.0, 60.0)]


def test_each_gpu_has_its_curves(tmp_path):
    gpu = {"index": 1, "uuid": "GPU-x", "power_w": 200.0, "throttled_s": {"power": 1.0, "heat": 0.5}}
    event = {"event": "gpu", "time": 1.0, "step": 5, "power_w": 400.0, "gpus": [gpu, None, 3]}
    (tmp_path / "metrics.jsonl").write_bytes(json_line(event))
    ((name, curves),) = read_recording(tmp_path).gpus.items()
    assert name == "GPU 1"
    points = {field: [values.tolist() for values in curve.points()] for field, curve in curves.items()}
    assert points == {"power_w": [[5.0], [200.0]], "throttled_s": [[5.0], [1.5]]}


def test_many_events_of_a_kind_are_counted_and_bounded():
    found = recording_of(
        *({"event": "overflow", "step": k, "scale": 2.0, "time": 1.0 + k} for k in range(5000))
    )
    assert found.of(OverflowEvent).count == 5000
    shown = found.of(OverflowEvent).all()
    assert len(shown) == module.MAX_RECORDS
    assert (shown[0].step, shown[-1].step) == (0, 4999)
    assert found.skips.num_points == 5000


def test_steps_beyond_what_a_float_holds_are_damaged():
    found = Recording()
    found.add([b'{"event": "step", "step": 1%s, "loss": 1.0}' % (b"0" * 400), b"{}", b'{"event": "step"}'])
    assert found.num_damaged == 3


def test_the_speed_is_samples_over_time():
    found = recording_of(
        *(
            {"event": "step", "step": n, "samples_per_s": rate}
            for n, rate in ((10, 100.0), (20, 10000.0), (50, None))
        )
    )
    assert found.samples_per_s == pytest.approx(20 / (10 / 100 + 10 / 10000))
    assert recording_of().samples_per_s is None


def test_a_torn_end_is_read_once(tmp_path, monkeypatch):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(json_line(step(1)) + b"\0" * 1000)
    follower, polled = TailReader(path), []
    monkeypatch.setattr(module, "lines_of", lambda *given: polled.append(1) or event_log.lines_of(*given))
    assert [follower.poll(), follower.poll(), follower.poll()] == [True, False, False]
    assert len(polled) == 1


def test_what_could_not_be_read_is_read_at_the_next_poll(tmp_path, monkeypatch):
    def failing(*given):
        raise OSError("for a moment")

    path = tmp_path / "metrics.jsonl"
    path.write_bytes(json_line(step(1)))
    follower = TailReader(path)
    with monkeypatch.context() as patch:
        patch.setattr(module, "lines_of", failing)
        with pytest.raises(OSError, match="for a moment"):
            follower.poll()
    assert follower.poll()
    assert follower.recording.steps["loss"].num_points == 1


def test_a_damaged_file_that_names_a_set_a_metric_and_a_device_a_line_makes_few_curves():
    number = range(3 * module.MAX_CURVES)
    evaluation = {"event": "eval", "time": 1.0, "step": 1, "epoch": 0, "loss": 0.5}
    found = recording_of(
        *({**evaluation, f"m{k}": 0.5} for k in number),
        *({**evaluation, "set": f"s{k}"} for k in number),
        *({"event": "gpu", "time": 1.0, "step": 1, "gpus": [{"index": k, "power_w": 9.0}]} for k in number),
    )
    sizes = [len(found.evaluations), len(found.other_sets), len(found.gpus), len(found.sets)]
    assert sizes == [module.MAX_CURVES] * 3 + [module.MAX_CURVES]


def test_a_metric_that_is_named_like_one_of_another_set_has_a_curve_of_its_own():
    evaluation = {"event": "eval", "time": 1.0, "step": 1, "epoch": 0, "loss": 0.5}
    found = recording_of({**evaluation, "set": "a", "b/f1": 0.25}, {**evaluation, "set": "b", "f1": 0.75})
    assert (found.evaluations["b/f1"].last, found.other_sets["b/f1"].last) == (0.25, 0.75)


def test_a_last_step_that_is_no_event_leaves_the_one_before():
    found = recording_of(step(1), step(2))
    found.add([line[:-1].replace(b'"step": 3,', b'"step": 3.0,') for line in [json_line(step(3))]])
    assert found.last_step.step == 2
