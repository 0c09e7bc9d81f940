"""Signals become requests: flags, of which nothing else is done in a handler."""

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

from launcher.errors import Interrupted
from launcher.os.signals import (
    HANDLED,
    SAVING,
    StopSignal,
    is_preemption,
    save_means_stop,
    signal_handlers_installed,
    signals_blocked,
)


@contextlib.contextmanager
def installed(alone: bool = True, save_means_stop: bool = False):
    """The handlers of a rank."""
    stop_signal = StopSignal(save_means_stop, interrupts=True)
    with signal_handlers_installed(stop_signal, alone):
        yield stop_signal


@pytest.fixture
def usual_course():
    """The signals that arrive as if there were no run, instead of ending this process."""
    received: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: received.append(number))
    yield received
    signal.signal(signal.SIGTERM, before)


def test_requests_are_flags(usual_course) -> None:
    with installed(alone=False) as requests:
        assert (requests.stop, requests.pop_save()) == (None, False)
        signal.raise_signal(signal.SIGUSR1)
        assert (requests.pop_save(), requests.pop_save()) == (True, False)
        for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGINT):
            signal.raise_signal(number)
        assert requests.stop == signal.SIGTERM
    assert usual_course == []
    signal.raise_signal(signal.SIGTERM)
    assert usual_course == [signal.SIGTERM]


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGXCPU])
def test_what_would_end_a_process_is_a_request_to_stop(number) -> None:
    with installed() as requests:
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
    with installed(save_means_stop=save_means_stop(chosen)) as requests:
        signal.raise_signal(number)
        assert (requests.stop, requests.pop_save()) == ((number, False) if stops else (None, True))


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


def test_a_second_ctrl_c_interrupts_unless_it_is_the_first_one_passed_on() -> None:
    with installed() as requests:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        assert requests.stop == signal.SIGINT
        requests._stopped_s -= 2
        with pytest.raises(Interrupted):
            signal.raise_signal(signal.SIGINT)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1])
def test_a_process_forked_by_user_code_has_the_usual_handlers(number) -> None:
    """Pool.terminate() sends SIGTERM and waits: a child that only took a note of it was never gone."""
    with installed(alone=False) as requests:
        pipe, ends = multiprocessing.Pipe()
        child = multiprocessing.get_context("fork").Process(target=say_and_sleep, args=(ends,))
        child.start()
        assert pipe.recv() == "here"
        time.sleep(0.1)  # until it sleeps: Python drops an interrupt that meets a finaliser
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


def test_a_parent_passes_signals_on_and_ignores_further_ones_after_a_stop() -> None:
    before = [signal.getsignal(number) for number in HANDLED]
    signals = StopSignal()
    with signal_handlers_installed(signals):
        with signals_blocked():
            signal.raise_signal(signal.SIGUSR1)
            assert signals.pop_received() == []
        assert signals.pop_received() == [signal.SIGUSR1]
        assert signals.stop is None
    assert [signal.getsignal(number) for number in HANDLED] == before
    with signal_handlers_installed(signals):
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGINT)
        assert signals.pop_received() == [signal.SIGTERM, signal.SIGINT]
        assert signals.stop == signal.SIGTERM
    assert {signal.getsignal(number) for number in HANDLED} == {signal.SIG_IGN}, "its end is being written"


@pytest.mark.parametrize(
    ("numbers", "pause_s", "force_quit"),
    [
        ([signal.SIGINT], 2, False),
        ([signal.SIGTERM, signal.SIGTERM], 2, False),
        ([signal.SIGINT, signal.SIGUSR1, signal.SIGINT], 2, True),
        ([signal.SIGTERM, signal.SIGINT], 2, True),
        ([signal.SIGINT, signal.SIGINT], 0.1, False),  # one request, passed on by a terminal and a script
    ],
)
def test_a_second_interrupt_ends_at_once(monkeypatch, numbers, pause_s, force_quit) -> None:
    signals, now_s = StopSignal(), 100.0
    for number in numbers:
        now_s += pause_s
        monkeypatch.setattr("launcher.os.signals.time.monotonic", lambda at=now_s: at)
        signals.handler(number)
    monkeypatch.undo()
    assert signals.force_quit == force_quit


@pytest.mark.parametrize(
    ("stop", "variable", "expected"),
    [
        (signal.SIGTERM, "SLURM_JOB_ID", True),
        (signal.SIGTERM, "KUBERNETES_SERVICE_HOST", True),
        (signal.SIGINT, "SLURM_JOB_ID", False),  # a person's Ctrl-C under salloc
        (signal.SIGTERM, "HOME", False),
    ],
)
def test_only_a_scheduler_preempts(monkeypatch, stop, variable, expected) -> None:
    for name in ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "KUBERNETES_SERVICE_HOST"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(variable, "7")
    assert is_preemption(stop) == expected
