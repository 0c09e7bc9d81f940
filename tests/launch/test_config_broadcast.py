"""The hand-over between real processes: every rank gets each job, and every end has one reason."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import time
from collections.abc import Iterator, Sequence

import pytest
import torch

from launcher.distributed.env import LaunchEnv
from launcher.distributed.exit_records import ExitRecord, exit_record
from launcher.distributed.store import open_store
from launcher.errors import DataError
from launcher.launch.config_broadcast import LEAVE_S, LOST_S, seconds_after
from tests.forked import Forked, be_script
from tests.limits import at_most

# The front door with a job that says what it was given and then fails as the learning rate asks.
FRONT = """
import sys, time
from launcher import cli
from launcher.errors import DataError

def work(config, launch, store, job):
    assert (store is None) == (launch.world_size == 1)
    given = (config.seed, config.run.dir, config.tracker.group)
    print("rank", launch.rank, "job", job, "seed", *given, flush=True)
    if config.optim.lr == 7:
        raise DataError("no such data")
    if config.optim.lr == 8:
        raise ValueError("a bug")
    if config.optim.lr == 9 and launch.rank == 1:
        raise ValueError("a bug on one rank")

cli.run_worker = work
sys.exit(cli.main())
"""

BUG = "ValueError: a bug on one rank"  # the end of the traceback, and the error

# Both ends without the front door, with little patience.
ENDS = """
import os, signal, sys, time
from launcher.cli import report_failure
from launcher.distributed.env import LaunchEnv
from launcher.distributed.store import open_store
from launcher.config.resolve import compose_jobs
from launcher.config.composition import Request
from launcher.distributed.exit_records import ExitRecord
from launcher.launch import config_broadcast
from launcher.launch.config_broadcast import ConfigBroadcast, receive_jobs

case = sys.argv[1]
init_s = 3 if case == "silent" else 25  # the import of torch on a busy machine takes longer than 3 s
config_broadcast.NEXT_JOB_S = config_broadcast.LEAVE_S = 2
if case in ("lost", "leaves"):
    config_broadcast.LOST_S, config_broadcast.LEAVE_S = 1, 30
launch = LaunchEnv.from_environ(os.environ)

def work(config, launch, store, job):
    if case == "stays" and launch.rank == 1:
        time.sleep(60)
    if case == "lost":
        if launch.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.5)
        raise RuntimeError("[gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:1")
    if case == "leaves":
        if launch.rank == 1:
            raise ValueError("a bug on one rank")
        time.sleep(3)  # as in a collective, until the other rank has left
        raise RuntimeError("[gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:1")
    if case == "fails alone":
        if launch.rank == 1:
            raise ValueError("a bug on one rank")
        time.sleep(60)

def lead():
    broadcast = ConfigBroadcast(launch, work, init_s)
    (config,) = compose_jobs(Request(("recipe=resnet18",)))
    if case == "silent":
        store = open_store(launch, 3)
        time.sleep(60)
    try:
        broadcast.run(config)
    except Exception as error:
        if case == "leaves":
            began = time.monotonic()
            broadcast.send_exit(1)
            print(f"dismissed within {time.monotonic() - began:.0f} s", file=sys.stderr)
        raise
    if case == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    broadcast.send_exit(0)

try:
    code = receive_jobs(launch, work, init_s)[0] if launch.rank else lead() or 0
except Exception as error:
    code = report_failure(error)
os._exit(code)
"""


@pytest.fixture
def start(tmp_path) -> Iterator:
    """Starts ranks as a plain scheduler would, rank 0 hosting the store; leaves no process behind."""

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]

    def start_ranks(
        source: str, words: Sequence[str], world_size: int, ranks: Sequence[int] = (), **others: str
    ) -> list[Forked]:
        script = tmp_path / "front.py"
        script.write_text(source)
        started = []
        for rank in ranks or range(world_size):
            place = {
                "RANK": rank,
                "WORLD_SIZE": world_size,
                "LOCAL_RANK": rank,
                "LOCAL_WORLD_SIZE": world_size,
            }
            meeting = {
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": port,
                "OMP_NUM_THREADS": 1,
            }
            environ = os.environ | {key: str(value) for key, value in (place | meeting | others).items()}
            forked = Forked(be_script, script, words, directory=tmp_path, environ=environ)
            started.append(stack.enter_context(forked))
        return started

    with contextlib.ExitStack() as stack:
        yield start_ranks


def ends(processes: Sequence[Forked]) -> list[tuple[int, str, str]]:
    """Exit code, stdout and stderr of each rank."""
    return [(process.wait(), process.stdout, process.stderr) for process in processes]


def test_every_rank_gets_the_same_job_in_the_same_directory(start, tmp_path) -> None:
    results = ends(start(FRONT, ["recipe=resnet18", "seed=5"], 3))
    assert [code for code, _, _ in results] == [0, 0, 0], results
    (run_dir,) = (tmp_path / "outputs" / "resnet18").iterdir()
    assert [out for _, out, _ in results] == [
        f"rank {rank} job 0 seed 5 {run_dir} None\n" for rank in range(3)
    ]


def test_a_torchrun_that_joins_after_a_restart_meets_the_others(monkeypatch) -> None:
    """Without a store of the agents, each of which counts the restarts that it has seen."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        monkeypatch.setenv("MASTER_PORT", str(free.getsockname()[1]))
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "False")
    restarted, joined = (open_store(LaunchEnv(rank, 2, restart_count=1 - rank), 20) for rank in range(2))
    restarted.set("message/0", "the job")
    assert joined.get("message/0") == b"the job"  # waits: a set is not confirmed


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize(
    ("words", "text", "expected"),
    [
        (["recipe=resnet81"], "error: recipe=resnet81: there is no such recipe.", 2),
        (["recipe=resnet18", "optim.lr=9"], f"{BUG}\nerror: rank 1 failed: {BUG}\n", 1),
        (["recipe=resnet18", "run.dir=/proc/nowhere"], "The run's files cannot be written", 8),
    ],
)
def test_a_failure_is_told_once_and_ends_all_ranks_alike(start, words, text: str, expected: int) -> None:
    results = ends(start(FRONT, words, 2))
    assert [code for code, _, _ in results] == [expected, expected], results
    assert "".join(err for _, _, err in results).count(text) == 1
    assert text in results[0][2]


def test_a_sweep_goes_on_after_a_failed_job(start, tmp_path) -> None:
    results = ends(start(FRONT, ["-m", "recipe=resnet18", "optim.lr=7,8,0.1", "seed=1"], 2))
    assert [code for code, _, _ in results] == [7, 7], results
    (sweep,) = (tmp_path / "multirun" / "resnet18").iterdir()
    names = ["0_optim.lr=7", "1_optim.lr=8", "2_optim.lr=0.1"]
    assert sorted(entry.name for entry in sweep.iterdir() if entry.is_dir()) == names
    for rank, (_, out, _) in enumerate(results):
        said = [line for line in out.splitlines() if line.startswith("rank")]
        assert said == [f"rank {rank} job {job} seed 1 {sweep / names[job]} {sweep.name}" for job in range(3)]
    assert "sweep: 1 of 3 jobs done" in results[0][1]
    assert results[0][2].count("error: no such data") == 1
    assert results[0][2].count("ValueError: a bug") == 1
    assert not list(tmp_path.rglob(".hydra"))
    assert (sweep / names[0] / "overrides.txt").read_text().split() == [
        "recipe=resnet18",
        "optim.lr=7",
        "seed=1",
    ]
    jobs = json.loads((sweep / "sweep.json").read_text())["jobs"]
    assert [(job["state"], job["exit"], job["nproc"]) for job in jobs] == [
        ("failed", 7, 2),
        ("failed", 1, 2),
        ("done", 0, 2),
    ]


def test_a_sweep_in_place_stops_at_a_failed_job_where_that_is_asked_for(start, tmp_path) -> None:
    words = ["-m", "recipe=resnet18", "optim.lr=7,0.1", "sweep.on_failure=stop"]
    results = ends(start(FRONT, words, 2))
    assert [code for code, _, _ in results] == [7, 7], results
    (sweep,) = (tmp_path / "multirun" / "resnet18").iterdir()
    states = [job["state"] for job in json.loads((sweep / "sweep.json").read_text())["jobs"]]
    assert states == ["failed", "waiting"]
    assert f"the same command with sweep.resume={sweep}: it continues" in results[0][2]


def test_a_rank_that_fails_alone_ends_the_sweep_with_the_command_that_continues_it(start, tmp_path) -> None:
    results = ends(start(FRONT, ["-m", "recipe=resnet18", "optim.lr=0.2,9,0.1"], 2))
    assert [code for code, _, _ in results] == [1, 1], results
    (sweep,) = (tmp_path / "multirun" / "resnet18").iterdir()
    assert "sweep: 1 of 3 jobs done" in results[0][1]
    assert [line.split()[3] for line in results[1][1].splitlines() if line.startswith("rank")] == ["0", "1"]
    assert f"each job on processes of its own: python -m launcher -m sweep.resume={sweep}" in results[0][2]


GLOO = "[third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:1"


@pytest.mark.parametrize(
    ("error", "lost"),
    [
        (RuntimeError(GLOO), True),
        (RuntimeError(GLOO.replace("Connection closed by peer", "Timed out waiting 9000ms")), True),
        (torch.distributed.DistBackendError("remote process exited"), True),
        (RuntimeError("Wait timeout"), True),
        (ValueError("the data are broken"), False),
        (DataError("the files of nccl are broken"), False),
    ],
)
def test_a_rank_that_lost_another_one_is_not_the_origin(error: Exception, lost: bool) -> None:
    def nccl_gloo() -> None:
        raise error

    with pytest.raises(type(error)) as caught:
        nccl_gloo()
    record = exit_record(1, caught.value)
    assert record.is_secondary == lost, "by its text, not by the code that raised it"
    assert str(error) in record.error
    assert bool(record.traceback) == isinstance(error, ValueError)


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_rank_that_was_lost_without_a_word_is_named(start, ranks) -> None:
    rank0, rank1, *_ = start(ENDS, ["lost"], ranks)
    began = time.monotonic()
    assert rank1.wait(30) == -signal.SIGKILL
    assert rank0.wait(30) == 1
    assert time.monotonic() - began < at_most(6)
    assert "error: rank 1 was lost, and has not said why within 1 s: it was killed" in rank0.stderr


def test_a_rank_that_fails_alone_says_why_and_leaves(start) -> None:
    _, rank1 = start(ENDS, ["fails alone"], 2)
    assert rank1.wait(30) == 1
    assert "ValueError: a bug on one rank" in rank1.stderr


@pytest.mark.slow
def test_a_silent_rank_0_is_named(start) -> None:
    _, rank1 = start(ENDS, ["silent"], 2)
    assert rank1.wait(30) == 6
    assert "error: rank 1 waited 3 s for rank 0 to send a job." in rank1.stderr


def test_a_rank_0_that_dies_ends_the_others(start) -> None:
    rank0, rank1 = ends(start(ENDS, ["dies"], 2))
    assert rank0[0] == -signal.SIGKILL
    assert rank1[0] == 6
    assert re.search(r"rank 1 waited \d+ s for rank 0 to send a job. Then the store was gone", rank1[2])


@pytest.mark.parametrize(
    ("code", "together"), [(1, False), (2, False), (6, False), (7, False), (5, True), (9, True), (75, True)]
)
def test_a_rank_that_failed_alone_does_not_wait_a_minute_for_the_others(code, together) -> None:
    """They may wait for it in a collective, and are ended once it has left."""
    record = ExitRecord(0, 0.0, "it failed", code)
    assert seconds_after(record) == (LEAVE_S if together else LOST_S)


@pytest.mark.slow
def test_a_rank_that_left_after_its_own_failure_is_not_waited_for_at_the_end(start) -> None:
    rank0, rank1 = start(ENDS, ["leaves"], 2)
    assert (rank1.wait(30), rank0.wait(30)) == (1, 1)
    assert "a bug on one rank" in rank1.stderr
    assert re.search("dismissed within [0-5] s", rank0.stderr), rank0.stderr
