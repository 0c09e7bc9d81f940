"""Runs under `wandb agent`: the real program of the installed wandb, against a stand-in of its server.

The stand-in (`wandb_server`) answers the agent's requests on loopback and hands out the commands of the test.
What wandb's own server decides (which values, when a run is stopped early) is not tested here. The jobs are
not tracked: `tests/telemetry/tracker` tests what of a sweep reaches wandb's files.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.faults.parent import ENDLESS, WORDS, children_of, is_alive, write_recipe
from tests.faults.wandb_server import SweepServer, sweep_server
from tests.limits import at_most

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
ROOT = Path(__file__).parents[2]
COMMAND = [sys.executable, "-m", "launcher", *WORDS]


class Agent:
    """A running `wandb agent` in `directory`, killed on exit with all below it."""

    def __init__(self, directory: Path, server: SweepServer) -> None:
        self.directory, self.server = directory, server
        own = {name: str(directory / "home") for name in ("WANDB_CONFIG_DIR", "WANDB_CACHE_DIR", "HOME")}
        (directory / "home").mkdir()
        environ = {key: value for key, value in os.environ.items() if not key.startswith("WANDB_")}
        environ |= own | {
            "WANDB_BASE_URL": server.url,
            "WANDB_API_KEY": "0" * 40,
            "WANDB_ERROR_REPORTING": "false",
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
        }
        self._log = directory / "agent.log"
        with open(self._log, "wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "wandb", "agent", "me/project/sweep1"],
                cwd=directory,
                env=environ,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def until(self, holds: Callable[[], Any], what: str, timeout_s: float = 80) -> None:
        deadline = time.monotonic() + at_most(timeout_s)
        while not holds():
            assert time.monotonic() < deadline, f"not within {timeout_s} s: {what}\n{self.log}"
            time.sleep(0.05)

    def until_idle(self) -> None:
        """Until a heartbeat after the last command reports that no run is left."""
        self.until(lambda: not self.server.commands, "the commands are handed out")
        seen = len(self.server.running)
        self.until(lambda: {} in self.server.running[seen + 1 :], "no run is left")

    def end(self) -> int:
        self.server.commands.append([{"type": "exit"}])
        return self.process.wait(at_most(30))

    @property
    def log(self) -> str:
        return self._log.read_text()

    def below(self) -> list[int]:
        """All processes that it has started, and those that these have, at any depth."""
        found, left = [], [self.process.pid]
        while left:
            left = [child for pid in left for child in children_of(pid)]
            found += left
        return found

    def run_dir(self, run_id: str) -> Path:
        return self.directory / "outputs" / "resnet18" / f"sweep1-{run_id}"

    def json(self, run_id: str, name: str) -> dict[str, Any]:
        return dict(json.loads((self.run_dir(run_id) / name).read_text()))


@contextmanager
def agent(directory: Path, *command: str) -> Iterator[Agent]:
    with sweep_server([*COMMAND, *command]) as server:
        running = Agent(directory, server)
        try:
            yield running
        finally:
            left = running.below()
            running.process.kill()
            running.process.wait()
            running.until(lambda: not any(map(is_alive, left)), "its processes are gone", 15)


@pytest.mark.parametrize("form", ["args_no_hyphens", "args_append_hydra", "args_override_hydra"])
def test_values_of_every_type_reach_the_run(form: str, tmp_path: Path) -> None:
    write_recipe(tmp_path)
    name = 'it\'s [a] {b: c}, "d"=e'
    with agent(tmp_path, "train.epochs=1", f"${{{form}}}") as running:
        values = {
            "optim.clip_norm": None,
            "optim.nesterov": False,
            "optim.lr": "1e-2",
            "optim.groups": [{"match": ["*bias"], "lr_scale": 2}],
            "schedule": "constant",
            "train": {"log_every_steps": 3, "deterministic": True},
            "tracker.run_name": name,
            "tracker.tags": ["a b", "c,d"],
        }
        running.server.commands.append([running.server.run("r1", values)])
        running.until_idle()
        assert running.end() == 0, running.log
        config = yaml.safe_load((running.run_dir("r1") / "config.yaml").read_text())
    assert running.json("r1", "result.json")["state"] == "done"
    assert (config["optim"]["clip_norm"], config["optim"]["nesterov"], config["optim"]["lr"]) == (
        None,
        False,
        0.01,
    )
    assert config["optim"]["groups"][0]["match"] in (["*bias"], "*bias")
    assert config["schedule"]["name"] == "constant"
    assert (config["train"]["log_every_steps"], config["train"]["deterministic"]) == (3, True)
    assert (config["tracker"]["run_name"], config["tracker"]["tags"]) == (name, ["a b", "c,d"])


def test_an_early_stop_saves_is_no_failure_and_can_be_resumed(tmp_path: Path) -> None:
    write_recipe(tmp_path, ENDLESS)
    with agent(tmp_path, "launch.nproc=2", "train.epochs=100000", "${args_no_hyphens}") as running:
        for number in range(2):
            start = running.server.run("r1", {"seed": 0}) | {"type": "resume" if number else "run"}
            running.server.commands.append([start])
            running.until(lambda: any(tmp_path.glob("pid-0-1")), "rank 1 is in its fifth step")
            for file in tmp_path.glob("pid-0-*"):
                file.unlink()
            running.server.commands.append([{"type": "stop", "run_id": "r1"}])
            running.until_idle()
            status, result = running.json("r1", "status.json"), running.json("r1", "result.json")
            assert (status["state"], result["state"]) == ("pruned", "pruned")
            assert "stopped by wandb's sweep sweep1" in result["error"]
            steps = sorted(
                int(path.name[5:]) for path in (running.run_dir("r1") / "checkpoints").glob("step-*")
            )
            assert steps[-1] == status["step"] >= 5 * (number + 1)
        assert running.end() == 0, running.log
    assert running.log.count("Cleaning up finished run: r1") == 2
    assert "failed runs" not in running.log


def test_a_stop_before_the_first_step_is_no_failure(tmp_path: Path) -> None:
    """Three failures within its first minute would end the agent. The recipe would take ten minutes."""
    write_recipe(tmp_path)
    with open(tmp_path / "tiny.py", "a") as file:
        file.write("open('imported', 'w').close(); time.sleep(600)")
    with agent(tmp_path, "launch.grace_s=5", "${args_no_hyphens}") as running:
        for number in range(4):
            running.server.commands.append([running.server.run(f"r{number}", {"seed": number})])
            running.until((tmp_path / "imported").exists, "the recipe is imported")
            (tmp_path / "imported").unlink()
            running.server.commands.append([{"type": "stop", "run_id": f"r{number}"}])
            running.until_idle()
            result = running.json(f"r{number}", "result.json")
            assert (result["state"], result["exit"]) == ("failed", 128 + signal.SIGTERM)
            assert "stopped by SIGTERM before a checkpoint could be written" in result["error"]
        assert running.end() == 0, running.log
    assert "failed runs" not in running.log
