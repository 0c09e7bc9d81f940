"""The stream hands events to all sinks, and no sink can stop training."""

import threading
import time
from dataclasses import replace

import pytest

from launcher.telemetry import Telemetry
from launcher.telemetry.event_log import EventLog, read_events
from launcher.telemetry.events import WarningEvent, record_of
from launcher.telemetry.stream import Sink
from tests.telemetry.made import made


class Kept(Sink):
    """A sink that keeps what it gets."""

    def __init__(self, name="kept"):
        self.name = name
        self.records = []
        self.positions = []
        self.closed = 0

    def write(self, event):
        self.records.append(record_of(event))

    def on_step(self, epoch, step):
        self.positions.append((epoch, step))

    def close(self):
        self.closed += 1

    def texts(self):
        return [record["text"] for record in self.records if record["event"] == "warning"]


class Broken(Kept):
    """A sink that raises in the methods named."""

    def __init__(self, error, *methods):
        super().__init__("broken")
        for method in methods:
            setattr(self, method, self._raise)
        self._error = error

    def _raise(self, *_):
        raise self._error


FULL = OSError(28, "No space left on device")


def test_an_event_reaches_every_sink_with_time_and_step():
    first, second = Kept(), Kept()
    telemetry = Telemetry([first, second])
    telemetry.emit(WarningEvent(3, text="odd", time=12.5))
    assert first.records == second.records == [{"event": "warning", "time": 12.5, "step": 3, "text": "odd"}]


def test_events_that_waited_stay_in_order_where_a_sink_fails():
    kept = Kept()
    telemetry = Telemetry([Broken(FULL, "write"), kept], every_s=3600)
    for step in (1, 2, 3):
        telemetry.emit(made("step", step))
    telemetry.close()
    assert [record["step"] for record in kept.records if record["event"] == "step"] == [1, 2, 3]
    assert len(kept.texts()) == 2, "the first failure, and their number at the end"


def test_a_sink_that_cannot_write_for_now_is_called_again_and_counted():
    """A disk may be full for a second only."""
    kept, pausing = Kept(), Kept("pausing")

    def write(event):
        if event.step in (2, 3, 6):
            raise FULL
        pausing.records.append(record_of(event))

    pausing.write = write
    with Telemetry([pausing, kept]) as telemetry:
        for step in range(1, 8):
            telemetry.emit(made("step", step))
    assert [r["step"] for r in pausing.records if r["event"] == "step"] == [1, 4, 5, 7]
    first, last = kept.texts()
    assert first.startswith("pausing cannot be written (event step of step 2): OSError")
    assert last == "pausing could not be written 4 times: it is not complete.", "with the warning of step 2"


@pytest.mark.parametrize("position", [0, 1, 2])
def test_a_sink_that_always_fails_costs_the_others_two_warnings(position):
    good = [Kept(), Kept()]
    sinks = [*good]
    sinks.insert(position, Broken(FULL, "write"))
    with Telemetry(sinks) as telemetry:
        for step in range(5):
            telemetry.emit(made("step", step))
    for sink in good:
        assert [record["step"] for record in sink.records if record["event"] == "step"] == [0, 1, 2, 3, 4]
        first, last = sink.texts()
        assert first.startswith("broken cannot be written (event step of step 0): OSError")
        assert last == "broken could not be written 6 times: it is not complete.", "with its own warning"


@pytest.mark.parametrize("method", ["on_step", "close"])
def test_any_method_of_a_sink_may_fail(method):
    good, broken = Kept(), Broken(OSError("gone"), method)
    telemetry = Telemetry([good, broken])
    telemetry.emit(made("step", 1))
    telemetry.on_step(0, 2)
    telemetry.on_step(0, 3)
    telemetry.close()
    assert good.positions == [(0, 2), (0, 3)]
    assert good.closed == 1
    assert good.texts()[0].startswith("broken cannot be written: OSError: gone")


def test_only_an_exception_is_caught_not_an_interrupt():
    telemetry = Telemetry([Broken(KeyboardInterrupt(), "write")])
    with pytest.raises(KeyboardInterrupt):
        telemetry.emit(made("step", 1))


def test_the_last_added_is_closed_first_and_may_still_warn_the_others():
    files, order = Kept("files"), []
    files.close = lambda: order.append("files")
    tracker = Kept("tracker")
    telemetry = Telemetry([files])

    def close():
        thread = threading.Thread(target=telemetry.warn, args=("late news",))
        thread.start()
        thread.join(5)  # hangs for ever if close held the lock that warn needs
        assert not thread.is_alive()
        order.append("tracker")

    tracker.close = close
    telemetry.add(tracker)
    with telemetry:
        pass
    assert order == ["tracker", "files"]
    assert files.texts() == ["late news"]


def test_without_sinks_nothing_happens_but_the_step_is_known():
    telemetry = Telemetry()
    telemetry.emit(made("step", 7, loss=float("nan")))
    telemetry.on_step(0, 8)
    telemetry.decision("precision", "fp16")
    telemetry.warn("quiet")
    telemetry.close()
    assert telemetry.step == 7


def test_events_from_several_threads_all_arrive():
    kept = Kept()
    telemetry = Telemetry([kept])
    threads = [
        threading.Thread(target=lambda: [telemetry.emit(made("gpu", n)) for n in range(200)])
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(kept.records) == 800


def threaded(*sinks, **options):
    """With a thread that never gets its turn by itself."""
    return Telemetry(sinks, every_s=3600, **options)


def test_events_of_steps_wait_for_the_thread_and_all_others_are_written_after_them():
    kept = Kept()
    with threaded(kept) as telemetry:
        telemetry.emit(made("step", 1, loss=0.5))
        telemetry.on_step(0, 1)
        assert (kept.records, kept.positions) == ([], [])
        telemetry.emit(made("eval", 1, accuracy=1.0))
        assert [record["event"] for record in kept.records] == ["step", "eval"]
        assert kept.positions == [(0, 1)]
        telemetry.emit(made("step", 2))
        telemetry.flush()
        assert len(kept.records) == 3
        telemetry.emit(made("step", 3))
    assert [record["step"] for record in kept.records] == [1, 1, 2, 3]


def test_the_thread_writes_them_by_itself():
    kept = Kept()
    with Telemetry([kept], every_s=0.01) as telemetry:
        telemetry.emit(made("step", 1))
        deadline = time.monotonic() + 30
        while not kept.records and time.monotonic() < deadline:
            time.sleep(0.01)
        assert len(kept.records) == 1


def test_a_disk_that_does_not_answer_blocks_no_step():
    stuck, entered = threading.Event(), threading.Event()
    slow = Kept("slow")

    def write(record):
        entered.set()
        stuck.wait(120)

    slow.write = write
    with Telemetry([slow], every_s=0.01) as telemetry:
        telemetry.emit(made("step", 0))
        assert entered.wait(30)
        began = time.monotonic()
        for step in range(1, 101):
            telemetry.emit(made("step", step))
            telemetry.on_step(0, step)
        assert time.monotonic() - began < 30, "each write takes 120 s"
        stuck.set()


def test_a_cut_comes_after_what_was_emitted_before_it():
    kept = Kept()
    kept.truncate_after = lambda step, evaluates_again: kept.records.append({"event": "rewound"})
    with threaded(kept) as telemetry:
        telemetry.emit(made("step", 1))
        telemetry.truncate_after(0, False)
    assert [record["event"] for record in kept.records] == ["step", "rewound"]


def test_an_event_that_a_sink_cannot_represent_costs_only_itself(tmp_path):
    kept, path = Kept(), tmp_path / "metrics.jsonl"
    with Telemetry([EventLog(path), kept]) as telemetry:
        for step in (1, 2, 3):
            telemetry.emit(replace(made("after_evaluation", step), numbers={"n": object()}))
        telemetry.emit(made("end", 3, state="done"))
    written = [event["event"] for event in read_events(path)]
    assert written == ["warning", "end", "warning"]
    assert len(kept.texts()) == 2
    assert (
        "metrics.jsonl cannot be written (event after_evaluation of step 1): TypeError: " in kept.texts()[0]
    )
    assert kept.texts()[1] == "metrics.jsonl could not be written 3 times: it is not complete."
