"""Each part of a step is made its bound on purpose, and the end of the run says so."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from launcher.telemetry.step_time import PARTS, TimeShares, time_at_end
from scripts.bench.network import INTERFACE, Network, lacking, network
from tests.faults.bounds import SAMPLE_S
from tests.faults.launching import WORDS, Ended, run

pytestmark = [pytest.mark.timeout(120), pytest.mark.slow]
RECIPES = Path(__file__).with_name("bounds.py")
ROOT = Path(__file__).parents[2]
FIXED = (f"recipes.path={RECIPES}", "checkpoint.every_steps=null", "train.max_steps=40", "train.epochs=100")


def split_of(ended: Ended) -> TimeShares:
    assert ended.codes == [0] * len(ended.codes), ended
    (end,) = ended.events("end")
    shares = time_at_end(end)
    assert shares is not None
    assert shares.verdict in ended.outputs[0]
    assert ended.result["step_time"] == end["step_time"]
    # The sum of the parts is the step: what is in no part is what the loop does between two steps.
    assert sum(shares.parts_ms.values()) <= 1.02 * shares.step_ms
    for event in ended.events("step"):
        parts = sum(event[part] for part in (*PARTS, "other_ms"))
        assert parts == pytest.approx(event["step_ms"], rel=0.02, abs=0.1)
    return shares


BOUNDS = {
    "slow_set": (1, ("data.workers=0",), "input-bound"),
    "large": (1, ("data.batch_size=512", "precision=fp32"), "compute-bound"),
    "table": (1, ("data.batch_size=4", "optim=adamw", "precision=fp32"), "update-bound"),
    "tiny": (1, (), "overhead-bound"),
}


@pytest.mark.parametrize("name", BOUNDS)
def test_what_bounds_the_step_is_named(tmp_path: Path, name) -> None:
    ranks, words, verdict = BOUNDS[name]
    shares = split_of(run(tmp_path / "run", *FIXED, *words, f"recipe.uses={name}", ranks=ranks))
    assert shares.verdict.startswith(f"{verdict}:"), shares
    if name == "slow_set":
        assert 16 * SAMPLE_S < shares.parts_ms["data_ms"] / 1e3 < 32 * SAMPLE_S
    assert shares.parts_ms["wire_ms"] == 0.0, "there is none"


def test_where_one_rank_waits_for_another_the_slow_one_is_named_with_its_bound(tmp_path: Path) -> None:
    """Rank 0, which writes the events, waits in the exchange of gradients."""
    words = ("data.workers=0", "recipe.uses=slow_set_of_rank_1")
    ended = run(tmp_path / "run", *FIXED, *words, ranks=2)
    shares = split_of(ended)
    assert shares.verdict.startswith("input-bound: "), shares
    assert "of the step of rank 1, for which the others wait, waits for data" in shares.verdict
    assert ended.events("step")[-1]["wire_ms"] > ended.events("step")[-1]["data_ms"]


@pytest.fixture
def slow_link() -> Iterator[Network]:
    """Two hosts on a link of 100 Mbit/s."""
    if reason := lacking():
        pytest.skip(reason)
    with network(2) as made:
        for host in range(2):
            limit = "from scripts.bench.network import limit_own_link; limit_own_link(100)"
            subprocess.run(made.inside(host, [sys.executable, "-c", limit]), cwd=ROOT, check=True)
        yield made


def test_a_slow_link_is_named(tmp_path: Path, slow_link: Network) -> None:
    """1 M parameters at 100 Mbit/s: 2 MB each way take 168 ms, the rest a tenth of that."""
    words = [*WORDS, *FIXED, "recipe.uses=wide", "data.batch_size=8", "train.max_steps=8"]
    processes = []
    for host in range(2):
        command = slow_link.inside(host, [sys.executable, "-m", "torch.distributed.run", "--nnodes=2"])
        command += ["--nproc-per-node=1", "--master-addr=10.99.0.1", "--master-port=29511"]
        command += [f"--node-rank={host}", "-m", "launcher", *words, f"run.dir={tmp_path / 'run'}"]
        environ = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": INTERFACE}
        processes.append(
            subprocess.Popen(
                command,
                cwd=tmp_path,
                env=os.environ | environ,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    outputs = [process.communicate(timeout=100)[0] for process in processes]
    shares = split_of(Ended(tmp_path / "run", [process.returncode for process in processes], outputs, 0))
    assert shares.verdict.startswith("wire-bound: "), shares
    assert 120 < shares.parts_ms["wire_ms"] < 300
