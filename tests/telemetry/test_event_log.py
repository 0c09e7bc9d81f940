"""metrics.jsonl: strict JSON out, the same values back, and a killed writer costs one line at most."""

import contextlib
import json
import math
import os
import resource
import signal
import subprocess
import sys
import time

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from launcher.run_dir.atomic import json_line, read_json, write_json, write_text
from launcher.telemetry.event_log import EventLog, TailReader, happened, read_events

words = st.text().filter(lambda text: text not in ("inf", "-inf", "nan"))
scalars = st.none() | st.booleans() | st.integers() | st.floats() | words
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(words, inner, max_size=4)
)


def same(left, right):
    """Equal, with nan equal to nan and without mixing up types."""
    if isinstance(left, float) and isinstance(right, float):
        return left == right or (math.isnan(left) and math.isnan(right))
    if isinstance(left, list) and isinstance(right, list):
        return len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, dict) and isinstance(right, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    return type(left) is type(right) and left == right


def refuse(word):
    raise AssertionError(f"{word} is not JSON")


@pytest.mark.slow
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(fields=st.dictionaries(words, values, max_size=5))
def test_what_is_written_is_read_back(tmp_path, fields):
    path = tmp_path / "metrics.jsonl"
    path.unlink(missing_ok=True)
    log = EventLog(path)
    log.append({"event": "step", "step": 1, **fields})
    log.close()
    assert same(read_events(path), [{"event": "step", "step": 1, **fields}])
    assert len(path.read_text(encoding="utf-8").split("\n")) == 2
    json.loads(path.read_text(encoding="utf-8"), parse_constant=refuse)


@pytest.mark.parametrize(("value", "spelt"), [(math.inf, "inf"), (-math.inf, "-inf"), (math.nan, "nan")])
def test_non_finite_floats_are_spelt_for_any_json_reader(tmp_path, value, spelt):
    log = EventLog(tmp_path / "metrics.jsonl")
    log.append({"event": "step", "step": 1, "loss": value, "parts": [value]})
    log.close()
    assert json.loads((tmp_path / "metrics.jsonl").read_text()) == {
        "event": "step",
        "step": 1,
        "loss": spelt,
        "parts": [spelt],
    }


def test_a_value_that_is_not_plain_is_an_error_and_leaves_no_half_line(tmp_path):
    log = EventLog(tmp_path / "metrics.jsonl")
    with pytest.raises(TypeError):
        log.append({"event": "step", "loss": object()})
    log.append({"event": "step", "step": 1})
    log.close()
    assert read_events(tmp_path / "metrics.jsonl") == [{"event": "step", "step": 1}]


@pytest.mark.parametrize("kept", range(0, 30, 7))
def test_a_torn_last_line_is_left_out_and_cut_before_the_next_event(tmp_path, kept):
    path = tmp_path / "metrics.jsonl"
    torn = b'{"event": "step", "step": 2, "loss": 0.25}'[:kept]
    path.write_bytes(b'{"event": "step", "step": 1}\n' + torn)
    assert [event["step"] for event in read_events(path)] == [1]
    log = EventLog(path)
    log.append({"event": "step", "step": 3})
    log.close()
    assert [event["step"] for event in read_events(path)] == [1, 3]


DAMAGED = [
    b'{"eve',
    b"[1]",
    b"5",
    b"\\xff\\xfe",
    b'{"event": "step"}',
    b'{"event": 1, "step": 2}',
    b"[" * 100_000,
    b'{"event": "step", "time": 1.0, "step": ' + b"9" * 5000 + b"}",
]


@pytest.mark.parametrize("line", DAMAGED)
def test_a_damaged_line_in_the_middle_is_left_out_and_named(tmp_path, line):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"event": "step", "step": 1}\n' + line + b'\n{"event": "step", "step": 2}\n')
    assert [event["step"] for event in read_events(path)] == [1, 2]
    reader = TailReader(path)
    assert ([event["step"] for event in reader.poll()[0]], reader.num_damaged) == ([1, 2], 1)


@pytest.mark.parametrize("line", DAMAGED)
def test_recording_continues_after_a_damaged_line_also_where_the_run_goes_back(tmp_path, line):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(line + b'\n{"event": "step", "step": 1}\n{"event": "step", "step": 2}\n')
    log = EventLog(path)
    log.truncate_after(1, evaluates_again=False)
    log.append({"event": "step", "step": 3})
    log.close()
    assert [event["step"] for event in read_events(path)] == [1, 3]
    assert path.read_bytes().startswith(line), "it stays for whoever wants to look at it"


WRITER = """
import sys
from pathlib import Path
from launcher.telemetry.event_log import EventLog
log = EventLog(Path(sys.argv[1]))
print("ready", flush=True)
for step in range(10**9):
    log.append({"event": "step", "step": step, "loss": 0.5})
"""


def test_a_killed_writer_loses_at_most_the_line_under_way(tmp_path):
    path = tmp_path / "metrics.jsonl"
    writer = subprocess.Popen([sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE)
    try:
        assert writer.stdout.readline() == b"ready\n"
        while not path.exists() or path.stat().st_size < 20_000:
            time.sleep(0.01)
    finally:
        os.kill(writer.pid, signal.SIGKILL)
        writer.wait()
        writer.stdout.close()
    assert [event["step"] for event in read_events(path)] == list(range(len(read_events(path))))


@contextlib.contextmanager
def full(limit_bytes):
    """No file may grow beyond `limit_bytes`, as on a full disk: the last write is cut short."""
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))


def test_on_a_full_disk_the_file_keeps_whole_lines_and_grows_again_when_there_is_room(tmp_path):
    path = tmp_path / "metrics.jsonl"
    log = EventLog(path)
    with full(1000):
        log.append({"event": "step", "step": 1})
        with pytest.raises(OSError, match="bytes fit into"):
            log.append({"event": "step", "step": 2, "text": "x" * 2000})
        assert [event["step"] for event in read_events(path)] == [1]
    log.append({"event": "step", "step": 3})
    log.close()
    assert [event["step"] for event in read_events(path)] == [1, 3]


def test_a_file_that_grows_is_read_in_whole_lines_and_again_where_it_is_cut_or_gone(tmp_path):
    path = tmp_path / "metrics.jsonl"
    reader = TailReader(path)

    def polled():
        events, again = reader.poll()
        return [event["step"] for event in events], again

    assert polled() == ([], False), "a run that has not begun"
    log = EventLog(path)
    for step in range(1, 11):
        log.append({"event": "step", "step": step, "loss": 1.0})
    assert polled() == ([*range(1, 11)], False)
    assert polled() == ([], False)
    with path.open("ab") as file:
        file.write(b'{"event": "step", "st')
    assert polled() == ([], False), "a line that is being written"
    log.close()
    log = EventLog(path)
    log.truncate_after(4, evaluates_again=False)
    for step in range(5, 12):
        log.append({"event": "step", "step": step, "loss": 2.0})
    log.close()
    assert polled() == ([*range(1, 12)], True), "longer again than it was when last read"
    path.unlink()
    assert polled() == ([], True)


def recorded_steps(path, count, **fields):
    with open(path, "wb") as file:
        for step in range(1, count + 1):
            file.write(json_line({"event": "step", "time": 1000.0 + step, "step": step, **fields}))


# What a long recording ends in, beside its steps: the events of the resumed process stand after its `end`.
ENDS = {
    "killed": ([], 390, False, 390),
    "resumed from an earlier checkpoint": ([], 11, False, 11),
    "begun again": ([], 0, False, 0),
    "preempted": ([("end", 400), ("decision", 0)], 400, False, 401),
    "done, and evaluated again": ([("eval", 400), ("end", 400), ("decision", 0)], 400, True, 401),
    "late events": ([("gpu", 380), ("decision", 0), ("gpu", 390)], 390, False, 393),
}


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("name", ENDS)
def test_a_resume_keeps_what_has_happened(tmp_path, name):
    rest, step, evaluates_again, num_kept = ENDS[name]
    path = tmp_path / "metrics.jsonl"
    recorded_steps(path, 400, text="x" * 100)
    log = EventLog(path)
    for number, (event, at) in enumerate(rest):
        log.append({"event": event, "time": 50_000.0 + number, "step": at})
    before = read_events(path)
    log.truncate_after(step, evaluates_again)
    log.close()
    assert read_events(path) == [event for event in before if happened(event, step, evaluates_again)]
    assert len(read_events(path)) == num_kept


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path):
    path = tmp_path / "status.json"
    write_json(path, {"state": "running", "loss": math.inf})
    with pytest.raises(TypeError):
        write_json(path, {"state": object()})
    assert read_json(path) == {"state": "running", "loss": math.inf}
    assert [file.name for file in tmp_path.iterdir()] == ["status.json"]


def test_bytes_that_are_not_utf_8_are_escaped_in_every_file(tmp_path):
    """A file name of such bytes is text with lone surrogates."""
    name, shown = "caf\udce9", "caf\\udce9"
    log = EventLog(tmp_path / "metrics.jsonl")
    log.append({"event": "after_evaluation", "step": 1, "texts": {name: [name]}})
    log.close()
    assert read_events(tmp_path / "metrics.jsonl")[0]["texts"] == {shown: [shown]}
    write_json(tmp_path / "result.json", {"error": name, "classes": [name], "\ud800": 1.0})
    assert read_json(tmp_path / "result.json") == {"error": shown, "classes": [shown], "\\ud800": 1.0}
    write_text(tmp_path / "classification_report.txt", name)
    assert (tmp_path / "classification_report.txt").read_text(encoding="utf-8") == shown
