"""`doctor` as users call it: alone, and under torchrun."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from launcher import cli
from launcher.launch import worker_count

ROOT = Path(__file__).parents[2]


def environ(tmp_path: Path) -> dict[str, str]:
    return {**os.environ, "HOME": str(tmp_path), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def doctor(tmp_path: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "launcher", "doctor", *words]
    return subprocess.run(
        command, cwd=tmp_path, env=environ(tmp_path), capture_output=True, text=True, timeout=120
    )


def test_it_says_in_json_what_it_found_and_leaves_nothing(tmp_path) -> None:
    done = doctor(tmp_path, "tracker=none", "launch.nproc=1", "--json")
    assert done.returncode == 0, done.stderr
    (host,) = json.loads(done.stdout)["hosts"]
    found = {each["name"]: each for each in host["findings"]}
    assert {"Python", "torch", "CPU", "memory", "disk", "GPU"} <= found.keys()
    assert not [path for path in tmp_path.iterdir() if path.name.startswith((".doctor", "outputs"))]


def test_an_unknown_key_is_refused_before_anything_is_looked_at(tmp_path) -> None:
    done = doctor(tmp_path, "data.pth=/x")
    assert (done.returncode, done.stdout) == (2, "")
    assert "data.path" in done.stderr


@pytest.mark.slow
def test_each_host_of_a_launch_is_checked_by_itself(tmp_path) -> None:
    """A host that never comes costs the others nothing: they do not wait for each other."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    words = ["-m", "launcher", "doctor", "tracker=none", "--json"]
    done = subprocess.run(
        [*torchrun, *words], cwd=tmp_path, env=environ(tmp_path), capture_output=True, text=True, timeout=180
    )
    assert done.returncode == 0, done.stderr
    (host,) = json.loads(done.stdout)["hosts"]  # once: of two ranks the first one checks
    assert {"all-reduce", "torch", "disk"} <= {each["name"] for each in host["findings"]}


def test_more_workers_than_gpus_is_a_line_among_all_others(monkeypatch, tmp_path, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(worker_count, "visible_gpus", lambda: ("GPU-a", "GPU-b"))
    assert cli.main(["doctor", "tracker=none", "launch.nproc=3", "--json"]) == 3
    (host,) = json.loads(capsys.readouterr().out)["hosts"]
    found = {each["name"]: each for each in host["findings"]}
    assert "more workers than the 2 GPUs" in found["driver"]["advice"]
    assert {"CPU", "memory", "disk", "shared memory", "GPU", "tracker"} <= found.keys()
