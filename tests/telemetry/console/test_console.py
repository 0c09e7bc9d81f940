"""What people see: a bar on a real pseudo-terminal, plain lines through a real pipe."""

import fcntl
import io
import os
import pty
import re
import struct
import subprocess
import sys
import termios
import threading
from pathlib import Path

import pytest

from launcher.telemetry import Telemetry
from launcher.telemetry.console.console import Console, end_lines
from launcher.telemetry.events import record_of
from launcher.telemetry.formatting import duration, metric, number
from launcher.telemetry.step_time import TimeShares, TimeTotals, time_at_end
from tests.telemetry.made import made

RUN = """
import sys, threading
from pathlib import Path
from tests.telemetry.made import made
from launcher.telemetry import Telemetry
from launcher.telemetry.console.console import Console

times = {"step_ms": 10.0, "data_ms": 7.1, "compute_ms": 2.0, "communication_ms": 0.5, "update_ms": 0.4}
telemetry = Telemetry([Console(sys.stdout, sys.stderr, Path("/runs/one"))])
telemetry.decision("precision", "fp16, emulated: this CPU has no fp16 arithmetic")
telemetry.decision("tracker", "offline: no API key", sync="wandb sync /runs/one/wandb/offline-run-*")
telemetry.emit(made("start", 0, epochs=2, steps_per_epoch=12, total_steps=24))
step = 0
for epoch in range(2):
    for _ in range(12):
        step += 1
        telemetry.on_step(epoch, step)
        if step % 5 == 0:
            telemetry.emit(made("step", step, epoch=epoch, loss=2.5 / step, lr=0.1, scale=65536.0, skipped=1,
                           samples_per_s=1234.0, **times))
    metrics = {"val_loss": 0.25, "accuracy": 0.875 + epoch / 10, "macro_f1": 0.9}
    telemetry.emit(made("eval", step, epoch=epoch, **metrics, samples=360, seconds=1.5))
telemetry.warn("something is odd")
telemetry.emit(made("report", step, text="precision    recall\\n   class 0      1.00\\n"))
telemetry.emit(made("end", step, state="done", exit=0, seconds=83.0, since_step=0, samples_per_s=1200.0,
               metrics={"val_loss": 0.25, "accuracy": 0.975},
               step_time={"steps": 15, "rank": 0, "waited_ms": 0.0, **times}))
telemetry.close()
assert threading.enumerate() == [threading.main_thread()], threading.enumerate()
"""

END = [
    "precision    recall",
    "   class 0      1.00",
    "",
    "done after 24 steps in 1:23 at 1,200 samples/s: val_loss 0.2500, accuracy 97.50 %",
    "input-bound: 71 % of the step waits for data: raise data.num_workers (sets that are not in memory), "
    "make the data set's transform cheaper, or raise data.batch_size",
    "step 10.0 ms on average: data 7.1, compute 2.0, communication 0.5, update 0.4, other 0.0",
    "files: /runs/one",
    "to upload the run to wandb: wandb sync /runs/one/wandb/offline-run-*",
]

DECISIONS = [
    "precision fp16, emulated: this CPU has no fp16 arithmetic",
    "tracker offline: no API key",
]


@pytest.fixture(scope="module")
def piped():
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", RUN], capture_output=True, text=True, check=True
    )


def run_on_terminal(columns):
    """(stdout, which is a pipe here; what the terminal behind stderr got)."""
    leader, follower = pty.openpty()
    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    shown = bytearray()

    def read():
        try:
            while chunk := os.read(leader, 65536):
                shown.extend(chunk)
        except OSError:  # Linux: the other side is closed
            pass

    reader = threading.Thread(target=read)
    with subprocess.Popen(
        [sys.executable, "-W", "error", "-c", RUN], stdout=subprocess.PIPE, stderr=follower, text=True
    ) as process:
        os.close(follower)
        reader.start()
        out = process.stdout.read()
    reader.join()
    os.close(leader)
    assert process.returncode == 0, shown.decode()
    return out, shown.decode()


def test_through_a_pipe_each_step_event_is_a_line(piped):
    lines = piped.stdout.splitlines()
    assert piped.stderr == ""
    assert lines[:2] == DECISIONS
    steps = [line for line in lines if line.startswith("epoch ")]
    assert [re.search(r"step (\d+)/24", line)[1] for line in steps] == ["5", "10", "15", "20"]
    expected = "epoch 1/2  step 5/24  train_loss 0.5  lr 0.1  1,234 samples/s  scale 65536  skipped 1"
    assert steps[0] == expected
    assert re.search(r"epoch 2/2  step 20/24 .*  eta \d+:\d\d$", steps[-1])
    assert lines[-9:-8] == [""]
    assert lines[-8:] == END
    assert "\x1b" not in piped.stdout
    assert "\r" not in piped.stdout


def test_each_evaluation_stands_under_its_titles(piped):
    lines = piped.stdout.splitlines()
    at = [number for number, line in enumerate(lines) if "accuracy" in line and "F1" in line]
    assert len(at) == 2, "step lines come between, so the titles are repeated"
    assert lines[at[0]].split() == ["epoch", "step", "val_loss", "accuracy", "F1", "samples", "seconds"]
    assert lines[at[0] + 1].split() == ["1", "12", "0.2500", "87.50", "%", "0.9000", "360", "1.5000"]
    assert lines[at[1] + 1].split()[:2] == ["2", "24"]
    assert len(lines[at[0]]) == len(lines[at[0] + 1])


def test_names_and_texts_of_others_cannot_control_the_terminal():
    out, odd = io.StringIO(), "\x1b[2Jgone\r\x9b1m"
    telemetry = Telemetry([Console(out, io.StringIO(), Path(f"/runs/{odd}"))])
    telemetry.decision("tracker", f"in {odd}", sync=f"wandb sync {odd}")
    telemetry.warn(f"the file {odd}")
    texts = {f"text {odd}": f"two\n\tlines {odd}"}
    numbers, pictures = {f"number {odd}": 1.0}, {f"picture {odd}": odd}
    telemetry.emit(made("after_evaluation", 1, texts=texts, numbers=numbers, pictures=pictures))
    telemetry.emit(made("eval", 1, val_loss=1.0, set=odd, **{odd: 0.5}))
    telemetry.emit(made("report", 1, text=f"precision {odd}\n"))
    telemetry.emit(made("end", 1, state="done", metrics={odd: 0.5}))
    telemetry.close()
    text = out.getvalue()
    assert {each for each in text if not each.isprintable()} == {"\n", "\t"}
    assert text.count("\\x1b[2Jgone\\x0d\\x9b1m") == 13
    assert "two\n\tlines" in text, "their lines are kept"


def test_on_a_terminal_there_is_a_bar_per_epoch_and_one_table():
    out, shown = run_on_terminal(columns=140)
    lines = out.splitlines()
    assert lines[:2] == DECISIONS
    assert lines[-8:] == END
    assert not [line for line in lines if line.startswith("epoch 1/2")], "no step lines beside the bar"
    assert len([line for line in lines if "accuracy" in line and "F1" in line]) == 1
    assert "epoch 1/2" in shown
    assert "epoch 2/2" in shown
    assert re.search(r"epoch 2/2 \|.+\| \d+/12, ", shown)
    for text in ("loss 0.", "1,234 samples/s", "scale 65536", "skipped 1", "eta "):
        assert text in shown
    assert shown.endswith(("\r", "\x1b[A", " ", "\x1b[K")), "the bar is gone at the end"


def timed(step, data, compute, wire, update):
    times = {"data_ms": data, "compute_ms": compute, "communication_ms": wire, "update_ms": update}
    return {"step": step, "step_ms": float(data + compute + wire + update), **times}


def shares_of(*records) -> TimeShares | None:
    totals = TimeTotals()
    for record in records:
        totals.add(record_of(made("step", **record)))
    return totals.shares()


@pytest.mark.parametrize(
    ("parts", "verdict"),
    [
        ((71, 20, 5, 4), "input-bound: 71 % of the step waits for data"),
        ((10, 40, 45, 5), "communication-bound: 45 % of the step waits for the exchange of gradients"),
        ((31, 38, 31, 0), "input-bound: 31 %"),
        ((5, 50, 5, 40), "update-bound: 40 % of the step updates the weights"),
        ((10, 70, 10, 10), "compute-bound: 70 % of the step is forward and backward"),
    ],
)
def test_the_verdict_names_the_part_that_takes_too_much(parts, verdict):
    shares = shares_of(timed(5, *parts), timed(10, *parts))
    assert shares.verdict.startswith(verdict)


def at_end(**changed):
    parts = {"data_ms": 1.0, "compute_ms": 6.0, "communication_ms": 1.0, "update_ms": 1.0}
    of_rank = {"steps": 9, "rank": 1, "waited_ms": 0.0, "step_ms": 10.0}
    return {"step_time": parts | of_rank | changed}


@pytest.mark.parametrize(
    ("changed", "verdict"),
    [
        ({}, "compute-bound: 60 % of the step is forward"),
        ({"data_ms": 4.0}, "input-bound: 40 % of the step waits for data"),
        ({"step_ms": 20.0}, "overhead-bound: 55 %"),
        (
            {"waited_ms": 1.0},
            "compute-bound: 60 % of the step of rank 1, for which the others wait, is forward",
        ),
        ({"waited_ms": 0.9}, "compute-bound: 60 % of the step is"),
    ],
)
def test_the_slowest_rank_and_the_overhead_are_known_at_the_end(changed, verdict):
    shares = time_at_end(made("end", 1, **at_end(**changed)))
    assert shares.verdict.startswith(verdict)
    parts_ms = sum(shares.parts_ms.values())
    assert shares.other_ms + parts_ms == pytest.approx(max(parts_ms, shares.step_ms))


def test_shares_by_speed_are_advised_where_the_others_wait_and_a_step_would_be_shorter():
    for gain, waited_ms, advised in ((1.6, 1.0, True), (1.6, 0.5, False), (1.04, 1.0, False)):
        shares = time_at_end(made("end", 1, **at_end(waited_ms=waited_ms, auto_share_gain=gain)))
        assert shares.verdict.endswith("With data.share=auto a step would be 1.60 times as fast") == advised


@pytest.mark.parametrize("end", [{}, {"step_time": None}, at_end(step_ms=0.0), at_end(data_ms=float("nan"))])
def test_an_end_without_times_has_no_verdict(end):
    assert time_at_end(made("end", 1, **end)) is None


def test_the_first_event_does_not_count_and_the_rest_weigh_by_their_steps():
    shares = shares_of(timed(1, 1000, 0, 0, 0), timed(11, 0, 10, 0, 0), timed(41, 0, 50, 0, 0))
    assert shares.num_steps == 40
    assert shares.step_ms == pytest.approx((10 * 10 + 30 * 50) / 40)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "-"),
        (12345, "12,345"),
        (0.123456, "0.1235"),
        (1e-7, "1e-07"),
        (1234.5, "1,234"),
        (999_999.5, "1,000,000"),
        (2_712_126.5, "2.71e6"),
        (16_777_216.0, "16,777,216"),
        (10**12, "1,000,000,000,000"),
        (float("nan"), "nan"),
        (float("inf"), "inf"),
    ],
)
def test_numbers_read_well(value, text):
    assert number(value) == text


@pytest.mark.parametrize(("seconds", "text"), [(0, "0:00"), (59.6, "1:00"), (3723, "1:02:03"), (None, "-")])
def test_durations_read_well(seconds, text):
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("accuracy", 0.98765, "98.77 %"),
        ("samples", 16_777_216.0, "16,777,216"),
        ("loss", 0.5, "0.5000"),
        ("loss", 2.71212665029479436e36, "2.71e36"),
        ("perplexity", 123_456.75, "123456.7500"),
    ],
)
def test_metrics_read_well(name, value, text):
    assert metric(name, value) == text


def test_the_time_of_a_resumed_run_is_said_to_be_of_its_last_part():
    end = made("end", 49, state="done", seconds=122.0, since_step=20, samples_per_s=58.0)
    lines = end_lines(end, "", None, Path("/runs/one"))
    assert "done after 49 steps in 2:02 since step 20 at 58 samples/s" in lines
