"""Two machines, as network namespaces: where a link dies or a machine is gone, every host still ends."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from scripts.bench.network import INTERFACE, Network
from tests.faults.launching import WORDS, Ended, nothing, run
from tests.faults.test_stopping import SLOW, step_reached, workers_of
from tests.faults.usercode import record
from tests.limits import at_most

pytestmark = [pytest.mark.timeout(120), pytest.mark.slow]
HANG_TIMEOUT_S = 4
ROOT = Path(__file__).parents[2]


class Hosts:
    """Two hosts with a cable between them; each runs one torchrun with one worker."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._network = Network(2)
        self.processes: list[subprocess.Popen[str]] = []

    def connect(self) -> None:
        self._network.connect()

    def remove(self) -> None:
        for process in self.processes:
            for pid in (*workers_of(process), process.pid) if process.poll() is None else ():
                os.kill(pid, signal.SIGKILL)
            process.communicate()
        self._network.remove()

    def link(self, state: str) -> None:
        self._network.set_link(0, state)

    def start(
        self,
        *words: str,
        elastic_store_on: int | None = None,
        max_restarts: int = 0,
        nnodes: str = "2",
        recipe: str = SLOW,
    ) -> None:
        """Without `elastic_store_on`, the number of a host, torchrun's store is on that of rank 0."""
        (self.directory / "slow.py").write_text(recipe.replace("STARTED", "pass"))
        cores = sorted(os.sched_getaffinity(0))
        for host in range(2):
            core = str(cores[host % len(cores)])  # one each: more threads are other bits
            command = self._network.inside(host, ["taskset", "-c", core])
            command += [sys.executable, "-m", "torch.distributed.run", f"--nnodes={nnodes}"]
            command += [
                "--nproc-per-node=1",
                f"--max-restarts={max_restarts}",
                *meeting(host, elastic_store_on),
            ]
            job = ["-m", "launcher", *WORDS, f"recipes.path={self.directory / 'slow.py'}", *words]
            process = subprocess.Popen(
                [*command, *job, f"run.dir={self.run_dir}"],
                cwd=self.directory,
                env=os.environ
                | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": INTERFACE},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            self.processes.append(process)

    @property
    def run_dir(self) -> Path:
        return self.directory / "run"

    def wait_for_step(self, step: int) -> None:
        deadline = time.monotonic() + 60
        while not step_reached(self.run_dir, step):
            assert all(process.poll() is None for process in self.processes)
            assert time.monotonic() < deadline
            time.sleep(0.01)


def meeting(host: int, elastic_store_on: int | None) -> list[str]:
    if elastic_store_on is None:
        return ["--master-addr=10.99.0.1", "--master-port=29511", f"--node-rank={host}"]
    return [
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint=10.99.0.{elastic_store_on + 1}:29511",
        # With a range, torchrun waits so long for more hosts than the least.
        f"--rdzv-conf=is_host={int(host == elastic_store_on)},last_call_timeout=5",
        f"--local-addr=10.99.0.{host + 1}",  # ranks are in the order of these
    ]


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    made = Hosts(tmp_path)
    try:
        made.connect()
    except OSError as error:
        made.remove()
        pytest.skip(f"network namespaces cannot be made here: {error}")
    yield made
    made.remove()


def test_both_hosts_end_where_the_link_is_down_for_good(hosts: Hosts) -> None:
    hosts.start("train.epochs=1000", f"launch.hang_timeout_s={HANG_TIMEOUT_S}")
    hosts.wait_for_step(8)
    hosts.link("down")
    began = time.monotonic()
    outputs = [process.communicate(timeout=at_most(HANG_TIMEOUT_S + 10))[0] for process in hosts.processes]
    assert time.monotonic() - began < at_most(HANG_TIMEOUT_S + 10)
    assert [process.returncode for process in hosts.processes] == [1, 1]
    for rank, output in enumerate(outputs):
        assert re.search(rf"error: rank {rank} hangs: in .+ step \d+ for", output), output
    assert "launcher/launch/config_broadcast.py" not in outputs[1], "a traceback of ours"


def test_a_host_ends_where_the_machine_of_rank_0_is_gone(hosts: Hosts) -> None:
    hosts.start("train.epochs=1000", f"launch.hang_timeout_s={HANG_TIMEOUT_S}")
    hosts.wait_for_step(8)
    hosts.link("down")
    began = time.monotonic()
    for pid in (*workers_of(hosts.processes[0]), hosts.processes[0].pid):
        os.kill(pid, signal.SIGKILL)
    output = hosts.processes[1].communicate(timeout=at_most(HANG_TIMEOUT_S + 10))[0]
    assert time.monotonic() - began < at_most(HANG_TIMEOUT_S + 10)
    assert re.search(r"error: rank 1 hangs: in .+ step \d+ for", output), output


def test_torchrun_with_a_restart_left_restarts_once_the_link_is_up(hosts: Hosts) -> None:
    words = ("train.epochs=1000", f"launch.hang_timeout_s={HANG_TIMEOUT_S}")
    hosts.start(*words, elastic_store_on=0, max_restarts=1)
    hosts.wait_for_step(8)
    first = workers_of(hosts.processes[1])
    hosts.link("down")
    time.sleep(HANG_TIMEOUT_S + 8)
    assert hosts.processes[1].poll() is None
    hosts.link("up")
    deadline = time.monotonic() + 60  # the kernel repeats the request at intervals that double
    while set(workers_of(hosts.processes[1])) <= set(first):
        assert hosts.processes[1].poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.1)


# SLOW, which also writes down the samples of each step.
RECORDED = SLOW.replace(
    "launching.USER_CODE = slowly",
    """from functools import partial
from pathlib import Path
from tests.faults.usercode import record
launching.USER_CODE = partial(record, directory=Path(DIRECTORY), then=slowly)""",
)


def samples_by_step(file: Path) -> dict[int, list[int]]:
    """The samples of one rank by the number of steps before; of a step taken twice, the last time."""
    lines = (line.split(": ") for line in file.read_text().splitlines())
    return {int(step): [int(number) for number in numbers.split()] for step, numbers in lines}


@pytest.mark.timeout(240)
def test_with_a_range_of_hosts_the_one_that_is_left_goes_on_with_the_same_batches(
    hosts: Hosts, tmp_path: Path
) -> None:
    """`--nnodes=1:2`: torchrun restarts on one host after the other is gone."""
    (batches := tmp_path / "batches").mkdir()
    recipe = RECORDED.replace("DIRECTORY", repr(str(batches)))
    hosts.start(
        f"launch.hang_timeout_s={HANG_TIMEOUT_S}",
        elastic_store_on=0,
        max_restarts=1,
        nnodes="1:2",
        recipe=recipe,
    )
    hosts.wait_for_step(8)
    for pid in (*workers_of(hosts.processes[1]), hosts.processes[1].pid):
        os.kill(pid, signal.SIGKILL)
    left = hosts.processes[0]
    output = left.communicate(timeout=180)[0]
    assert left.returncode == 0, output
    ended = Ended(hosts.run_dir, [0], [output], 0)
    assert [event["world_size"] for event in ended.events("start")] == [2, 1]
    (restart,) = ended.events("restart")
    first, second = (samples_by_step(batches / f"rank{rank}") for rank in range(2))
    together = {
        step: numbers + (second[step] if step < restart["step"] else []) for step, numbers in first.items()
    }
    (alone := tmp_path / "alone").mkdir()
    run(tmp_path / "whole", user_code=partial(record, directory=alone, then=nothing))
    assert together == samples_by_step(alone / "rank0")
