"""A forecast as text for a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from launcher.errors import counted
from launcher.report.charts.characters import characters
from launcher.report.charts.chart import Axis, Chart, Line, axis_of
from launcher.telemetry.formatting import duration, number

PLOT_COLUMNS, PLOT_LINES = 60, 5


def lines_of(plan: Mapping[str, Any], braille: bool) -> Iterator[str]:
    """The page of one job."""
    world, device, machines = plan["world_size"], plan["device"], plan["machines"]
    of_sweep = ", job 0 of the sweep" if "sweep" in plan else ""
    on = f"{world} {device}{'s' if world > 1 else ''}" + f" of {machines} machines" * (machines > 1)
    yield f"{plan['recipe']} on {on}{of_sweep}: nothing is started"
    yield ""
    parts = f" in {plan['micro_batches']} micro-batches" if plan["micro_batches"] > 1 else ""
    yield _row("parameters", f"{plan['parameters']:,} trainable")
    yield _row("batch", f"{plan['batch_size']}, at most {plan['micro_batch']} per rank and pass{parts}")
    epochs = f"{plan['steps_per_epoch']:,} per epoch over {plan['samples']:,} samples"
    yield _row("steps", f"{plan['steps']:,} of {epochs}, {counted(plan['evaluations'], 'evaluation')}")
    yield from _schedule(plan["schedule"], braille)
    yield from _memory(plan)
    yield from _wire(plan)
    yield from _files(plan)


def _schedule(schedule: Mapping[str, object], braille: bool) -> Iterator[str]:
    steps, rates = np.array(schedule["rates"], dtype=np.float64).T
    across, up = Axis(0.0, max(float(steps[-1]), 1.0)), axis_of(rates, base=1, from_zero=True)
    chart = Chart("", "", [Line("", 0, steps, rates)], across, up)
    yield _row("schedule", f"{schedule['name']}: learning rate {number(rates.max())} at its peak, by step")
    yield from ("  " + line for line in characters(chart, PLOT_COLUMNS, PLOT_LINES, braille))


def _memory(plan: Mapping[str, Any]) -> Iterator[str]:
    memory = plan["memory"]
    yield ""
    yield _row("memory per rank", f"{_size(memory['total'])} at the peak of a step")
    for kind, num_bytes in memory["bytes"].items():
        if num_bytes:
            yield f"  {kind:<14}{_size(num_bytes):>10}"
    if reason := plan["measured_because"]:
        yield f"  measured in a step on this CPU, because the model cannot run without values: {reason}"
    if number := plan["conditions"]:
        yield f"  {counted(number, 'condition')} on tensors taken as false: the other branch may take more"
    of_cpu = ", as the CPU emulates half precision" if reason else ""
    yield f"  micro-batch that fits, with 1 GiB for CUDA and NCCL and 5 % left over{of_cpu}:"
    for gpu in plan["gpus"]:
        yield f"  {gpu['name']:<18}{gpu['micro_batch'] or 'does not fit':>12,}".replace(",", " ")


def _wire(plan: Mapping[str, Any]) -> Iterator[str]:
    step, wire = plan["step_s"], plan["wire"]
    yield ""
    parts = f" in {counted(wire['buckets'], 'bucket')}" if wire["buckets"] else ""
    sent = _size(wire["sent_by_each_rank"])
    yield _row("wire", f"{_size(wire['bytes'])} of gradients a step{parts}; each rank sends {sent}")
    if step is None:
        yield "  step time: give --samples-per-s N of one rank, or --measure it here"
    else:
        parts = ", ".join(f"{name} {1000 * step[name]:.1f} ms" for name in ("forward", "backward", "update"))
        yield f"  step of one rank: {1000 * step['total']:.1f} ms ({parts})"
        if cost := wire["cpu_s_per_byte"]:
            added_ms = 1000 * cost * wire["bytes"]
            yield f"  sending adds {added_ms:.1f} ms of its cores to a step of two ranks, measured here"
    yield f"{'link':>12}{'ranks':>8}{'wire ms':>12}" + (f"{'step ms':>12}{'efficiency':>12}" if step else "")
    for link in plan["links"]:
        rate = f"{link['mbit'] / 1000:g} Gbit" if link["mbit"] >= 1000 else f"{link['mbit']:g} Mbit"
        row = f"  {rate:>10}{link['ranks']:>8}{1000 * link['wire_s']:>12.1f}"
        if step:
            row += f"{1000 * link['step_s']:>12.1f}{link['efficiency']:>11.0%} ".replace("%", " %")
        yield row.rstrip()


def _files(plan: Mapping[str, Any]) -> Iterator[str]:
    saved = plan["checkpoint"]
    yield ""
    verdict = "" if saved["at_most"] < saved["free_bytes"] else ": TOO LITTLE for them"
    yield _row("checkpoint", f"{_size(saved['bytes'])}, at most {_size(saved['at_most'])} on disk at a time")
    yield f"  {_size(saved['free_bytes'])} are free at {saved['place']}{verdict}"
    yield _row("files", f"in {plan['files'][0]}: {', '.join(plan['files'][1:])}")


def lines_of_sweep(sweep: Mapping[str, Any]) -> Iterator[str]:
    """The table of a sweep's jobs."""
    at_a_time, jobs = sweep["at_a_time"], sweep["jobs"]
    yield ""
    if sweep["search"]:
        trials = sweep["trials"] and f"{sweep['trials']} trials"
        yield _row("search", f"{sweep['search']}, {trials or 'until a limit of sweep.stop or Ctrl-C'}")
        yield "  its jobs are drawn one by one; this is the shape of the first"
    else:
        yield _row("sweep", f"{counted(len(jobs), 'job')}, {at_a_time} at a time, in this order")
    yield f"  {'job':>5}{'devices':>9}{'steps':>10}{'device h':>10}  overrides"
    for job in jobs:
        hours = "-" if job["device_hours"] is None else f"{job['device_hours']:.3g}"
        words = " ".join(job["overrides"])
        yield f"  {job['number']:>5}{job['devices']:>9}{job['steps']:>10,}{hours:>10}  {words}"
    if sweep["device_hours"] is not None:
        took, rate = duration(3600 * sweep["hours"]), "all at the rate of job 0 on a device"
        yield f"  {sweep['device_hours']:.3g} device hours, {took} from the first to the last, {rate}"


def _row(title: str, text: str) -> str:
    return f"{title:<16}{text}"


def _size(num_bytes: int) -> str:
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if num_bytes >= size:
            return f"{num_bytes / size:.1f} {unit}"
    return f"{num_bytes} B"
