"""An estimate as text for a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from launcher.errors import counted
from launcher.telemetry.formatting import number, size


def lines_of(plan: Mapping[str, Any]) -> Iterator[str]:
    """The page of one job."""
    world, device, machines = plan["world_size"], plan["device"], plan["machines"]
    on = f"{world} {device}{'s' if world > 1 else ''}" + f" of {machines} machines" * (machines > 1)
    yield f"{plan['recipe']} on {on}: nothing is started"
    yield ""
    parts = f" in {plan['micro_batches']} micro-batches" if plan["micro_batches"] > 1 else ""
    yield _row("parameters", f"{plan['parameters']:,} trainable")
    yield _row("batch", f"{plan['batch_size']}, at most {plan['micro_batch']} per rank and pass{parts}")
    if shares := plan["shares"]:
        gain = shares["times_as_fast"]
        faster = "" if gain is None else f", {gain:.2f} times as fast as equal shares"
        yield _row("shares", f"{', '.join(map(str, shares['samples']))} samples by rank{faster}")
    epochs = f"{plan['steps_per_epoch']:,} per epoch over {plan['samples']:,} samples"
    yield _row("steps", f"{plan['steps']:,} of {epochs}, {counted(plan['evaluations'], 'evaluation')}")
    yield _row("schedule", _schedule(plan["schedule"]))
    yield from _memory(plan)
    yield from _wire(plan)
    yield from _checkpoint(plan)


def _schedule(schedule: Mapping[str, Any]) -> str:
    first, highest, last = (number(schedule[key]) for key in ("first", "highest", "last"))
    return f"{schedule['name']}: learning rate {first} at first, at most {highest}, {last} at the end"


def _memory(plan: Mapping[str, Any]) -> Iterator[str]:
    memory = plan["memory"]
    yield ""
    yield _row("memory per rank", f"{size(memory['total'])} at the peak of a step")
    for kind, num_bytes in memory["bytes"].items():
        if num_bytes:
            yield f"  {kind:<14}{size(num_bytes):>10}"
    if reason := plan["measured_because"]:
        yield f"  measured in a step on this CPU, because the model cannot run without values: {reason}"
    if number := plan["conditions"]:
        yield f"  {counted(number, 'condition')} on tensors taken as false: the other branch may take more"
    of_cpu = ", as the CPU emulates half precision" if reason else ""
    yield f"  micro-batch that fits, with 1 GiB for CUDA and NCCL and 5 % left over{of_cpu}:"
    for gpu in plan["gpus"]:
        fits = f"{gpu['micro_batch']:,}".replace(",", " ") if gpu["micro_batch"] else "does not fit"
        yield f"  {gpu['name']:<18}{fits:>12}"


def _wire(plan: Mapping[str, Any]) -> Iterator[str]:
    wire = plan["wire"]
    yield ""
    parts = f" in {counted(wire['buckets'], 'bucket')}" if wire["buckets"] else ""
    sent = size(wire["sent_by_each_rank"])
    yield _row("wire", f"{size(wire['bytes'])} of gradients a step{parts}; each rank sends {sent}")


def _checkpoint(plan: Mapping[str, Any]) -> Iterator[str]:
    saved = plan["checkpoint"]
    yield ""
    verdict = "" if saved["at_most"] < saved["free_bytes"] else ": TOO LITTLE for them"
    yield _row("checkpoint", f"{size(saved['bytes'])}, at most {size(saved['at_most'])} on disk at a time")
    yield f"  {size(saved['free_bytes'])} are free at {saved['place']}{verdict}"


def _row(title: str, text: str) -> str:
    return f"{title:<16}{text}"
