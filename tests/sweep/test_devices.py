"""Which devices a job gets, and what its process is."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path

import pytest

from launcher.commands import sweep
from launcher.config.resolve import Request, compose_jobs
from launcher.distributed.env import LaunchEnv
from launcher.errors import ConfigError, PreflightError
from launcher.launch import worker_count
from launcher.os.signals import StopSignal
from launcher.sweep.launchers.devices import DeviceLauncher, DevicePool
from launcher.sweep.progress import SweepProgress
from launcher.sweep.scheduler import Scheduler
from launcher.sweep.state import SweepJob, SweepState
from tests.configs import composed
from tests.faults.parent import is_alive

EIGHT = [f"GPU-{number}" for number in range(8)]


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], 1),
        (["sweep.parallel=2"], 4),
        (["launch.nproc=3"], 3),
        (["sweep.launcher=slurm"], 1),
        (["sweep.launcher=slurm", "launch.nproc=16"], 16),
        (["launch.nproc=9"], None),
    ],
)
def test_how_many_workers_a_job_gets_on_eight_gpus(words, expected, monkeypatch) -> None:
    for module in (worker_count, sweep):
        monkeypatch.setattr(module, "visible_gpus", lambda: tuple(EIGHT))
    (config,) = compose_jobs(Request(("recipe=resnet18", "data.batch_size=4", *words), multirun=True))
    if expected is None:
        with pytest.raises(PreflightError, match=r"launch\.nproc=9 asks for more workers than the 8 GPUs"):
            sweep.devices_of_a_job(config)
        return
    assert sweep.devices_of_a_job(config) == expected
    with nullcontext() if expected <= 4 else pytest.raises(ConfigError, match="number of ranks, 16"):
        worker_count.refuse_small_batch(config, LaunchEnv(), expected)


def job(number: int, nproc: int = 1) -> SweepJob:
    return SweepJob(number, str(number), (), nproc=nproc)


def until(holds: Callable[[], object]) -> None:
    deadline = time.monotonic() + 20
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def describe(directory: Path) -> int:
    """What a job sees of its process."""
    seen = {
        "gpus": os.environ.get("CUDA_VISIBLE_DEVICES"),
        "cores": sorted(os.sched_getaffinity(0)),
        "leads": os.getsid(0) == os.getpid(),
        "sigint": signal.getsignal(signal.SIGINT) is signal.default_int_handler,
        "blocked": [*signal.pthread_sigmask(signal.SIG_BLOCK, [])],
    }
    os.write(1, b"a line of the job\n")
    (directory / "seen.json").write_text(json.dumps(seen))
    return 3


def ends(launcher: DeviceLauncher) -> Mapping[int, int]:
    found: dict[int, int] = {}
    until(lambda: found.update({each.number: each.exit or 0 for each in launcher.poll(0.05)}) or found)
    return found


def test_a_job_runs_in_a_session_of_its_own_on_its_devices(tmp_path) -> None:
    pool = DevicePool(EIGHT[:2], sorted(os.sched_getaffinity(0)))
    with DeviceLauncher(pool, describe, alone=False) as launcher:
        first, second, third = job(0), job(1), job(2)
        for each in (first, second):
            (tmp_path / each.name).mkdir()
            assert launcher.has_capacity(each)
            launcher.submit(each, tmp_path / each.name)
        assert not launcher.has_capacity(third)
        codes = {**ends(launcher), **(ends(launcher) if launcher._children else {})}
        assert codes == {0: 3, 1: 3}
        assert launcher.has_capacity(third)
    seen = [json.loads((tmp_path / str(number) / "seen.json").read_text()) for number in range(2)]
    assert [each["gpus"] for each in seen] == ["GPU-0", "GPU-1"]
    assert [*first.devices, *second.devices] == EIGHT[:2]
    assert all(each["leads"] and each["sigint"] and not each["blocked"] for each in seen)
    if len(os.sched_getaffinity(0)) == 2:
        assert [len(each["cores"]) for each in seen] == [1, 1]
    assert (tmp_path / "0" / "output.log").read_text() == "a line of the job\n"


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize(
    ("pool", "workers", "expected"),
    [
        (DevicePool(EIGHT, [0]), [2, 2, 4, 1], [["0", "1"], ["2", "3"], ["4", "5", "6", "7"], None]),
        (DevicePool(EIGHT[:2], [0], per_gpu=2), [1, 1, 1, 1, 1], [["0"], ["1"], ["0"], ["1"], None]),
        (DevicePool(EIGHT, [0], shares=2), [1, 1, 1], [["0"], ["1"], None]),
        (DevicePool(EIGHT[:1], [0], per_gpu=3), [1, 1, 1, 1], [["0"], ["0"], ["0"], None]),
    ],
)
def test_gpus_are_shared_out_and_none_is_taken_twice(pool, workers, expected, tmp_path) -> None:
    given: list[list[str] | None] = []
    with DeviceLauncher(pool, lambda directory: time.sleep(60) or 0, alone=False) as launcher:
        for number, nproc in enumerate(workers):
            each = job(number, nproc)
            if launcher.has_capacity(each):
                launcher.submit(each, tmp_path)
                given.append([name.removeprefix("GPU-") for name in each.devices])
            else:
                given.append(None)
    assert given == expected


def test_on_a_cpu_the_cores_are_shared_out() -> None:
    pool = DevicePool([], [0, 1, 2, 3, 4], shares=2)
    assert [pool.cores_of(part, 2) for part in range(2)] == [[0, 1], [2, 3, 4]]
    assert [pool.cores_of(part, 8) for part in range(8)] == [[0], [0], [1], [1], [2], [3], [3], [4]]


@pytest.mark.parametrize(("at_once", "code"), [(False, 143), (True, 137)])
def test_a_job_is_stopped_or_killed(tmp_path, at_once, code, capfd) -> None:
    with DeviceLauncher(DevicePool([], [0]), lambda directory: time.sleep(60) or 0, alone=True) as launcher:
        only = job(0)
        launcher.submit(only, tmp_path)
        launcher.stop(only, at_once)
        assert ends(launcher) == {0: code}


def test_no_job_outlives_the_context(tmp_path) -> None:
    with DeviceLauncher(DevicePool([], [0]), lambda directory: time.sleep(60) or 0, alone=True) as launcher:
        launcher.submit(job(0), tmp_path)
        (pid,) = launcher._children.values()
        assert is_alive(pid)
    assert not is_alive(pid)


@pytest.mark.slow
def test_devices_are_busy_and_no_file_stays_open(tmp_path) -> None:
    lengths = random.Random(0).choices([1.0, 2.0, 3.0, 4.0], k=200)

    def work(directory: Path) -> int:
        began = time.monotonic()
        time.sleep(lengths[int(directory.name)])
        (directory / "worked").write_text(str(time.monotonic() - began))
        return 0

    jobs = [job(number) for number in range(200)]
    for each in jobs:
        (tmp_path / each.name).mkdir()
    record, files = SweepState(jobs, ()), len(os.listdir("/proc/self/fd"))
    began = time.monotonic()
    with DeviceLauncher(DevicePool(EIGHT, sorted(os.sched_getaffinity(0))), work, alone=False) as launcher:
        progress = SweepProgress(tmp_path, jobs, alone=False)
        Scheduler(tmp_path, record, launcher, composed().sweep, progress, StopSignal()).run()
    took = time.monotonic() - began
    busy = sum(float((tmp_path / each.name / "worked").read_text()) for each in jobs) / (8 * took)
    print(f"busy {busy:.3f} of {took:.1f} s")
    assert {each.state for each in jobs} == {"done"}
    assert len(os.listdir("/proc/self/fd")) == files
    # A fork of a process with torch takes 10 ms of the parent's, and many times that on a crowded machine.
    crowded = os.getloadavg()[0] > 2 * len(os.sched_getaffinity(0))
    assert busy >= (0.8 if crowded else 0.95)
