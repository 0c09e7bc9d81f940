"""A resumed run sends a tracker what the attempts before did not, and nothing that it has."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from launcher.telemetry import Telemetry
from launcher.telemetry.event_log import EventLog, recorded_after
from launcher.telemetry.tracker import TrackedRun
from launcher.telemetry.tracker import delivery as module
from launcher.telemetry.tracker.delivery import Delivery
from launcher.telemetry.tracker.sink import TrackerSink
from tests.telemetry.made import made
from tests.telemetry.tracker.test_sink import Recording


class Killed(BaseException):
    """Ends the thread of a tracker without its `finish`, as a kill of the process does."""


def attempt(
    run_dir: Path,
    steps: range,
    dies_at: int | None = None,
    run_id: str = "id",
    evaluates_again: bool = False,
) -> tuple[list[int], list[str]]:
    """One attempt from the step before `steps`. Returns the steps that the tracker got, and the decisions."""
    tracker = Recording()

    def log(step: int, values: object) -> None:
        if step == dies_at:
            raise Killed
        tracker.rows.append((step, {}))

    tracker.log = log  # type: ignore[method-assign]
    before = partial(recorded_after, run_dir / EventLog.name)
    telemetry = Telemetry([EventLog(run_dir / EventLog.name)])
    reports: list[str] = []
    delivery = Delivery(run_dir / "trackers" / "t.json", run_id, before)
    run = TrackedRun(run_dir, "name", run_id, "project", {})
    sink = TrackerSink("t", lambda: tracker, run, print, delivery=delivery, report=reports.append)
    telemetry.add(sink)
    telemetry.rewind(steps.start - 1, evaluates_again)
    telemetry.emit(made("start", steps.start - 1))
    for step in steps:
        telemetry.emit(made("step", step, loss=1.0))
    telemetry.emit(made("eval", steps.stop - 1, accuracy=1.0))
    telemetry.close()
    return [step for step, _ in tracker.rows], reports


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_resumed_run_sends_the_rows_up_to_its_checkpoint_that_a_killed_one_did_not(tmp_path: Path) -> None:
    assert attempt(tmp_path, range(1, 3)) == ([1, 2, 2], [])
    assert attempt(tmp_path, range(3, 9), dies_at=6) == ([3, 4, 5], [])
    sent, reports = attempt(tmp_path, range(8, 10))
    assert sent == [3, 4, 5, 6, 7, 8, 9, 9], "not 1 and 2, and step 8 of the new attempt alone"
    assert reports == ["t gets 5 rows of steps 3 to 7, which it may not have from the earlier attempt"]
    assert attempt(tmp_path, range(10, 12)) == ([10, 11, 11], []), "an attempt that has finished left nothing"


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_what_a_killed_tracker_had_long_before_is_not_sent_again(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(module, "WRITTEN_S", 0.0)
    attempt(tmp_path, range(1, 9), dies_at=8)
    sent, _ = attempt(tmp_path, range(9, 10))
    assert sent == [6, 7, 8, 8, 9, 9][-len(sent) :]
    assert 8 in sent


def test_another_run_of_the_tracker_gets_all_rows(tmp_path: Path) -> None:
    attempt(tmp_path, range(1, 4))
    sent, _ = attempt(tmp_path, range(4, 5), run_id="another")
    assert sent == [1, 2, 3, 3, 4, 4]


def test_an_evaluation_that_is_repeated_is_not_sent_twice(tmp_path: Path) -> None:
    attempt(tmp_path, range(1, 3))
    (tmp_path / "trackers" / "t.json").write_text("{")
    assert attempt(tmp_path, range(3, 4), evaluates_again=True)[0] == [1, 2, 3, 3], "a damaged file: all rows"


def test_of_a_long_attempt_that_the_tracker_lacks_a_bounded_number_is_held(tmp_path: Path) -> None:
    """What happens once is kept; of periodic events, each n-th of its kind."""
    events = [{"event": "step", "time": 1.0 + step, "step": step} for step in range(1, 100_001)]
    events[50_000:50_000] = [{"event": "checkpoint", "time": 50_000.0, "step": 50_000}]
    delivery = Delivery(tmp_path / "t.json", "id", lambda time_s: iter(events))
    found = delivery.missing(100_000, evaluates_again=False)
    assert [event["step"] for event in found if event["event"] == "checkpoint"] == [50_000]
    steps = [event["step"] for event in found if event["event"] == "step"]
    assert module.LIMIT / 2 < len(steps) <= module.LIMIT
    assert steps == list(range(delivery.every, 100_001, delivery.every))
