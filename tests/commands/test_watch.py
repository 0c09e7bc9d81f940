"""`watch` follows a run from its files alone, leaves the terminal as it was, and never writes to the run."""

from __future__ import annotations

import os
import pty
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from dataclasses import replace
from fcntl import ioctl
from pathlib import Path

import pytest

from launcher.cli import main
from launcher.report.overview import state_text
from launcher.report.run import Run
from launcher.report.run_state import KILLED, NO_RESULT
from launcher.report.watching import (
    RESTART_GRACE_S,
    RunView,
    SweepView,
    job_line,
    run_line,
    run_screen,
    sweep_screen,
)
from launcher.run_dir.atomic import json_line, write_json
from launcher.run_dir.lock import LOCK, Holder
from launcher.telemetry.event_log import EventLog

pytestmark = pytest.mark.timeout(60)
ROOT = Path(__file__).parents[2]
NOW = 1000.0
ENTER, LEAVE = "\x1b[?1049h", "\x1b[?1049l"  # the alternate screen of a terminal
BEGAN = 100.0


def write_steps(run_dir: Path, first: int, last: int) -> None:
    log = EventLog(run_dir / "metrics.jsonl")
    for step in range(first, last + 1):
        values = {"loss": 4.0 / step, "lr": 0.1, "scale": 1024.0, "skipped": 2, "samples_per_s": 5000.0}
        log.append({"event": "step", "time": BEGAN, "step": step, "epoch": 0, **values})
    log.close()


def write_status(
    run_dir: Path, state: str, step: int = 20, age_s: float = 1.0, now: float = NOW, **more
) -> None:
    status = {"state": state, "step": step, "total_steps": 100, "eta_s": 80.0, "updated": now - age_s}
    write_json(run_dir / "status.json", status | more)


@pytest.fixture
def run_dir(tmp_path) -> Path:
    directory = tmp_path / "resnet18" / "mine"
    directory.mkdir(parents=True)
    write_steps(directory, 1, 20)
    write_status(directory, "running")
    return directory


def test_the_screen_has_progress_speed_scale_and_gpus(run_dir):
    gpu = {"index": 3, "utilisation_percent": 91.2, "power_w": 250.0, "memory_bytes": 8e9}
    with (run_dir / "metrics.jsonl").open("ab") as file:
        file.write(json_line({"event": "gpu", "time": NOW, "step": 20, "gpus": [gpu]}))
        file.write(json_line({"event": "eval", "time": NOW, "step": 20, "val_loss": 0.3, "accuracy": 0.5}))
    text = "\n".join(run_screen(RunView(run_dir).view(NOW)))
    for part in (
        "resnet18/mine  running",
        "step 20/100",
        "20 %",
        "eta 1:19",
        "train_loss 0.2",
        "accuracy 50.00 %",
    ):
        assert part in text
    for part in ("5,000 samples/s", "scale 1024", "skipped 2", "GPU 3:  91 %  250 W  8 GB", "Ctrl-C leaves"):
        assert part in text
    assert "\x1b" not in text


def write_lock(run_dir: Path, holder: Holder) -> None:
    (run_dir / LOCK).write_text(holder.text)


def ended_process() -> Holder:
    process = subprocess.Popen(["sleep", "60"])
    holder = replace(Holder.this(), pid=process.pid)
    process.kill()
    process.wait()
    return holder


def test_a_run_whose_process_was_killed_is_named_so_at_once_and_ends(run_dir):
    holder = ended_process()
    write_lock(run_dir, Holder.this())
    write_status(run_dir, "running", age_s=1.0)
    assert "running" in run_line(RunView(run_dir).view(NOW))
    assert state_text(Run.read(run_dir)) != "killed", "a parent process holds it while it restarts"
    write_lock(run_dir, holder)
    view = RunView(run_dir).view(NOW)
    assert (view.state, view.eta_s) == ("killed", None)
    assert "Ctrl-C" not in "\n".join(run_screen(view))
    assert state_text(Run.read(run_dir)) == "killed"
    assert not view.has_ended, "another process may resume it"
    write_status(run_dir, "running", age_s=RESTART_GRACE_S)
    assert RunView(run_dir).view(NOW).has_ended
    write_status(run_dir, "running", age_s=200.0)
    view = RunView(run_dir).view(NOW)
    assert (view.has_ended, view.exit_code) == (True, 1)
    for text in (run_line(view), job_line(view), "\n".join(run_screen(view))):
        assert "killed" in text
        assert "no sign of life" not in text
    sentence = f"process {holder.pid} of this run no longer exists, and last wrote 3:20 ago"
    assert sentence in run_line(view)
    assert f"To resume: the same command with run.dir={run_dir}" in run_line(view)
    assert sentence in "\n".join(run_screen(view))
    assert sweep_screen([view])[0] == "1 job: 1 killed"


UNKNOWN = Holder.of("123")  # of an older version, or of another machine


@pytest.mark.parametrize(
    ("holder", "age_s", "state", "ended"),
    [
        (None, 1.0, NO_RESULT, True),
        (Holder.this, 1e6, "running", False),
        (lambda: UNKNOWN, 1e6, "running", False),
        (lambda: ended_process(), RESTART_GRACE_S - 1, KILLED, False),
        (lambda: ended_process(), RESTART_GRACE_S, KILLED, True),
    ],
)
def test_a_run_without_a_status_is_judged_by_its_process_and_its_last_event(
    run_dir, holder, age_s, state, ended
):
    (run_dir / "status.json").unlink()
    if holder is not None:
        write_lock(run_dir, holder())
    view = RunView(run_dir).view(BEGAN + age_s)
    assert (view.state, view.has_ended) == (state, ended)
    assert not ended or view.exit_code == 1
    assert ("To resume: the same command with run.dir=" in run_line(view)) is (state in (KILLED, NO_RESULT))


def states_of(run_dir: Path) -> tuple[str, str, int]:
    """By watch, by report, and the exit code of watch."""
    view = RunView(run_dir).view(time.time())
    return view.state, Run.read(run_dir).state, view.exit_code


def test_the_result_of_an_earlier_process_is_not_that_of_a_killed_one(run_dir):
    write_json(run_dir / "result.json", {"state": "preempted", "exit": 75, "error": "stopped on request"})
    os.utime(run_dir / "result.json", (NOW, NOW))
    with (run_dir / "metrics.jsonl").open("ab") as file:
        file.write(json_line({"event": "restart", "time": NOW + 10, "step": 20}))
    write_status(run_dir, "running", now=time.time())
    write_lock(run_dir, ended_process())
    assert states_of(run_dir) == (KILLED, KILLED, 1)
    assert Run.read(run_dir).error == ""


@pytest.mark.parametrize("is_known", [True, False])
def test_a_silent_run_whose_process_exists_or_is_unknown_does_not_end(run_dir, is_known):
    write_lock(run_dir, Holder.this() if is_known else replace(ended_process(), host="elsewhere"))
    write_status(run_dir, "running", age_s=200.0)
    view = RunView(run_dir).view(NOW)
    assert not view.has_ended
    assert "no sign of life for 3:20" in run_line(view)
    assert ("it is not known whether it still runs" in run_line(view)) is not is_known


@pytest.mark.parametrize(
    ("state", "ended"), [("done", True), ("preempted", True), ("failed", True), ("starting", False)]
)
def test_a_run_has_ended_when_its_process_has(run_dir, state, ended):
    write_status(run_dir, state, exit=6)
    assert RunView(run_dir).view(NOW).has_ended is ended
    write_lock(run_dir, Holder.this())  # a parent process may restart it
    assert not RunView(run_dir).view(NOW).has_ended
    write_lock(run_dir, ended_process())
    assert RunView(run_dir).view(NOW).has_ended or state == "starting"


def test_a_sweep_has_a_line_for_each_job_and_running_ones_come_first(tmp_path):
    views = []
    for number in range(12):
        directory = tmp_path / f"{number}_optim.lr={number}"
        directory.mkdir()
        write_status(directory, "running" if number == 11 else "done", exit=0)
        views.append(RunView(directory).view(NOW))
    lines = sweep_screen(views)
    assert len(lines) == 13
    assert lines[0] == "12 jobs: 11 done, 1 running"
    assert lines[1].startswith("11_optim.lr=11  running"), "running jobs come first"
    assert {line.index("  done") for line in lines[2:]} == {len("11_optim.lr=11")}, "a column"


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["watch"], "watch: give one run or sweep"),
        (["watch", "nowhere/at/all"], "watch nowhere/at/all: there is no such directory"),
        (["watch", "EMPTY"], "this is no run and no sweep"),
        (["watch", "RUN", "--every", "soon"], "argument --every: invalid float value"),
        (["report", "RUN", "--every=1"], "--every: belongs to the command watch only"),
    ],
)
def test_what_cannot_be_watched_is_refused(run_dir, tmp_path, capsys, words, text):
    (tmp_path / "empty").mkdir()
    places = {"EMPTY": str(tmp_path / "empty"), "RUN": str(run_dir)}
    assert main([places.get(word, word) for word in words]) == 2
    assert text in capsys.readouterr().err


def test_a_run_that_has_ended_is_one_line_and_its_exit_code(run_dir, capsys):
    write_status(run_dir, "failed", exit=7)
    before = {path: path.stat().st_mtime_ns for path in run_dir.rglob("*")}
    assert main(["watch", str(run_dir)]) == 7
    assert capsys.readouterr().out.count("\n") == 1
    assert {path: path.stat().st_mtime_ns for path in run_dir.rglob("*")} == before


def test_a_sweep_ends_with_the_first_code_that_is_not_0(tmp_path, capsys):
    for number, code in enumerate((0, 5, 7)):
        directory = tmp_path / f"{number}_seed={number}"
        directory.mkdir()
        if code != 5:  # that one failed before its first event
            (directory / "metrics.jsonl").touch()
        write_status(directory, "failed" if code else "done", exit=code, age_s=0.0)
    (tmp_path / "summary.md").touch()
    assert main(["watch", str(tmp_path)]) == 5
    assert capsys.readouterr().out.splitlines()[0] == "3 jobs: 1 done, 2 failed"


WITHOUT_TORCH = """
import sys
from launcher.cli import main
code = main(sys.argv[1:])
assert "torch" not in sys.modules
sys.exit(code)
"""


def watching(run_dir: Path, *words: str) -> list[str]:
    return [sys.executable, "-m", "launcher", "watch", str(run_dir), *words]


class Terminal:
    """`watch` on a terminal of its own, in a process group whose parent is not in it, as a shell's job is."""

    def __init__(self, run_dir: Path, *words: str) -> None:
        self._parent, child = pty.openpty()
        self.resize(20, 40)
        self.process = subprocess.Popen(
            watching(run_dir, *words), stdout=child, stderr=child, cwd=ROOT, process_group=0
        )
        os.close(child)

    def resize(self, rows: int, columns: int) -> None:
        ioctl(self._parent, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def read_until(self, end: bytes | None) -> str:
        return read_until(self._parent, end).decode()

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._parent)


@pytest.fixture
def terminal(run_dir) -> Iterator[Terminal]:
    write_status(run_dir, "running", now=time.time())
    opened = Terminal(run_dir, "--every=3600")  # whatever is drawn again is drawn for a signal
    yield opened
    opened.close()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_leaves_the_terminal_as_it_was(terminal, number):
    text = terminal.read_until(b"Ctrl-C leaves")
    terminal.process.send_signal(number)
    text += terminal.read_until(None)
    assert terminal.process.wait(20) == 128 + number
    assert text.startswith(ENTER)
    assert LEAVE in text[-40:], "the cursor and the screen of before"
    assert "Traceback" not in text


def test_without_rich_a_terminal_gets_lines(run_dir):
    write_status(run_dir, "done", exit=0)
    parent, child = pty.openpty()
    words = [sys.executable, "-c", "import sys; sys.modules['rich'] = None" + WITHOUT_TORCH, "watch"]
    process = subprocess.Popen([*words, str(run_dir)], stdout=child, cwd=ROOT)
    os.close(child)
    text = read_until(parent, None).decode()
    assert process.wait(20) == 0
    os.close(parent)
    assert "for a live view: " in text
    assert "done  step 20/100" in text
    assert ENTER not in text


def read_until(descriptor: int, end: bytes | None) -> bytes:
    """What was written, until `end` was; None: until the writer has closed it."""
    found = b""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline and (end is None or end not in found):
        try:
            found += os.read(descriptor, 65536)
        except OSError:  # EIO: the other side of a terminal is closed
            break
    return found


def test_a_pipe_gets_lines_until_the_run_ends_and_torch_is_never_loaded(run_dir):
    now = time.time()
    write_status(run_dir, "running", now=now)
    words = [sys.executable, "-c", WITHOUT_TORCH, "watch", str(run_dir), "--every=0.05"]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert process.stdout is not None
    assert "running  step 20/100  train_loss 0.2" in process.stdout.readline()
    write_steps(run_dir, 21, 40)
    write_status(run_dir, "done", step=40, now=now, exit=0)
    rest = process.stdout.read().splitlines()
    assert process.wait(20) == 0
    assert "done  step 40/100  train_loss 0.1" in rest[-1]
    process.stdout.close()


@pytest.mark.parametrize(
    ("codes", "rest"),
    [
        ((0, 0, 0), []),
        ((0, 75), ["3 jobs planned, 2 left: 1_seed=1, 2_seed=2", "to continue: python -m launcher -m"]),
        ((0, 7), ["3 jobs planned, 1 left: 2_seed=2", "to continue: python -m launcher -m"]),
        ((0,), ["3 jobs planned, 2 left: 1_seed=1, 2_seed=2", "to continue: python -m launcher -m"]),
    ],
)
def test_a_sweep_whose_parent_was_killed_says_what_is_left(
    tmp_path, capsys, monkeypatch, codes, rest
) -> None:
    monkeypatch.setattr("launcher.report.watching.QUIET_S", 0.0)
    names = [f"{number}_seed={number}" for number in range(3)]
    jobs = [{"name": name} for name in names]
    write_json(tmp_path / "sweep.json", {"jobs": jobs})
    for name, code in zip(names, codes, strict=False):
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.jsonl").touch()
        state = {0: "done", 75: "preempted"}.get(code, "failed")
        error = f"stopped. To resume: the same command with run.dir={name}" if code else None
        write_status(tmp_path / name, state, exit=code, age_s=1000.0, error=error)
    code = main(["watch", str(tmp_path), "--every=-1"])  # the shortest that there is
    lines = capsys.readouterr().out.splitlines()
    head = next(line for line in lines if line.startswith("3 jobs: "))
    assert ("waiting" in head) == (len(codes) < 3)
    assert not any("To resume" in line for line in lines)  # each job alone
    found = [line for line in lines if " planned, " in line or line.startswith("to continue")]
    assert len(found) == len(rest)
    assert all(line.startswith(text) for line, text in zip(found, rest, strict=True))
    assert code == next((each for each in codes if each), 1 if rest else 0)


@pytest.mark.parametrize(
    ("of_sweep", "of_job", "over"),
    [("ended", "ended", True), ("ended", "lives", False), ("lives", "ended", False)],
)
def test_a_killed_sweep_is_over_soon_unless_its_jobs_continue(
    tmp_path, monkeypatch, of_sweep, of_job, over
) -> None:
    holders = {"ended": ended_process(), "lives": Holder.this()}
    job = tmp_path / "0_seed=0"
    job.mkdir()
    (job / "metrics.jsonl").touch()
    write_json(tmp_path / "sweep.json", {"jobs": [{"name": job.name}]})
    write_status(job, "running", now=time.time())
    write_lock(job, holders[of_job])
    write_lock(tmp_path, holders[of_sweep])
    sweep = SweepView(tmp_path)
    sweep.poll()
    assert sweep.poll() is over
    assert ("1 job planned, 1 left: 0_seed=0" in sweep.lines()) is over
