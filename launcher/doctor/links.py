"""Checks of the links between the ranks of one machine: copies and sums that must be exact, and bandwidth.

Owns the processes that test them, the limit of their time, and the name of what is broken. Imports no torch.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import repeat
from pathlib import Path
from typing import Any

from launcher.distributed import nccl
from launcher.doctor.findings import FAILURE, Check, Finding, judged
from launcher.errors import counted
from launcher.os.lifetime import ENDS_WITH_STARTER, PYTHON

PAIR_S = 90.0  # interpreters that import torch and start CUDA and NCCL take 15 s, beside other jobs a minute
MEASURED_S = 2.0
LEAST_GAIN = 1.1  # from here on unequal shares are advised: one product more or less is no reason
PROGRAM = (*PYTHON, "-m", "launcher.doctor.exchange")
WITHOUT_PEERS = {"NCCL_P2P_DISABLE": "1"}


def checks(gpus: int, ranks: int) -> list[Check]:
    """All checks of this file, of which those of pairs of GPUs come first."""
    found = []
    if gpus > 1:
        rounds = gpus if gpus % 2 else gpus - 1
        found.append(Check("GPU pairs", lambda: pairs(gpus), 2 * PAIR_S * rounds + 10))
    if ranks > 1:
        devices = [f"cuda:{number}" for number in range(ranks)] if gpus else ["cpu"] * ranks
        found.append(Check("all-reduce", lambda: bandwidth(devices), PAIR_S + 30))
    return found


def bandwidth(devices: Sequence[str]) -> Iterator[Finding]:
    """The rate of an all-reduce between all ranks of this machine, which also must be exact."""
    said = exchanged(devices, MEASURED_S, {})
    if isinstance(said, str):
        advice = "The ranks of a run would not get further. NCCL_DEBUG=INFO says more in a run."
        yield judged("all-reduce", said, advice, FAILURE)
        return
    yield judged_exchange(said, len(devices))
    if any(device != "cpu" for device in devices):
        yield judged_speeds(said["speeds"])


def judged_speeds(speeds: Sequence[float]) -> Finding:
    """The finding of the speeds of the ranks, in any unit."""
    value = " : ".join(f"{speed / min(speeds):.2f}" for speed in speeds)
    gain = sum(speeds) / len(speeds) / min(speeds)
    advice = f"With data.share=auto a step of long computation is up to {gain:.2f} times as fast."
    return judged("speeds of the ranks", value, advice if gain >= LEAST_GAIN else "")


def judged_exchange(said: Mapping[str, Any], ranks: int) -> Finding:
    """The finding of an exchange between `ranks` ranks."""
    value = f"{said['bytes_per_s'] / 1e9:.2f} GB/s on each link of a ring of {counted(ranks, 'rank')}"
    wrong = "" if said["summed"] else "Sums are wrong: do not train here before that is fixed."
    return judged("all-reduce", value, wrong, FAILURE)


def pairs(gpus: int, program: Sequence[str] = PROGRAM) -> Iterator[Finding]:
    """Copies and sums between every two GPUs. Pairs without a GPU in common are tested at the same time."""
    broken: dict[tuple[int, int], str] = {}
    with ThreadPoolExecutor(max(1, gpus // 2)) as pool:
        for together in rounds(gpus):
            found = zip(together, pool.map(trouble, together, repeat(program)), strict=True)
            broken |= {pair: text for pair, text in found if text}
    if not broken:
        yield Finding("GPU pairs", f"{math.comb(gpus, 2)}, copies and sums exact")
    for (one, other), text in broken.items():
        yield judged("GPU pairs", f"{one} and {other}: {text}", advice_on_peers(), FAILURE)


def rounds(gpus: int) -> Iterator[list[tuple[int, int]]]:
    """Every pair once, in rounds in which each GPU occurs at most once: the circle method of tournaments."""
    places = [*range(gpus)] + ([-1] if gpus % 2 else [])
    for _ in range(len(places) - 1):
        half = len(places) // 2
        met = zip(places[:half], reversed(places[half:]), strict=True)
        yield [(min(pair), max(pair)) for pair in met if -1 not in pair]
        places = [places[0], places[-1], *places[1:-1]]


def trouble(pair: tuple[int, int], program: Sequence[str]) -> str:
    """What is wrong between two GPUs; empty if nothing is."""
    devices = [f"cuda:{number}" for number in pair]
    said = exchanged(devices, 0.0, {}, program)
    if not isinstance(said, str):
        wrong = [name for name in ("copied", "summed") if not said[name]]
        if not wrong:
            return ""
        said = f"bytes that were {' and '.join(wrong)} are wrong"
    again = exchanged(devices, 0.0, WITHOUT_PEERS, program)
    heals = not isinstance(again, str) and again["summed"]
    return f"{said}; with NCCL_P2P_DISABLE=1 sums are {'right' if heals else 'no better'}"


def advice_on_peers() -> str:
    """What to do about direct copies between GPUs that hang or corrupt."""
    if any(Path("/sys/class/iommu").glob("*")):
        off = "turn it off (BIOS, or iommu=pt for the kernel), or ACS on the PCIe switches"
        return f"The IOMMU is on, which redirects copies between GPUs: {off}, or run with NCCL_P2P_DISABLE=1."
    return "Run with NCCL_P2P_DISABLE=1; look at dmesg, the risers, and ACS on the PCIe switches."


def exchanged(
    devices: Sequence[str], seconds: float, environ: Mapping[str, str], program: Sequence[str] = PROGRAM
) -> dict[str, Any] | str:
    """What rank 0 of the test program says; a text where the ranks hang or fail."""
    variables = dict(os.environ)
    nccl.prepare(variables, one_machine=True)
    variables.pop("NCCL_DEBUG", None)  # its lines go to stdout too
    variables |= {"OMP_NUM_THREADS": "1", ENDS_WITH_STARTER: "1", **environ}
    num_ranks, limit_s = len(devices), PAIR_S + seconds
    with tempfile.TemporaryDirectory(prefix="doctor-") as folder, ThreadPoolExecutor(num_ranks) as pool:
        words = [str(num_ranks), f"{folder}/store", str(seconds), *devices]
        how: dict[str, object] = {"env": variables, "stdin": subprocess.DEVNULL, "timeout": limit_s}
        run = partial(subprocess.run, capture_output=True, text=True, **how)
        try:
            ended = list(pool.map(run, ([*program, str(rank), *words] for rank in range(num_ranks))))
        except subprocess.TimeoutExpired:
            return f"no answer within {limit_s:g} s"
    for number, rank in enumerate(ended):
        if rank.returncode:
            last = (rank.stderr.strip() or "no word").splitlines()[-1]
            return f"rank {number} ended with {rank.returncode}: {last[:300]}"
    answer: dict[str, Any] = json.loads(ended[0].stdout.splitlines()[-1])
    return answer
