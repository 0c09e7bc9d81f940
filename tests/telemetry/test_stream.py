"""The stream hands events to all sinks, and no sink can stop training."""

import logging
import threading

import pytest

from launcher.telemetry import Telemetry


class Kept:
    """A sink that keeps what it gets."""

    def __init__(self, name="kept"):
        self.name = name
        self.records = []
        self.positions = []
        self.closed = 0

    def write(self, record):
        self.records.append(dict(record))

    def advance(self, epoch, step):
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


ERRORS = [OSError(28, "No space left on device"), ValueError("bad"), RuntimeError(), TypeError("a tensor")]


def test_an_event_reaches_every_sink_with_time_and_step():
    first, second = Kept(), Kept()
    telemetry = Telemetry([first, second], clock=lambda: 12.5)
    telemetry.emit("step", 3, loss=0.5)
    assert first.records == second.records == [{"event": "step", "time": 12.5, "step": 3, "loss": 0.5}]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("position", [0, 1, 2])
def test_a_broken_sink_is_dropped_after_one_warning_to_the_others(error, position):
    good = [Kept(), Kept()]
    sinks = [*good]
    sinks.insert(position, Broken(error, "write"))
    telemetry = Telemetry(sinks)
    for step in range(5):
        telemetry.emit("step", step)
    for sink in good:
        assert [record["step"] for record in sink.records if record["event"] == "step"] == [0, 1, 2, 3, 4]
        assert len(sink.texts()) == 1
        assert "broken is given up" in sink.texts()[0]
        assert str(error) in sink.texts()[0]


@pytest.mark.parametrize("method", ["advance", "close"])
def test_any_method_of_a_sink_may_fail(method):
    good, broken = Kept(), Broken(OSError("gone"), method)
    telemetry = Telemetry([good, broken])
    telemetry.emit("step", 1)
    telemetry.advance(0, 2)
    telemetry.advance(0, 3)
    telemetry.close()
    assert good.positions == [(0, 2), (0, 3)]
    assert good.closed == 1
    assert len(good.texts()) == 1


def test_sinks_that_all_break_end_in_one_log_line_each_and_no_exception(caplog):
    telemetry = Telemetry([Broken(OSError("a"), "write"), Broken(OSError("b"), "write")])
    with caplog.at_level(logging.WARNING, logger="launcher"):
        for step in range(3):
            telemetry.emit("step", step)
        telemetry.close()
    assert [message.split(": ")[2][0] for message in sorted(caplog.messages)] == ["a", "b"]


def test_only_an_exception_is_caught_not_an_interrupt():
    telemetry = Telemetry([Broken(KeyboardInterrupt(), "write")])
    with pytest.raises(KeyboardInterrupt):
        telemetry.emit("step", 1)


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
    telemetry.emit("step", 7, loss=float("nan"))
    telemetry.advance(0, 8)
    telemetry.decision("precision", "fp16")
    telemetry.warn("quiet")
    telemetry.close()
    assert telemetry.step == 7


def test_events_from_several_threads_all_arrive():
    kept = Kept()
    telemetry = Telemetry([kept])
    threads = [
        threading.Thread(target=lambda: [telemetry.emit("gpu", n) for n in range(200)]) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(kept.records) == 800
