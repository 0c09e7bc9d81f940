"""The thread between the run and a tracker: nothing a tracker does delays or ends the run."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from launcher.telemetry import Telemetry
from launcher.telemetry.tracker import RunInfo, Text
from launcher.telemetry.tracker.sink import TrackerSink, TrackerTimeouts
from tests.telemetry.made import made
from tests.telemetry.test_stream import Kept


class Recording:
    """A tracker that keeps what it gets; each `log` takes `seconds`."""

    def __init__(self, seconds: float = 0.0) -> None:
        self.seconds = seconds
        self.rows: list[tuple[int, dict]] = []
        self.media_names: list[str] = []
        self.texts: list[str] = []
        self.threads: set[str] = set()
        self.exit_code = None

    def start(self, run):
        pass

    def log(self, step, values):
        time.sleep(self.seconds)
        self.threads.add(threading.current_thread().name)
        self.rows.append((step, dict(values)))

    def media(self, step, name, item):
        self.media_names.append(name)
        self.texts += [item.content] if isinstance(item, Text) else []

    def finish(self, exit_code):
        self.exit_code = exit_code


def tracked(tmp_path: Path, tracker: object):
    """A telemetry with the tracker and a sink that keeps what the run sees."""
    kept = Kept()
    telemetry = Telemetry([kept])
    run = RunInfo(tmp_path / "trackers", "name", "id", "project", {"seed": 0})
    telemetry.add(TrackerSink("slow", lambda: tracker, run, telemetry.warn))
    return telemetry, kept


def test_events_arrive_in_order_in_another_thread_with_the_exit_code(tmp_path: Path) -> None:
    tracker = Recording()
    telemetry, kept = tracked(tmp_path, tracker)
    telemetry.emit(made("step", 0, loss=9.0))
    telemetry.emit(made("start", 0))
    for step in range(1, 6):
        telemetry.emit(made("step", step, loss=1 / step, data_ms=2.0))
    telemetry.emit(made("report", 5, text="class caf\udce9"))
    telemetry.emit(made("end", 5, state="diverged", exit=5))
    telemetry.close()
    assert [(step, row["train/loss"], row["time/data_ms"]) for step, row in tracker.rows] == [
        (n, 1 / n, 2.0) for n in range(1, 6)
    ]
    assert tracker.media_names == ["eval/classification_report"]
    assert tracker.texts == ["class caf\\udce9"], "bytes that are not UTF-8 are escaped"
    assert tracker.exit_code == 5
    assert tracker.threads == {"slow-tracker"}
    assert kept.texts() == []


def test_a_tracker_that_sleeps_delays_nothing_and_gets_every_row(tmp_path: Path) -> None:
    tracker = Recording(seconds=0.05)
    telemetry, kept = tracked(tmp_path, tracker)
    telemetry.emit(made("start", 0))
    began = time.monotonic()
    for step in range(1, 41):
        telemetry.emit(made("step", step, loss=1.0))
    assert time.monotonic() - began < 1.5, "40 rows of 50 ms each would take 2 s"
    telemetry.emit(made("end", 40, state="done", exit=0))
    telemetry.close()
    assert [step for step, _ in tracker.rows] == [*range(1, 41)]
    assert tracker.exit_code == 0
    assert kept.texts() == []


@pytest.mark.parametrize("error", [OSError("disk full"), SystemExit("no key")], ids=["error", "exit"])
@pytest.mark.parametrize("method", ["start", "log", "finish"])
def test_a_tracker_that_raises_is_given_up_with_one_warning(
    tmp_path: Path, method: str, error: BaseException
) -> None:
    tracker = Recording()

    def fail(*values: object) -> None:
        raise error

    setattr(tracker, method, fail)
    telemetry, kept = tracked(tmp_path, tracker)
    telemetry.emit(made("start", 0))
    deadline = time.monotonic() + 30
    while not kept.texts() and method != "finish" and time.monotonic() < deadline:
        telemetry.emit(made("step", 1, loss=1.0))
        time.sleep(0.01)
    telemetry.close()
    said = f"{type(error).__name__}: {error} (at {__file__}:{fail.__code__.co_firstlineno + 1}, in fail)"
    assert kept.texts() == [f"slow is given up: {said}. The run continues without it."]


def test_a_tracker_that_never_returns_costs_a_bounded_wait(tmp_path: Path) -> None:
    tracker, done = Recording(), threading.Event()
    tracker.finish = lambda exit_code: done.wait(30)  # type: ignore[method-assign]
    run = RunInfo(tmp_path, "name", "id", "project", {})
    warnings: list[str] = []
    sink = TrackerSink("stuck", lambda: tracker, run, warnings.append, TrackerTimeouts(0.0, -4.9))
    sink.write(made("start", 0))
    sink.close()
    assert warnings == ["stuck is given up: it did not finish within 0.1 s. The run continues without it."]
    done.set()
    sink._thread.join(5)
