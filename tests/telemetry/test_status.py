"""status.json: always whole, fresh within its interval, at once on a change of state."""

import threading

import pytest

from launcher.run_dir.atomic import read_json
from launcher.run_dir.status import mark_ended
from launcher.telemetry import Telemetry
from launcher.telemetry.status import EtaEstimator, StatusFile
from tests.telemetry.made import made


class Clock:
    def __init__(self):
        self.seconds = 100.0

    def __call__(self):
        return self.seconds


@pytest.fixture
def clock():
    return Clock()


def opened(tmp_path, clock):
    path = tmp_path / "status.json"
    return path, Telemetry([StatusFile(path, clock=clock)])


def test_the_states_of_a_run_are_on_disk_at_once(tmp_path, clock):
    path, telemetry = opened(tmp_path, clock)
    assert read_json(path)["state"] == "starting"
    telemetry.emit(made("start", 0, total_steps=40))
    assert read_json(path)["state"] == "running"
    assert read_json(path)["total_steps"] == 40
    telemetry.emit(made("eval", 10, epoch=0, accuracy=0.5))
    status = read_json(path)
    assert (status["step"], status["epoch"], status["last"]["eval"]["accuracy"]) == (10, 0, 0.5)
    telemetry.emit(made("end", 40, state="failed", exit=5))
    status = read_json(path)
    assert (status["state"], status["exit"], status["step"], status["eta_s"]) == ("failed", 5, 40, None)


def test_it_is_never_older_than_ten_seconds_while_steps_are_made(tmp_path, clock):
    path, telemetry = opened(tmp_path, clock)
    telemetry.emit(made("start", 0, total_steps=1000))
    written_at, written_step = clock.seconds, 0
    for step in range(1, 200):
        clock.seconds += 0.9
        if step % 10 == 0:
            telemetry.emit(made("step", step, epoch=0, loss=1.0))
        else:
            telemetry.on_step(0, step)
        if (now := read_json(path)["step"]) != written_step:
            written_at, written_step = clock.seconds, now
        assert clock.seconds - written_at <= 10
    assert written_step > 150


def test_it_is_not_rewritten_at_every_step(tmp_path, clock):
    path, telemetry = opened(tmp_path, clock)
    telemetry.emit(made("start", 0, total_steps=10))
    inode = path.stat().st_ino
    for step in range(5):
        telemetry.emit(made("step", step, epoch=0))
    assert path.stat().st_ino == inode


def test_a_reader_never_sees_a_part(tmp_path):
    path = tmp_path / "status.json"
    sink = StatusFile(path, every_s=0)
    stop = threading.Event()

    def write():
        step = 0
        while not stop.is_set():
            step += 1
            sink.write(made("eval", step, epoch=0, **{"x" * 5000: 1.0}))

    writer = threading.Thread(target=write)
    writer.start()
    try:
        for _ in range(500):
            read_json(path)
    finally:
        stop.set()
        writer.join()
    sink.close()
    assert [file.name for file in tmp_path.iterdir()] == ["status.json"]


def test_the_remaining_time_leaves_the_start_up_out(clock):
    pace = EtaEstimator(clock)
    assert pace.eta_s(0, 100) is None
    clock.seconds += 60  # compilation
    assert pace.eta_s(1, 100) is None
    clock.seconds += 10
    assert pace.eta_s(11, 100) == 89.0
    assert pace.eta_s(11, None) is None


def test_a_leader_that_was_killed_leaves_its_way_and_gets_a_verdict(tmp_path, clock):
    path, telemetry = opened(tmp_path, clock)
    telemetry.emit(made("start", 0, total_steps=40))
    telemetry.emit(made("eval", 10, epoch=0, accuracy=0.5))
    mark_ended(path, "failed", 6, steps_done=9)
    status = read_json(path)
    assert (status["state"], status["exit"], status["eta_s"]) == ("failed", 6, None)
    assert (status["step"], status["last"]["eval"]["accuracy"]) == (10, 0.5)


def test_a_verdict_knows_more_steps_than_the_file(tmp_path, clock):
    path, telemetry = opened(tmp_path, clock)
    telemetry.emit(made("start", 0, total_steps=40))
    mark_ended(path, "failed", 6, steps_done=19)
    assert read_json(path)["step"] == 19


@pytest.mark.parametrize("torn", [None, "", "{", "[]"])
def test_a_verdict_needs_no_file_of_the_leader(tmp_path, torn):
    path = tmp_path / "status.json"
    if torn is not None:
        path.write_text(torn)
    mark_ended(path, "failed", 1)
    assert (read_json(path)["state"], read_json(path)["exit"], read_json(path)["step"]) == ("failed", 1, 0)


def test_a_change_of_state_that_could_not_be_written_is_written_at_the_next_event(tmp_path, clock):
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    path, telemetry = opened(run_dir, clock)
    aside = run_dir.rename(tmp_path / "aside")  # as a file system that is away for a moment
    telemetry.emit(made("start", 0, total_steps=40))
    telemetry.emit(made("step", 1, epoch=0))
    aside.rename(run_dir)
    assert read_json(path)["state"] == "starting"
    telemetry.emit(made("step", 2, epoch=0))
    assert (read_json(path)["state"], read_json(path)["step"]) == ("running", 2)
