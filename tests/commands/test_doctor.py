"""`doctor` as users call it: alone, and under torchrun on what stands for two hosts."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def environ(tmp_path: Path) -> dict[str, str]:
    return {**os.environ, "HOME": str(tmp_path), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def doctor(tmp_path: Path, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "launcher", "doctor", *words]
    return subprocess.run(
        command, cwd=tmp_path, env=environ(tmp_path) | variables, capture_output=True, text=True, timeout=120
    )


def test_it_says_in_json_what_it_found_and_leaves_nothing(tmp_path) -> None:
    done = doctor(tmp_path, "tracker=none", "launch.nproc=1", "--json")
    assert done.returncode == 0, done.stderr
    (host,) = json.loads(done.stdout)["hosts"]
    found = {each["name"]: each for each in host["findings"]}
    assert {"Python", "torch", "CPU", "memory", "disk", "clock", "GPU"} <= found.keys()
    assert not [path for path in tmp_path.iterdir() if path.name.startswith((".doctor", "outputs"))]


def test_a_failure_is_exit_code_3_with_what_to_do(tmp_path) -> None:
    done = doctor(tmp_path, "tracker=none", "launch.nproc=1", GLOO_SOCKET_IFNAME="none0")
    assert done.returncode == 3, done.stderr
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("failure")]
    assert "GLOO_SOCKET_IFNAME=none0 in the environment names no network interface" in line


def test_an_unknown_key_is_refused_before_anything_is_looked_at(tmp_path) -> None:
    done = doctor(tmp_path, "data.pth=/x")
    assert (done.returncode, done.stdout) == (2, "")
    assert "data.path" in done.stderr


def test_hosts_of_a_launch_are_looked_at_and_compared(tmp_path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        endpoint = f"127.0.0.1:{taken.getsockname()[1]}"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1"]
    torchrun += ["--rdzv-backend=c10d", f"--rdzv-endpoint={endpoint}", "--local-addr=127.0.0.1"]
    words = ["-m", "launcher", "doctor", "tracker=none", "--json"]
    hosts = [
        subprocess.Popen(
            [*torchrun, *words], cwd=tmp_path, env=environ(tmp_path), stdout=subprocess.PIPE, text=True
        )
        for _ in range(2)
    ]
    said = [host.communicate(timeout=180)[0] for host in hosts]
    assert [host.returncode for host in hosts] == [0, 0]
    (answer,) = [text for text in said if text]
    first, second = json.loads(answer)["hosts"]
    names = [each["name"] for each in first["findings"]]
    assert {"all-reduce", "hosts: clocks", "hosts: run.dir", "hosts: links"} <= set(names)
    assert "torch" in [each["name"] for each in second["findings"]]
