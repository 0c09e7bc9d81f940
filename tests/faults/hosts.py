"""Runs of one rank on each host of a network of namespaces, under torchrun, for the fault tests."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

from scripts.bench.network import INTERFACE, Network
from tests.faults.launching import WORDS, Ended

ROOT = Path(__file__).parents[2]
LIMIT_S = 100.0


def limit_link(network: Network, host: int, mbit: int) -> None:
    """Limit what a host sends."""
    limit = f"from scripts.bench.network import limit_own_link; limit_own_link({mbit})"
    subprocess.run(network.inside(host, [sys.executable, "-c", limit]), cwd=ROOT, check=True)


def run_on_hosts(network: Network, directory: Path, *words: str) -> Ended:
    """Codes and outputs by host. What still runs after LIMIT_S is killed, and TimeoutExpired raised."""
    num_hosts, began = len(network.hosts), time.monotonic()
    torchrun = [sys.executable, "-m", "torch.distributed.run", f"--nnodes={num_hosts}", "--nproc-per-node=1"]
    torchrun += [f"--master-addr={network.address(0)}", "--master-port=29511"]
    environ = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": INTERFACE}
    processes = [
        subprocess.Popen(
            network.inside(
                host,
                [*torchrun, f"--node-rank={host}", "-m", "launcher", *WORDS, *words, f"run.dir={directory}"],
            ),
            cwd=directory.parent,
            env=os.environ | environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for host in range(num_hosts)
    ]
    try:
        left_s = LIMIT_S
        outputs = []
        for process in processes:
            outputs.append(process.communicate(timeout=left_s)[0])
            left_s = max(1.0, LIMIT_S - (time.monotonic() - began))
    finally:
        for process in processes:
            process.kill()
    return Ended(directory, [process.returncode for process in processes], outputs, time.monotonic() - began)
