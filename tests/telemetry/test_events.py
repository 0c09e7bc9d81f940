"""metrics.jsonl: strict JSON out, the same values back, and a killed writer costs one line at most."""

import json
import math
import os
import signal
import subprocess
import sys
import time

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from launcher.run_dir.atomic import read_json, write_json, write_text
from launcher.telemetry.events import EventLog, read_events, read_recording

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


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(fields=st.dictionaries(words, values, max_size=5))
def test_what_is_written_is_read_back(tmp_path, fields):
    path = tmp_path / "metrics.jsonl"
    path.unlink(missing_ok=True)
    log = EventLog(path)
    log.write({"event": "step", "step": 1, **fields})
    log.close()
    assert same(read_events(path), [{"event": "step", "step": 1, **fields}])
    assert len(path.read_text(encoding="utf-8").split("\n")) == 2
    json.loads(path.read_text(encoding="utf-8"), parse_constant=refuse)


@pytest.mark.parametrize(("value", "spelt"), [(math.inf, "inf"), (-math.inf, "-inf"), (math.nan, "nan")])
def test_non_finite_floats_are_spelt_for_any_json_reader(tmp_path, value, spelt):
    log = EventLog(tmp_path / "metrics.jsonl")
    log.write({"event": "step", "step": 1, "loss": value, "parts": [value]})
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
        log.write({"event": "step", "loss": object()})
    log.write({"event": "step", "step": 1})
    log.close()
    assert read_events(tmp_path / "metrics.jsonl") == [{"event": "step", "step": 1}]


@pytest.mark.parametrize("kept", range(0, 30, 7))
def test_a_torn_last_line_is_left_out_and_cut_before_the_next_event(tmp_path, kept):
    path = tmp_path / "metrics.jsonl"
    torn = b'{"event": "step", "step": 2, "loss": 0.25}'[:kept]
    path.write_bytes(b'{"event": "step", "step": 1}\n' + torn)
    assert [event["step"] for event in read_events(path)] == [1]
    log = EventLog(path)
    log.write({"event": "step", "step": 3})
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
]


@pytest.mark.parametrize("line", DAMAGED)
def test_a_damaged_line_in_the_middle_is_left_out_and_named(tmp_path, line):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"event": "step", "step": 1}\n' + line + b'\n{"event": "step", "step": 2}\n')
    recording = read_recording(path)
    assert [event["step"] for event in recording.events] == [1, 2]
    assert recording.warning == "metrics.jsonl is damaged: left out line 2"


@pytest.mark.parametrize("line", DAMAGED)
def test_recording_continues_after_a_damaged_line_also_where_the_run_goes_back(tmp_path, line):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(line + b'\n{"event": "step", "step": 1}\n{"event": "step", "step": 2}\n')
    log = EventLog(path)
    log.rewind(1, evaluates_again=False)
    log.write({"event": "step", "step": 3})
    log.close()
    assert [event["step"] for event in read_events(path)] == [1, 3]
    assert read_recording(path).damaged == [1], "it stays for whoever wants to look at it"


WRITER = """
import sys
from pathlib import Path
from launcher.telemetry.events import EventLog
log = EventLog(Path(sys.argv[1]))
print("ready", flush=True)
for step in range(10**9):
    log.write({"event": "step", "step": step, "loss": 0.5})
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


LIMITED = """
import resource, sys
from pathlib import Path
from launcher.telemetry.events import EventLog
log = EventLog(Path(sys.argv[1]))
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
for step in range(100):
    log.write({"event": "step", "step": step})
"""


def test_a_full_disk_is_an_error_not_a_silent_loss(tmp_path):
    path = tmp_path / "metrics.jsonl"
    done = subprocess.run([sys.executable, "-c", LIMITED, str(path)], capture_output=True, text=True)
    assert done.returncode == 1
    assert "OSError" in done.stderr
    assert len(read_events(path)) == 1000 // len('{"event": "step", "step": 10}\n')


CUT = """
import resource, sys
from pathlib import Path
from launcher.telemetry.events import EventLog
log = EventLog(Path(sys.argv[1]))
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
log.write({"event": "step", "text": "x" * 2000})
"""


def test_the_very_write_that_is_cut_short_is_the_error(tmp_path):
    done = subprocess.run([sys.executable, "-c", CUT, str(tmp_path / "m")], capture_output=True, text=True)
    assert done.returncode == 1
    assert "only 1000 of" in done.stderr


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
    log.write({"event": "after_evaluation", "step": 1, "texts": {name: [name]}})
    log.close()
    assert read_events(tmp_path / "metrics.jsonl")[0]["texts"] == {shown: [shown]}
    write_json(tmp_path / "result.json", {"error": name, "classes": [name], "\ud800": 1.0})
    assert read_json(tmp_path / "result.json") == {"error": shown, "classes": [shown], "\\ud800": 1.0}
    write_text(tmp_path / "classification_report.txt", name)
    assert (tmp_path / "classification_report.txt").read_text(encoding="utf-8") == shown
