"""Signals become requests; one that comes too late to be heeded is not swallowed where others wait for it."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from launcher.errors import DivergedError, Interrupted, LauncherError, PreemptedError
from launcher.process.signals import SAVING, saving_stops
from launcher.training.requests import Requests, heeded


@pytest.fixture
def usual_course():
    """The signals that arrive as if there were no run, instead of ending this process."""
    received: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: received.append(number))
    yield received
    signal.signal(signal.SIGTERM, before)


def test_requests_are_flags(usual_course) -> None:
    with heeded(alone=False) as requests:
        assert (requests.stop, requests.take_save()) == (None, False)
        signal.raise_signal(signal.SIGUSR1)
        assert (requests.take_save(), requests.take_save()) == (True, False)
        for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGINT):
            signal.raise_signal(number)
        assert requests.stop == signal.SIGTERM
    assert usual_course == []
    signal.raise_signal(signal.SIGTERM)
    assert usual_course == [signal.SIGTERM]


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGQUIT, signal.SIGXCPU, signal.SIGVTALRM])
def test_what_would_end_a_process_is_a_request_to_stop(number) -> None:
    with heeded(alone=True) as requests:
        signal.raise_signal(number)
        assert requests.stop == number
    assert signal.getsignal(number) == signal.SIG_IGN, "its exit code and its files are being written"


@pytest.mark.parametrize("number", SAVING)
@pytest.mark.parametrize(
    ("chosen", "under_slurm", "stops"),
    [("auto", False, False), ("auto", True, True), ("save", True, False), ("stop", False, True)],
)
def test_a_request_to_save_is_one_to_stop_where_a_scheduler_is_about_to_end_the_job(
    monkeypatch, number, chosen, under_slurm, stops
) -> None:
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    if under_slurm:
        monkeypatch.setenv("SLURM_JOB_ID", "7")
    with heeded(alone=True, saving_stops=saving_stops(chosen)) as requests:
        signal.raise_signal(number)
        assert (requests.stop, requests.take_save()) == ((number, False) if stops else (None, True))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_process_alone_ends_at_once_while_code_of_the_user_loads_data(number) -> None:
    def load(requests: Requests) -> None:
        with requests.ending_at_once(alone=True), contextlib.suppress(Exception):  # as a data set may do
            signal.raise_signal(number)

    with heeded(alone=True) as requests, pytest.raises(LauncherError) as caught:
        load(requests)
    assert caught.value.exit_code == 128 + number
    assert f"stopped by {number.name} while the data was being loaded" in str(caught.value)


def test_a_request_before_data_are_loaded_is_heeded_there_and_one_after_it_at_a_step() -> None:
    with heeded(alone=True) as requests:
        with requests.ending_at_once(alone=True):
            pass
        signal.raise_signal(signal.SIGTERM)
        with pytest.raises(LauncherError), requests.ending_at_once(alone=True):
            pytest.fail("it began to load")


def test_with_other_ranks_loading_goes_on_until_all_have_agreed() -> None:
    with heeded(alone=False) as requests, requests.ending_at_once(alone=False):
        signal.raise_signal(signal.SIGTERM)
        assert requests.stop == signal.SIGTERM


def test_a_timer_of_the_users_own_stays_theirs() -> None:
    own = signal.signal(signal.SIGVTALRM, lambda number, frame: None)
    mine = signal.getsignal(signal.SIGVTALRM)
    with heeded(alone=True):
        assert signal.getsignal(signal.SIGVTALRM) == mine
    signal.signal(signal.SIGVTALRM, own)


def test_a_hangup_that_was_ignored_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with heeded(alone=True) as requests:
            signal.raise_signal(signal.SIGHUP)
            assert requests.stop is None
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


START = [sys.executable, "-m", "launcher", "recipe=resnet18", "--cfg", "job"]
ROOT = Path(__file__).parents[2]


def mask(pid: int, name: str) -> int:
    """The signals that the process ignores (SigIgn) or catches (SigCgt), by the kernel's word."""
    (found,) = re.findall(rf"{name}:\s*(\w+)", Path(f"/proc/{pid}/status").read_text())
    return int(found, 16)


def wait_for_handler(process: subprocess.Popen[str], number: int, name: str) -> None:
    while not mask(process.pid, name) >> (number - 1) & 1:
        assert process.poll() is None, "it ended before it had a handler"


def test_a_request_to_save_during_the_start_kills_nothing() -> None:
    process = subprocess.Popen(START, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    wait_for_handler(process, signal.SIGUSR1, "SigIgn")
    while process.poll() is None:
        process.send_signal(signal.SIGUSR1)
        time.sleep(0.005)
    assert process.communicate()[0]
    assert process.returncode == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT])
def test_a_stop_during_the_start_has_a_reason(number) -> None:
    process = subprocess.Popen(START, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    wait_for_handler(process, number, "SigCgt")
    process.send_signal(number)
    (line,) = process.communicate()[1].splitlines()
    assert line.startswith(f"error: stopped by {number.name} while nothing was trained;")
    assert process.returncode == 128 + number


def test_a_hangup_that_is_ignored_stops_no_start() -> None:
    """As nohup asks for."""
    process = subprocess.Popen(["nohup", *START], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    wait_for_handler(process, signal.SIGUSR1, "SigIgn")
    process.send_signal(signal.SIGHUP)
    assert process.communicate()[0]
    assert process.returncode == 0


def test_a_second_ctrl_c_interrupts_unless_it_is_the_first_one_passed_on() -> None:
    with heeded(alone=True) as requests:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        assert requests.stop == signal.SIGINT
        requests._since_s -= 2
        with pytest.raises(Interrupted):
            signal.raise_signal(signal.SIGINT)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1])
def test_a_process_forked_by_user_code_has_the_usual_handlers(number) -> None:
    """Pool.terminate() sends SIGTERM and waits: a child that only took a note of it was never gone."""
    with heeded(alone=False) as requests:
        pipe, ends = multiprocessing.Pipe()
        child = multiprocessing.get_context("fork").Process(target=say_and_sleep, args=(ends,))
        child.start()
        assert pipe.recv() == "here"
        os.kill(child.pid, number)
        child.join(0.5 if number == signal.SIGUSR1 else 10)
        try:
            usual = 1 if number == signal.SIGINT else -number
            assert child.exitcode == (None if number == signal.SIGUSR1 else usual)
        finally:
            child.kill()
            child.join()
        signal.raise_signal(signal.SIGTERM)
        assert requests.stop == signal.SIGTERM, "this process has kept its own"


def say_and_sleep(pipe) -> None:
    sys.stderr = None  # a KeyboardInterrupt is what is expected
    pipe.send("here")
    time.sleep(60)


def test_pools_of_processes_end(tmp_path) -> None:
    with heeded(alone=True):
        for _ in range(5):
            with multiprocessing.get_context("fork").Pool(2) as pool:
                assert pool.map(abs, range(-3, 0)) == [3, 2, 1]


SLOW_FORK = """
import os, signal, time
os.register_at_fork(after_in_child=lambda: time.sleep(0.5))  # before the handlers of the child are restored
from launcher.training.requests import heeded

with heeded(alone=True):
    child = os.fork()
    if not child:
        time.sleep(60)
        os._exit(0)
    time.sleep(0.1)
    os.kill(child, signal.SIGTERM)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGTERM, status
    assert not signal.SIGTERM in signal.pthread_sigmask(signal.SIG_BLOCK, ()), "the parent receives it again"
"""


def test_a_process_that_is_ended_while_it_is_forked_ends() -> None:
    subprocess.run([sys.executable, "-c", SLOW_FORK], check=True, timeout=20)


def fail_after_a_sigterm(error: Exception, alone: bool) -> None:
    with heeded(alone):
        signal.raise_signal(signal.SIGTERM)
        raise error


@pytest.mark.parametrize(
    ("error", "alone", "passed_on"),
    [
        (RuntimeError("connection reset by peer"), False, True),
        (RuntimeError("a bug"), True, False),
        (PreemptedError("saved"), False, False),
        (DivergedError("on all ranks alike"), False, False),
    ],
)
def test_a_sigterm_that_comes_too_late(usual_course, error, alone, passed_on) -> None:
    with pytest.raises(type(error)):
        fail_after_a_sigterm(error, alone)
    assert usual_course == [signal.SIGTERM] * passed_on
