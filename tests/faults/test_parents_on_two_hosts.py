"""Parent mode on two machines, as network namespaces: one run, one verdict, and no host that stays behind."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from scripts.bench.network import INTERFACE, Network
from tests.faults.launching import WORDS, Ended
from tests.faults.parent import children_of, is_alive
from tests.faults.test_stopping import SLOW, step_reached
from tests.limits import at_most

pytestmark = [pytest.mark.timeout(200), pytest.mark.slow]
ROOT = Path(__file__).parents[2]
HANG_TIMEOUT_S = 6


class Hosts:
    """Two machines; each runs one parent with `nproc` workers, all in `directory`."""

    def __init__(self, directory: Path) -> None:
        self.directory, self.run_dir = directory, directory / "run"
        self.network = Network(2)
        self.parents: list[subprocess.Popen[str]] = []
        (directory / "slow.py").write_text(SLOW.replace("STARTED", "pass"))

    def start(self, *words: str, nproc: int = 1, slow: bool = True) -> None:
        for node in range(2):
            self.start_node(node, *words, nproc=nproc, slow=slow)

    def start_node(
        self,
        node: int,
        *words: str,
        nproc: int = 1,
        slow: bool = False,
        before: Sequence[str] = (),
        **environ: str,
    ) -> subprocess.Popen[str]:
        given = [
            *WORDS,
            f"run.dir={self.run_dir}",
            f"launch.nproc={nproc}",
            f"launch.hang_timeout_s={HANG_TIMEOUT_S}",
        ]
        given += [f"recipes.path={self.directory / 'slow.py'}"] if slow else []
        given += ["launch.nnodes=2", f"launch.node_rank={node}"]
        given += [f"launch.rdzv_endpoint={self.network.address(0)}:29511"]
        parent = subprocess.Popen(
            [*self.network.inside(node, before), sys.executable, "-m", "launcher", *given, *words],
            cwd=self.directory,
            env=os.environ
            | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": INTERFACE}
            | environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.parents.append(parent)
        return parent

    def at_step(self, step: int) -> list[list[int]]:
        """The workers of each host, once the run has come to that step."""
        deadline = time.monotonic() + at_most(90)
        while not step_reached(self.run_dir, step):
            assert all(parent.poll() is None for parent in self.parents), self.end()
            assert time.monotonic() < deadline
            time.sleep(0.01)
        return [children_of(parent.pid) for parent in self.parents]

    def end(self, timeout_s: float = 90) -> Ended:
        """What is left once all parents have ended, within the time."""
        began = time.monotonic()
        outputs = []
        for parent in self.parents:
            left_s = at_most(timeout_s) - (time.monotonic() - began)
            outputs.append(parent.communicate(timeout=max(1, left_s))[0])
        codes = [parent.returncode for parent in self.parents]
        self.parents = []
        return Ended(self.run_dir, codes, outputs, time.monotonic() - began)

    def remove(self) -> None:
        for parent in self.parents:
            parent.kill()
            parent.communicate()
        self.network.remove()


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    made = Hosts(tmp_path)
    try:
        made.network.connect()
    except OSError as error:
        made.remove()
        pytest.skip(f"network namespaces cannot be made here: {error}")
    yield made
    made.remove()


def test_two_machines_of_two_workers_are_one_run(hosts: Hosts, undisturbed) -> None:
    hosts.start(nproc=2, slow=False)
    ended = hosts.end()
    assert ended.digest == undisturbed(ranks=4).digest
    assert ended.result["world_size"] == 4
    assert {path.name for path in (hosts.run_dir / "logs").iterdir()} == {f"rank{n}.log" for n in range(4)}
    assert "done after" in ended.outputs[0]
    assert "step" not in ended.outputs[1]


@pytest.mark.parametrize("lost", [0, 1])
def test_a_killed_rank_is_named_and_a_restart_ends_bit_equal(hosts: Hosts, undisturbed, lost: int) -> None:
    hosts.start("launch.max_restarts=1", nproc=2)
    pid = hosts.at_step(8)[lost][-1]
    os.kill(pid, signal.SIGKILL)
    ended = hosts.end()
    assert ended.digest == undisturbed(ranks=4).digest
    rank = 2 * lost + 1
    verdict = rf"restart 1 of 1: rank {rank} was killed by SIGKILL \(pid {pid} on \S+\) (in|before|while) .*"
    assert re.search(verdict + r"; resuming from step \d+ \(checkpoint\)", ended.outputs[0]), ended
    assert "error" not in ended.outputs[1]


@pytest.mark.parametrize("what", ["parent", "host"])
@pytest.mark.parametrize("lost", [0, 1])
def test_a_killed_parent_or_host_ends_all_machines_and_the_same_command_resumes(
    hosts: Hosts, undisturbed, lost: int, what: str
) -> None:
    hosts.start("launch.max_restarts=3")
    workers = hosts.at_step(8)
    killed = hosts.parents[lost]
    for pid in (*(workers[lost] if what == "host" else ()), killed.pid):
        os.kill(pid, signal.SIGKILL)
    ended = hosts.end(HANG_TIMEOUT_S + 10)
    assert ended.codes[lost] == -signal.SIGKILL
    assert ended.codes[1 - lost] == 6, ended
    assert re.search(rf"error: node {lost}( \(\S+\))? is gone: ", ended.outputs[1 - lost])
    deadline = time.monotonic() + at_most(10)
    while any(is_alive(pid) for pids in workers for pid in pids):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    hosts.start(slow=False)
    assert hosts.end().digest == undisturbed(ranks=2).digest


def test_machines_with_disks_of_their_own_resume_the_checkpoint_of_rank_0(hosts: Hosts, undisturbed) -> None:
    own = hosts.directory / "disk of node 1"
    own.mkdir()
    hosts.run_dir.mkdir()
    # `ip netns exec` has made a mount namespace for the process.
    bind = ("sh", "-c", 'mount --bind "$0" "$1" && shift && exec "$@"', str(own), str(hosts.run_dir))

    def start(*words: str, slow: bool = True) -> None:
        hosts.start_node(0, *words, slow=slow)
        hosts.start_node(1, *words, slow=slow, before=bind)

    start("launch.max_restarts=1")
    hosts.at_step(8)
    hosts.parents[1].send_signal(signal.SIGTERM)
    stopped = hosts.end()
    assert stopped.codes == [75, 75], stopped
    start("launch.max_restarts=1")
    step = stopped.status["step"]
    (pid,) = hosts.at_step(step + 8)[1]
    os.kill(pid, signal.SIGKILL)
    ended = hosts.end()
    assert ended.digest == undisturbed(ranks=2).digest
    resumed, restarted = (event["step"] for event in ended.events("restart"))
    assert step == resumed < restarted
    assert not [*own.glob("checkpoints/*")], "rank 0 writes and reads for all"


def test_both_machines_end_where_the_link_is_down_for_good(hosts: Hosts) -> None:
    hosts.start("train.epochs=1000")
    hosts.at_step(8)
    hosts.network.set_link(0, "down")
    ended = hosts.end(HANG_TIMEOUT_S + 10)
    assert ended.codes == [6, 6], ended
    for node in range(2):
        assert re.search(rf"error: node {1 - node}( \(\S+\))? is gone: ", ended.outputs[node])
    assert json.loads((hosts.run_dir / "result.json").read_text())["exit"] == 6


def test_a_hung_rank_on_the_other_machine_is_named_with_all_stacks(hosts: Hosts) -> None:
    hosts.start("train.epochs=1000")
    pid = hosts.at_step(8)[1][0]
    os.kill(pid, signal.SIGSTOP)
    ended = hosts.end(HANG_TIMEOUT_S + 10)
    assert ended.codes == [6, 6], ended
    assert re.search(
        rf"error: rank 1 \(pid {pid} on \S+\) hangs: in .* \(stopped by SIGSTOP\)", ended.outputs[0]
    )
    assert len([*(hosts.run_dir / "logs").glob("stacks-rank*.txt")]) == 2


@pytest.mark.parametrize("asked", [0, 1])
def test_sigterm_to_one_parent_saves_after_one_step_on_all_machines(hosts: Hosts, undisturbed, asked) -> None:
    hosts.start()
    hosts.at_step(8)
    hosts.parents[asked].send_signal(signal.SIGTERM)
    ended = hosts.end()
    assert ended.codes == [75, 75], ended
    assert "stopped: after step" in ended.outputs[0]
    hosts.start(slow=False)
    assert hosts.end().digest == undisturbed(ranks=2).digest


def test_a_stop_of_one_machine_whose_ranks_must_be_killed_is_no_crash(hosts: Hosts) -> None:
    """Node 0, which had no signal itself, restarted the run."""
    deaf = SLOW.replace("STARTED", "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)")
    (hosts.directory / "slow.py").write_text(deaf)
    # No evaluation either: after the checkpoint of the best one a rank that is killed has saved.
    words = ("checkpoint.every_steps=null", "train.epochs=1000", "train.eval_every_epochs=1000")
    hosts.start("launch.max_restarts=1", "launch.grace_s=2", *words)
    hosts.at_step(8)
    hosts.parents[1].send_signal(signal.SIGTERM)
    ended = hosts.end()
    assert ended.codes == [143, 143], ended
    assert "error: stopped by SIGTERM " in ended.outputs[0]
    assert "restart 1 of 1" not in ended.outputs[0]


def test_machines_that_do_not_fit_are_refused_in_words(hosts: Hosts) -> None:
    short = "launch.init_timeout_s=4"
    hosts.start_node(1, short)
    nobody = hosts.end()
    assert nobody.codes == [6]
    assert re.search(
        r"node 1 could not reach node 0 within 4 s: .*launch\.init_timeout_s", nobody.outputs[0], re.S
    )
    hosts.start_node(0, short)
    missing = hosts.end()
    assert missing.codes == [6]
    assert (
        "error: node 1 did not come to launch.rdzv_endpoint=10.99.0.1:29511 within 4 s" in missing.outputs[0]
    )
    hosts.start_node(0, "launch.init_timeout_s=25")  # both import torch within that time
    hosts.start_node(1, "launch.init_timeout_s=25", "seed=7")
    other = hosts.end()
    assert other.codes[1] == 3
    assert re.search(r"node 1 was given .* seed=7, and the node 0 that it found at ", other.outputs[1])


def test_a_wrong_config_is_said_once_by_node_0_and_ends_all(hosts: Hosts) -> None:
    hosts.start("optim.lr=fast", slow=False)
    ended = hosts.end()
    assert ended.codes == [2, 2], ended
    assert ended.outputs[0].startswith("error: optim.lr=fast")
    assert "error on node 0: optim.lr=fast" in ended.outputs[1]
