"""The doctor on all hosts of a launch: what each has found, compared, and the links between them.

Owns what must be equal on all hosts. Every rank calls `consult`; one rank of each host looks at its machine.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from socket import gethostname

from launcher.distributed.env import LEADER, LaunchEnv, WorkerEnv, numbered
from launcher.distributed.store import awaited_in_vain, open_store
from launcher.doctor.findings import FAILURE, NOTE, Finding, judged
from launcher.errors import StalledError, listed
from launcher.run_dir.codec import decoded, encoded

EQUAL = ("Python", "torch", "hydra-core", "CUDA", "NCCL", "driver", "GPUs")
CLOCK_NOTE_S, CLOCK_S = 2.0, 60.0  # a barrier leaves hosts apart by less than the first
SLOW_SHARE = 0.5  # of the median link
SENT = 3  # messages over each link; the first opens the connection
LEADING_S = 900.0  # that one rank of each host may look at its machine while the others wait


@dataclass(frozen=True)
class Host:
    """What one host reports."""

    name: str
    found: Sequence[Finding]
    time: float  # of its clock, at the same moment on all hosts
    sees_run_dir: bool
    received_bytes_per_s: float  # from the host before it, 0 for the only one


def consult(
    launch: LaunchEnv, place: Path, look: Callable[[], list[Finding]], timeout_s: float
) -> list[Host] | None:
    """The reports of all hosts, the comparison and the links added to that of the first; None on other ranks.

    Raises PreflightError or StalledError where the ranks do not meet.
    """
    store = open_store(launch, timeout_s)
    found = look() if launch.local_rank == 0 else []  # before torch is imported here: checks are forked
    if store is None:
        return [Host(gethostname(), found, time.time(), True, 0.0)]
    store.set(f"doctor/looked/{launch.rank}", "")
    if late := awaited_in_vain(store, "doctor/looked/{}", range(launch.world_size), LEADING_S):
        raise StalledError(f"doctor: {numbered(late)} has not answered within {LEADING_S:g} s.")
    from launcher.distributed.process_group import join

    with join(launch, store, "doctor", timeout_s) as env:
        hosts, exchanged = _met(env, place, found)
    hosts[0] = replace(hosts[0], found=[*hosts[0].found, exchanged, *compared(hosts)])
    return hosts if env.is_leader else None


def _met(env: WorkerEnv, place: Path, found: list[Finding]) -> tuple[list[Host], Finding]:
    """The reports of all hosts, and the finding of the exchange between all ranks. A collective."""
    from launcher.distributed.collectives import exchange_texts
    from launcher.distributed.preflight import mark, sees
    from launcher.doctor.exchange import exchange
    from launcher.doctor.links import MEASURED_S, judged_exchange

    exchanged = exchange(env.rank, env.world_size, env.device, MEASURED_S)
    now = time.time()  # an all-reduce has just ended on all ranks
    with mark(place) if env.is_leader else nullcontext("") as made:
        path = exchange_texts(env, made)[LEADER]
        # Where rank 0 cannot make one no host sees it, and the check of the disk says why.
        is_seen = path != "" and sees(path)
        local_ranks = exchange_texts(env, str(env.local_rank))  # all have looked: the mark may go
    rate = _received(env, [rank for rank, local_rank in enumerate(local_ranks) if local_rank == "0"])
    own = Host(gethostname(), found, now, is_seen, rate)
    said = exchange_texts(env, json.dumps(encoded(own)) if env.local_rank == 0 else "")
    hosts = [decoded(Host, json.loads(text)) for text in said if text]
    return hosts, judged_exchange(exchanged, env.world_size)


def _received(env: WorkerEnv, leaders: Sequence[int]) -> float:
    """Bytes per second that this rank receives from the host before its own, one link after the other."""
    import torch
    import torch.distributed as dist

    from launcher.engine.flat.layout import MAX_RUN_BYTES

    rate, message = 0.0, torch.zeros(MAX_RUN_BYTES // 2, dtype=torch.float16, device=env.device)
    for number, source in enumerate(leaders if len(leaders) > 1 else ()):
        target = leaders[(number + 1) % len(leaders)]
        for _ in range(SENT):
            began = time.perf_counter()
            if env.rank == source:
                dist.send(message, target)
            elif env.rank == target:
                dist.recv(message, source)
                elapsed_s = float(message[-1]) + time.perf_counter() - began  # on a GPU, reading it waits
                rate = message.nbytes / elapsed_s
        dist.barrier()
    return rate


def compared(hosts: Sequence[Host]) -> Iterator[Finding]:
    """What differs between hosts, and the slowest of their links."""
    if len(hosts) < 2:
        return
    values: list[Mapping[str, str]] = [{each.name: each.value for each in host.found} for host in hosts]
    for name in EQUAL:
        by_value: dict[str, list[str]] = {}
        for host, said in zip(hosts, values, strict=True):
            by_value.setdefault(said.get(name, "none"), []).append(host.name)
        if len(by_value) > 1:
            text = "; ".join(f"{value} on {listed(names, 4)}" for value, names in by_value.items())
            yield judged(f"hosts: {name}", text, "Install and start all hosts alike.", FAILURE)
    times = [host.time for host in hosts]
    apart_s = max(times) - min(times)
    advice = "Synchronise the clocks (chronyc makestep)." if apart_s > CLOCK_NOTE_S else ""
    verdict = FAILURE if apart_s > CLOCK_S else NOTE
    yield judged("hosts: clocks", f"{apart_s:.1f} s apart at most", advice, verdict)
    blind = [host.name for host in hosts if not host.sees_run_dir]
    own_disk = "A run is refused there: put run.dir on a shared disk, or give launch.hosts=mixed."
    value = f"not seen by {listed(blind, 8)}" if blind else "one file system"
    yield judged("hosts: run.dir", value, own_disk if blind else "")
    rates = [host.received_bytes_per_s for host in hosts]
    slowest = min(range(len(hosts)), key=rates.__getitem__)
    is_slow = rates[slowest] < SLOW_SHARE * statistics.median(rates)
    value = f"slowest {hosts[slowest - 1].name} to {hosts[slowest].name}, {rates[slowest] / 1e9:.2f} GB/s"
    look = "It holds up all ranks: look at its cable, port and interface." if is_slow else ""
    yield judged("hosts: links", value, look)
