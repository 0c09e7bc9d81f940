"""Jobs on a real Slurm: they train over two nodes, save when they are to leave, and come back bit-equal."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import re
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from launcher.run_dir.lock import locked
from tests.faults.parent import WORDS, write_recipe
from tests.leaks import PR_SET_CHILD_SUBREAPER
from tests.machines import cluster
from tests.machines.cluster import Job
from tests.telemetry.tracker.test_wandb_session import transaction_log

if reason := cluster.reason_for_none():
    pytest.skip(reason, allow_module_level=True)
pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

# A step takes long until the file is there, so that there is time to interrupt the run.
SLOW = "if not os.path.exists('go'): time.sleep(0.2)"
EPOCHS = 60  # of four steps
TRAIN = (
    *WORDS,
    "launch.nproc=1",
    f"train.epochs={EPOCHS}",
    "train.eval_every_epochs=20",
    "data.num_workers=1",  # loader processes get the signals as well
    "checkpoint.every_s=null",
    "checkpoint.every_steps=10",
    "tracker=wandb",
    "tracker.mode=offline",
)
TWO = ("--nodes=2", "--ntasks-per-node=1")


def recipe_in(directory: Path) -> Path:
    write_recipe(directory, SLOW)
    recipe = directory / "tiny.py"
    samples = "[{'image': each, 'label': int(each[0] > 0)} for each in x]"
    recipe.write_text(recipe.read_text().replace("Recipe(build, data,", f"Recipe(build, {samples},"))
    return directory


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return recipe_in(tmp_path)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Job]:
    directory = recipe_in(tmp_path_factory.mktemp("undisturbed"))
    (directory / "go").touch()
    with Job(directory, *TRAIN, options=TWO) as job:
        job.until_ended()
        yield job


def test_a_job_over_two_nodes_trains_evaluates_saves_and_ends(undisturbed: Job) -> None:
    assert undisturbed.state == "COMPLETED", undisturbed.said
    assert "workers 2 (2 x CPU" in undisturbed.said
    assert read(undisturbed.run_dir / "result.json")["state"] == "done"
    assert (undisturbed.run_dir / "checkpoints" / f"step-{4 * EPOCHS:08d}").is_dir()
    assert [codes for _, codes in wandb_of(undisturbed.run_dir)] == [[0]]


@pytest.mark.parametrize("how", ["USR1", "USR2", "TERM", "preemption", "time limit"])
def test_a_job_that_is_to_leave_saves_comes_back_and_ends_bit_equal(
    directory: Path, undisturbed: Job, how: str
) -> None:
    # The signal comes 40 s after the start: Slurm counts limits in minutes.
    limit = ("--time=1", "--signal=USR1@20") if how == "time limit" else ()
    with Job(directory, *TRAIN, options=(*TWO, *limit)) as job:
        if how != "time limit":
            job.until(lambda: step_of(job.run_dir) >= 10, "it trains")
        if how == "preemption":
            with Other(directory):
                job.until_requeued()
        elif how != "time limit":
            job.signal(how)
        job.until_requeued()
        assert read(job.run_dir / "status.json")["state"] == "preempted", job.said
        (directory / "go").touch()
        job.start_again()
        job.until_ended()
        assert_done_like(job, undisturbed)
        (first, ended), (second, done) = wandb_of(job.run_dir)
        assert first == second, "one run in wandb"
        # Slurm's SIGTERM reaches wandb's own service as well, which then records no end.
        assert (ended, done) == ([] if how in ("TERM", "preemption") else [75], [0])


def test_one_task_per_gpu_trains_like_one_per_node_saves_and_comes_back(directory: Path) -> None:
    gpus, words = ("--nodes=2", "--gpus-per-node=2"), (*TRAIN, "launch.nproc=2")
    (directory / "go").touch()
    with Job(directory, *words, options=(*gpus, "--ntasks-per-node=1")) as parents:
        parents.until_ended()
    assert "workers 4 (4 x CPU" in parents.said
    (directory / "go").unlink()
    with Job(directory, *words, options=(*gpus, "--ntasks-per-node=2")) as job:
        job.until(lambda: step_of(job.run_dir) >= 10, "it trains")
        job.signal("USR1")
        job.until_requeued()
        assert read(job.run_dir / "status.json")["state"] == "preempted", job.said
        (directory / "go").touch()
        job.start_again()
        job.until_ended()
        assert_done_like(job, parents)
        assert "workers 4 (4 x CPU" in job.said


def test_signals_at_any_time_during_start_and_save_only_delay_a_job(
    directory: Path, undisturbed: Job
) -> None:
    with Job(directory, *TRAIN, options=TWO) as job:
        job.until(lambda: job.state == "RUNNING", "it runs")
        for name in ("USR1", "TERM", "USR2") * 200:
            job.signal(name)
            time.sleep(0.3)
            if job.facts()["Restarts"] == "1":
                break
        job.until_requeued()
        (directory / "go").touch()
        job.start_again()
        job.until_ended()
        assert_done_like(job, undisturbed)


def test_a_job_whose_node_dies_is_requeued_by_slurm_and_resumes(directory: Path, undisturbed: Job) -> None:
    with Job(directory, *TRAIN, options=TWO) as job:
        job.until(lambda: step_of(job.run_dir) >= 12, "it trains and has saved")
        with dead(cluster.nodes()[1], job):
            job.until_requeued()
        (directory / "go").touch()
        job.start_again()
        job.until_ended()
        assert_done_like(job, undisturbed)
        assert "resume after step" in job.said


def test_jobs_of_an_array_have_directories_of_their_own_and_stay_cancelled(directory: Path) -> None:
    options = ("--nodes=1", "--ntasks-per-node=1", "--array=3-4")
    with Job(directory, *TRAIN, options=options) as job:
        places = [directory / "outputs" / "slurm" / f"{job.id}_{number}" for number in (3, 4)]
        job.until(lambda: all(step_of(place) >= 5 for place in places), "both train")
        cluster.ask("scancel", job.id)
        job.until(job.is_gone, "both are gone")
        assert [read(place / "status.json")["state"] for place in places] == ["preempted"] * 2


def test_one_task_where_there_are_two_nodes_is_refused(directory: Path) -> None:
    options = ("--nodes=2", "--ntasks=2")
    one = f"srun --nodes=1 --ntasks=1 {cluster.LAUNCHER}"
    with Job(
        directory,
        options=options,
        command="; ".join(
            f"{one} {' '.join(TRAIN)} {more}"
            for more in ("", "launch.nnodes=2", "launch.nnodes=1 train.max_steps=4 run.dir=alone")
        ),
    ) as job:
        (directory / "go").touch()
        job.until_ended()
        assert re.search(r"SLURM_\w+=2 in the environment.* give launch\.nnodes=1", job.said, re.S)
        assert "launch.nnodes=2, but srun has started 1 task" in job.said
        assert read(directory / "alone" / "result.json")["world_size"] == 1, job.said


def test_the_directory_of_a_run_that_is_still_alive_is_refused(directory: Path) -> None:
    (directory / "other").mkdir()
    with (
        locked(directory / "other"),
        Job(directory, *TRAIN, "run.dir=other", options=TWO) as job,
    ):
        job.until_ended()
        assert (job.state, job.facts()["ExitCode"]) == ("FAILED", "2:0"), job.said
        assert f"is in use by another process (pid {os.getpid()} on {socket.gethostname()})" in job.said


class Other:
    """A job that takes both nodes for a moment, in a partition of higher priority."""

    def __init__(self, directory: Path) -> None:
        if not cluster.ask("sinfo", "--noheader", "--partition=high"):
            pytest.skip("the cluster has no partition `high` that preempts")
        command = ["sbatch", "--parsable", "--partition=high", "--nodes=2", "--exclusive", "--wrap=sleep 100"]
        self._id = cluster.ask(*command, f"--output={directory / 'other.out'}").strip()

    def __enter__(self) -> Other:
        return self

    def __exit__(self, *error: object) -> None:
        cluster.ask("scancel", self._id)


@contextlib.contextmanager
def dead(node: str, job: Job) -> Iterator[None]:
    """The node is dead within the context: its slurmd, and all processes of the job there."""
    found = [pid for pid in processes() if is_slurmd(pid, node)]
    if not found:
        pytest.skip(f"the slurmd of {node} is not on this machine, where it could be killed")
    command = Path(f"/proc/{found[0]}/cmdline").read_bytes().split(b"\0")[:-1]
    of_job = {
        pid for pid in processes() if variables(pid).items() >= {b"SLURM_JOB_ID": job.id.encode()}.items()
    }
    there = [pid for pid in of_job if variables(pid).get(b"SLURMD_NODENAME") == node.encode()]
    stepds = {parent_of(pid) for pid in there} - of_job
    for pid in (*found, *stepds, *there):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    # Slurm would notice by itself after SlurmdTimeout, which is five minutes.
    cluster.ask("scontrol", "update", f"NodeName={node}", "State=DOWN", "Reason=killed")
    try:
        yield
    finally:
        # The daemon outlives this process: pytest adopts what tests leave behind, to end it.
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 0)
        subprocess.run(command, timeout=60, check=True)
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)


def processes() -> list[int]:
    return [int(path.name) for path in Path("/proc").glob("[0-9]*")]


def is_slurmd(pid: int, node: str) -> bool:
    try:
        program, *arguments = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    except (OSError, ValueError):
        return False
    return Path(program).name == "slurmd" and node in arguments


def variables(pid: int) -> dict[bytes, bytes]:
    try:
        lines = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return {}
    return {line.partition(b"=")[0]: line.partition(b"=")[2] for line in lines}


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def read(path: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(path.read_text()))
    except FileNotFoundError:
        return {}


def step_of(run_dir: Path) -> int:
    return read(run_dir / "status.json").get("step") or 0


def assert_done_like(job: Job, undisturbed: Job) -> None:
    assert (job.state, job.facts()["Restarts"]) == ("COMPLETED", "1"), job.said
    digests = [read(each.run_dir / "result.json")["weights_sha256"] for each in (job, undisturbed)]
    assert digests[0] == digests[1]


def wandb_of(run_dir: Path) -> list[tuple[str, list[int]]]:
    """Of each attempt, in their order, the id of its run in wandb and the exit codes that it has recorded."""
    from wandb.proto import wandb_internal_pb2

    found = []
    for path in sorted(run_dir.glob("wandb/offline-run-*/run-*.wandb")):
        records = [wandb_internal_pb2.Record.FromString(data) for data in transaction_log(path.read_bytes())]
        codes = [each.exit.exit_code for each in records if each.WhichOneof("record_type") == "exit"]
        found.append((path.stem, codes))
    return found
