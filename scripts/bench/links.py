"""Bytes on the wire, and step times over links of a limited rate, between hosts that are network namespaces.

    python scripts/bench/links.py [--quick] [--rates 100 300 1000] [--buckets 100 1000] [--json FILE]

A network of 4.2 M parameters on one core per rank, SGD with momentum. Bytes are counted by the kernel on the
interface of each host, between 2 and between 4 hosts. Steps are timed between 2 hosts, each of which limits
what it sends (tc tbf). Peers: DistributedDataParallel in fp32, and with torch's fp16_compress_hook, with and
without GradScaler, each with its default buckets and with smaller ones, of which the best counts. All sides
alternate and must have the same losses. Peers compute in fp32, as ours does beside them ("fp32 arithmetic");
ours as the launcher runs it emulates fp16. The lower limit of a step is T_fwd + max(T_bwd, wire) + T_update,
with 2 bytes per parameter over 95.6 % of the link's rate, less the burst that a link saves while it is idle.
Its parts are those of torch alone, in fp32 with the fused optimizer; for emulated fp16 those of our own step
without a wire. Sharded ranks send half of these bytes beside the update. The computed step has those of
our own step, and for the cost of sending the time that the same step takes longer over the link without a
limit.

--buckets compares ours with itself: buckets of given sizes, and of the size that follows from the model's.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

from launcher.distributed.links import ring_bytes
from scripts.bench.interleaved import Figure, Times, row_of, text_table, write
from scripts.bench.links_rank import ARITHMETIC, AUTO, BARE_HOOK, OURS, Plan
from scripts.bench.network import INTERFACE, Network, burst_bytes, lacking, network
from scripts.bench.step_model import PAYLOAD, StepSeconds, wire_seconds

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
LIMIT_S = 900
TAIL = 3000  # characters kept of what a failed rank wrote
RATES = (100, 300, 1000)  # Mbit/s
PROMISED_BYTES = 2.02  # per parameter, in units of what a ring sends of one byte per parameter
OVER_DDP, OVER_HOOK = {100: 0.55, 1000: 0.65}, {100: 1.05, 1000: 1.05}  # promised, by Mbit/s


def on_hosts(hosts: Network, plan: Plan) -> list[Any]:
    """Run links_rank.py on each host, one core each, and return what the ranks have found."""
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as files:
        result = Path(folder, "result.json")
        ranks = range(len(hosts.hosts))
        logs = [files.enter_context(Path(folder, f"{rank}.log").open("w")) for rank in ranks]
        processes = [
            start_rank(hosts, rank, plan, result, log) for rank, log in zip(ranks, logs, strict=True)
        ]
        try:
            wait_for(processes)
        finally:
            for process in processes:
                process.kill()
                process.wait()
        if any(process.returncode for process in processes):
            written = [Path(log.name).read_text()[-TAIL:] for log in logs]
            raise RuntimeError("\n".join(["a rank failed:", *written]))
        return list(json.loads(result.read_text()))


def start_rank(hosts: Network, rank: int, plan: Plan, result: Path, log: IO[str]) -> subprocess.Popen[bytes]:
    cores = sorted(os.sched_getaffinity(0))
    command = [sys.executable, str(HERE / "links_rank.py"), plan.as_json(), str(result)]
    meeting = {"RANK": str(rank), "WORLD_SIZE": str(len(hosts.hosts))}
    meeting |= {"MASTER_ADDR": hosts.address(0), "MASTER_PORT": "29511", "GLOO_SOCKET_IFNAME": INTERFACE}
    return subprocess.Popen(
        hosts.inside(rank, ["taskset", "-c", str(cores[rank % len(cores)]), *command]),
        env=os.environ | meeting | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
    )


def wait_for(processes: list[subprocess.Popen[bytes]]) -> None:
    """Until all have ended, or one has failed. Raises TimeoutError."""
    deadline = time.monotonic() + LIMIT_S
    while any(process.poll() is None for process in processes):
        if any(process.returncode for process in processes):
            return
        if time.monotonic() > deadline:
            raise TimeoutError(f"the ranks still run after {LIMIT_S} s")
        time.sleep(0.1)


def figures_of_bytes(by_rank: list[Any]) -> list[Figure]:
    """Bytes are the mean of the hosts, in units of what a ring sends of one byte per parameter."""
    world_size = len(by_rank)
    unit = 2 * (world_size - 1) / world_size
    sent = {
        name: statistics.mean(rank["bytes_per_parameter"][name] for rank in by_rank) / unit
        for name in by_rank[0]["bytes_per_parameter"]
    }
    figures = []
    for name in OURS:
        own, fp32, where = sent[name], sent["ddp"], f"{world_size} ranks, {name}"
        promised = PROMISED_BYTES if name == "ours" and world_size == 2 else None
        figures.append(Figure.alone(f"bytes per parameter, {where}", [own], "B", promised))
        ratio = own / fp32
        figures.append(Figure(f"bytes, {where}", own, "B", "ddp", fp32, ratio, ratio, ratio))
        number = float(max(rank["collectives_beyond"][name] for rank in by_rank))
        figures.append(Figure.alone(f"collectives beyond the buckets, {where}", [number], ""))
    return figures


def seconds_on_wire(num_bytes: int, mbit: int) -> float:
    """What is left to send after the burst that a link saves while it is idle."""
    return wire_seconds(max(0.0, num_bytes - PAYLOAD * burst_bytes(mbit)), mbit)


def limits_of(alone: list[list[float]], mbit: int, num_parameters: int) -> list[float]:
    """Seconds: the least that a step can take, by round. Two ranks send 2 bytes per parameter each."""
    wire_s = seconds_on_wire(2 * num_parameters, mbit)
    return [StepSeconds(*parts).with_communication(wire_s) for parts in alone]


def limits_of_shards(alone: list[list[float]], mbit: int, num_parameters: int) -> list[float]:
    """The same where half of the bytes are weights, each of which is sent once it is updated."""
    half_s = seconds_on_wire(num_parameters, mbit)
    return [forward + max(backward, half_s) + max(update / 2, half_s) for forward, backward, update in alone]


def best(times: Times, kind: str) -> str:
    """The fastest of a peer's bucket sizes, its default included."""
    names = [name for name in times if name == kind or name.startswith(f"{kind}, ")]
    return min(names, key=lambda name: statistics.median(times[name]))


def figures_of_times(mbit: int, found: dict[str, Any], num_parameters: int) -> list[Figure]:
    """Ours at one rate, over the lower limit of a step, over DDP in fp32, and over DDP with torch's hook."""
    times: Times = dict(found["times"])
    figures = []
    for side, policy in ARITHMETIC.items():
        alone = "torch" if policy == "fp32" else policy
        times["limit"] = limits_of(found["alone"][alone], mbit, num_parameters)
        figures.append(Figure.ratio(f"step at {mbit} Mbit/s, {side}", times, side, "limit"))
        promised = OVER_DDP.get(mbit) if side == "ours" else None
        figures.append(Figure.ratio(f"step at {mbit} Mbit/s, {side}", times, side, "ddp", promised))
        figures.append(error_of_computed_step(mbit, found, num_parameters, side))
    own = "ours, fp32 arithmetic"
    for hook in ("ddp + hook", BARE_HOOK):
        tuned = best(times, hook)
        promised = OVER_HOOK.get(mbit) if hook == "ddp + hook" else None
        for other in dict.fromkeys([hook, tuned]):
            promise = promised if other == tuned else None
            figures.append(Figure.ratio(f"step at {mbit} Mbit/s, {own}", times, own, other, promise))
    times["limit"] = limits_of_shards(found["alone"]["fp16"], mbit, num_parameters)
    what = f"step at {mbit} Mbit/s, ours, shard"
    return figures + [Figure.ratio(what, times, "ours, shard", other) for other in ("ours", "limit")]


def error_of_computed_step(mbit: int, found: dict[str, Any], num_parameters: int, side: str) -> Figure:
    """How far the step that is computed from the parts of a step alone is from the measured one."""
    policy, median = ARITHMETIC[side], statistics.median
    parts = [median(part) for part in zip(*found["alone"][policy], strict=True)]
    cost = median(found["unlimited"][side]) - median(found["unlimited"][f"alone, {policy}"])
    wire_s = wire_seconds(ring_bytes(2 * num_parameters, 2), mbit)
    computed = StepSeconds(*parts).with_communication(wire_s, found["num_buckets"], max(0.0, cost))
    measured = median(found["times"][side])
    error = abs(computed / measured - 1)
    what = f"step as computed at {mbit} Mbit/s, {side}: share that it is off"
    return Figure(what, 1000 * computed, "ms", "measured", 1000 * measured, error, error, error)


def figure_of_buckets(mbit: int, times: Times) -> Figure:
    """The size that the launcher chooses over the best of those that were given."""
    given = [name for name in times if name != AUTO]
    fastest = min(given, key=lambda name: statistics.median(times[name]))
    return Figure.ratio(f"size of buckets as chosen, {mbit} Mbit/s", times, AUTO, fastest)


def tell(mbit: int, times: Times, limits: dict[str, list[float]]) -> None:
    print(f"\n{f'{mbit} Mbit':28} {'min ms':>9} {'median ms':>10}")
    for name, seconds in (times | limits).items():
        row = row_of(seconds)
        print(f"{name:28} {row['min_ms']:9.1f} {row['median_ms']:10.1f}")


def main() -> None:
    arguments = parse()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the namespaces are removed
    if reason := lacking():
        sys.exit(f"links.py cannot run here: {reason}.")
    plan = Plan(layers=4, width=64, batch=16) if arguments.quick else Plan()
    repeats = 2 if arguments.quick else arguments.repeats
    figures: list[Figure] = []
    rows: dict[str, Any] = {}
    for num_hosts in arguments.hosts:
        with network(num_hosts) as hosts:
            found = on_hosts(hosts, plan)
        figures += figures_of_bytes(found)
        rows[f"{num_hosts} hosts"] = found
    if arguments.rates:
        with network(2) as hosts:
            timed = on_hosts(hosts, plan.over(arguments.rates, repeats))[0]
        for rate in arguments.rates:
            found = timed[str(rate)]
            figures += figures_of_times(rate, found, plan.num_parameters)
            limits = {
                f"limit, {policy}": limits_of(each, rate, plan.num_parameters)
                for policy, each in found["alone"].items()
            }
            limits["limit, shard"] = limits_of_shards(found["alone"]["fp16"], rate, plan.num_parameters)
            tell(rate, found["times"], limits)
            rows[f"{rate} Mbit"] = {
                name: row_of(seconds) for name, seconds in (found["times"] | limits).items()
            }
    if arguments.buckets:
        with network(2) as hosts:
            timed = on_hosts(hosts, replace(plan.over(arguments.buckets, repeats), buckets=True))[0]
        for rate in arguments.buckets:
            found = timed[str(rate)]
            figures.append(figure_of_buckets(rate, found["times"]))
            tell(rate, found["times"], {})
            rows[f"buckets, {rate} Mbit"] = {
                name: row_of(seconds) for name, seconds in found["times"].items()
            }
    print(f"\n{text_table(figures)}")
    write(arguments.json, "bytes and step times over limited links", repeats, rows, figures)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--hosts", type=int, nargs="*", default=[2, 4], help="between which bytes are counted"
    )
    parser.add_argument("--rates", type=int, nargs="*", default=[*RATES], choices=[*RATES], help="in Mbit/s")
    parser.add_argument(
        "--buckets", type=int, nargs="*", default=[100, 1000], help="rates for buckets of several sizes"
    )
    parser.add_argument("--repeats", type=int, default=8)
    parser.add_argument(
        "--quick", action="store_true", help="two repeats of a small network, to test this file"
    )
    parser.add_argument("--json", type=Path, help="where to write the numbers")
    return parser.parse_args()


if __name__ == "__main__":
    main()
