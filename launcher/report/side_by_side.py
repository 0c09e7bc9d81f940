"""Runs that differ only in precision and seed, side by side: what was gained, what was lost, and why.

Owns the table, the comparison by seed and the verdict in words. Pure: records in, Markdown out. A setting is
one precision; the first is what the others are compared with.
"""

from __future__ import annotations

import math
import re
import shlex
import statistics
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from operator import attrgetter

from launcher.config.messages import program
from launcher.errors import counted
from launcher.report.curve import joined
from launcher.report.run_record import RunRecord
from launcher.report.settings import OfRun, RunSetting
from launcher.telemetry.events import DecisionEvent
from launcher.telemetry.formatting import (
    duration,
    markdown_table,
    markdown_text,
    metric,
    metric_title,
    number,
    percent,
    size,
)
from launcher.telemetry.step_time import FEW_STEPS, PARTS, TITLES, TimeShares

ALIKE = 0.03  # a difference in time or memory below this share is none: nobody would choose by it
WAITS = 0.4  # a part of the step with this share bounds it: without it, 1.7 times as fast
# Student's t at 95 %, by the number of pairs less one: standard errors from which on a difference is one.
CERTAIN = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26)
DATA, COMPUTE, WIRE, UPDATE = "data_ms", "compute_ms", "wire_ms", "update_ms"
# Of the error of a run that diverged: a module made what is not finite from inputs that were.
OUT_OF_RANGE = re.compile(r"first module whose output was not finite: [^;\n]*from inputs between [^;\n]*")


def side_by_side(title: str, sides: Sequence[RunSetting]) -> str:
    """The page: verdicts, table, and the metric by seed."""
    first, *others = sides
    lines = [markdown_text(f"# {title}: {' and '.join(side.label for side in sides)}"), ""]
    lines += [f"- {markdown_text(sentence)}" for side in others for sentence in verdicts(first, side)]
    lines += ["", *table(first, others), "", "Mean ± standard deviation over the runs that are done.", ""]
    for side in others:
        lines += [*by_seed(first, side), ""]
    return "\n".join(lines)


def verdicts(first: RunSetting, other: RunSetting) -> Iterator[str]:
    """What the other precision changes against the first, each in one sentence with its reason."""
    for side in (first, other):
        for run in side.runs:
            if run.state != "done" and (place := beyond_half(first, run)):
                yield (
                    f"{side.label} with seed {run.seed} exceeds the range of fp16, which ends at 65504, "
                    f"where {first.label} stays finite: {place}. To compute such modules in fp32: "
                    f"{rescue_of(run)}"
                )
            elif run.state != "done":
                reason = run.error.partition("\n")[0] or f"it has no result ({run.state})"
                yield f"{side.label} with seed {run.seed} has failed: {reason}"
    if not (first.done and other.done):
        return
    yield time_verdict(first, other)
    if (sentence := memory_verdict(first, other)) is not None:
        yield sentence
    yield metric_verdict(first, other)


def beyond_half(first: RunSetting, run: RunRecord) -> str:
    """Where a run left the range of fp16, if another precision is finite on the same data; else empty."""
    found = OUT_OF_RANGE.search(run.error)
    finite = any(other.seed == run.seed and other is not run for other in first.done)
    return found[0] if finite and found is not None else ""


def rescue_of(run: RunRecord) -> str:
    words = [f"{key}={value}" for key, value in run.overrides.items() if key != "precision.rescue"]
    return f"{program()} {shlex.join([*words, 'precision.rescue=true'])}"


def time_verdict(first: RunSetting, other: RunSetting) -> str:
    before, after = first.mean(step_ms), other.mean(step_ms)
    if before is None or after is None:
        return "The time of a step was not recorded: runs of several log lines have it."
    share = after / before
    took = f"a step takes {number(after)} ms against {number(before)} ms ({share:.2f})"
    fewest = min(int(num_steps(run) or 0) for run in (*first.done, *other.done))
    if fewest < FEW_STEPS:
        return (
            f"Nothing can be said of the time: {took}, from {counted(fewest, 'measured step')} of a run. At "
            f"least {FEW_STEPS} are needed after the first, which compiles."
        )
    waiting = max((first, other), key=lambda side: share_of(side, DATA))
    if share_of(waiting, DATA) >= WAITS:
        return f"{data_advice(waiting)} Of the precision the time says nothing: {took}."
    if abs(share - 1) <= ALIKE:
        return f"{other.label} gains no time over {first.label}: {took}. {reason_of(first, other)}"
    differs, why = time_differs(first, other)
    if not differs:
        return f"Too noisy to say which of {first.label} and {other.label} is faster: {took}, {why}."
    word = "faster" if share < 1 else "slower"
    return f"{other.label} is {word} than {first.label}: {took}, {why}. {reason_of(first, other)}"


def time_differs(first: RunSetting, other: RunSetting) -> tuple[bool, str]:
    """Whether the times of a step differ, and what that rests on: pairs of seeds, else the logged windows."""
    differences = paired(first, other, step_ms)
    if len(differences) > 1:
        pairs = f"in {len(differences)} pairs"
        if beyond_chance(differences):
            return True, f"{pairs}, beyond what runs differ by in 19 of 20 cases"
        return False, f"{pairs} that vary as much"
    before, after = (joined(run.recording.windows_ms for run in side.done) for side in (first, other))
    fewest = min(before.count, after.count)
    if fewest < 2:
        return False, "with one seed and too few log lines to know how it varies: seed=0,1,2 runs three"
    # The windows of one run share whatever else its machine did, so that their mean is no surer than one.
    spread = math.hypot(before.deviation, after.deviation)
    if abs(after.mean - before.mean) > certain_from(fewest) * spread:
        return True, "with one seed, beyond the spread over its log lines"
    return False, "with one seed, within the spread over its log lines: seed=0,1,2 runs three"


def reason_of(first: RunSetting, other: RunSetting) -> str:
    """Why the step takes as long as it does: the part that bounds it, or the one that changed most."""
    emulated = [side.label for side in (first, other) if any(map(is_emulated, side.done))]
    for part in (WIRE, UPDATE):
        if share_of(other, part) >= WAITS:
            return ADVICE[part].format(share=percent(share_of(other, part)))
    parts, parts_before = parts_of(other), parts_of(first)
    changes = {part: parts[part] - parts_before[part] for part in PARTS}
    part = max(changes, key=lambda each: abs(changes[each]))
    most = f"Most of the difference is in {TITLES[part]} ({changes[part]:+.3g} ms)."
    before, after = first.mean(step_ms) or 0.0, other.mean(step_ms) or 0.0
    if emulated:
        who = f"{' and '.join(emulated)} is emulated here, in fp32 with roundings"
        if after < before * (1 - ALIKE):
            return f"{most} {who}: faster arithmetic is not the reason."
        return f"{who}: it computes no faster, and gains only where the wire is slow."
    if abs(after - before) <= ALIKE * before:
        return (
            f"{percent(share_of(other, COMPUTE))} of it is forward and backward, which take the same time: "
            "the model or its batch is too small for this device's half arithmetic to pay, or the device has "
            "none."
        )
    return most


ADVICE = {
    WIRE: "{share} of it waits for the exchange of gradients: raise data.batch_size, or use fewer ranks.",
    UPDATE: "{share} of it updates the weights, which are fp32 under both: raise data.batch_size.",
}


def data_advice(side: RunSetting) -> str:
    is_off = any(run.config.get("data.cache") == "none" for run in side.done)
    cache = "set data.cache=auto, " if is_off else ""
    share = percent(share_of(side, DATA))
    return (
        f"{share} of a step of {side.label} waits for data, which no precision changes: "
        f"raise data.workers (sets that are not in memory), {cache}or make the transform cheaper."
    )


def memory_verdict(first: RunSetting, other: RunSetting) -> str | None:
    before, after = first.mean(memory_bytes), other.mean(memory_bytes)
    if not before or after is None:
        return None
    share = after / before
    word = "as much memory as" if abs(share - 1) < ALIKE else f"{'less' if share < 1 else 'more'} memory than"
    return f"{other.label} needs {word} {first.label}: {size(after)} against {size(before)}."


def metric_verdict(first: RunSetting, other: RunSetting) -> str:
    """The mean difference of the pairs of runs with one seed, against its standard error."""
    name, differences = metric_name_of(first), paired(first, other, metric_of)
    if not differences:
        return f"No seed has {metric_title(name)} from both."
    mean = statistics.fmean(differences)
    found = f"{metric_title(name)} of {other.label} less that of {first.label} is {signed(name, mean)}"
    if len(differences) == 1:
        return f"{found} with one seed, which says little: seed=0,1,2 runs three."
    error = statistics.stdev(differences) / math.sqrt(len(differences))
    pairs = f"in {len(differences)} pairs, with a standard error of {signed(name, error).lstrip('+')}"
    if not beyond_chance(differences):
        return f"{found} {pairs}: no difference that these seeds show."
    return f"{found} {pairs}: a difference, beyond what seeds make in 19 of 20 cases."


def paired(first: RunSetting, other: RunSetting, of: OfRun) -> list[float]:
    """The differences between the runs with one seed."""
    theirs = {run.seed: of(run) for run in first.done}
    return [
        value - before
        for run in other.done
        if (value := of(run)) is not None and (before := theirs.get(run.seed)) is not None
    ]


def beyond_chance(differences: Sequence[float]) -> bool:
    """Whether their mean is further from zero than chance takes it, at 95 %; at least two of them."""
    error = statistics.stdev(differences) / math.sqrt(len(differences))
    return abs(statistics.fmean(differences)) > certain_from(len(differences)) * error


def certain_from(count: int) -> float:
    return CERTAIN[min(count - 1, len(CERTAIN)) - 1]


def table(first: RunSetting, others: Sequence[RunSetting]) -> list[str]:
    head = ["", first.label]
    for side in others:
        head += [side.label, f"{side.label} / {first.label}"]
    ended = [f"{len(side.done)} of {len(side.runs)}" for side in (first, *others)]
    lines = [["runs done", ended[0], *(cell for text in ended[1:] for cell in (text, ""))]]
    for title, of, shown in rows(metric_name_of(first)):
        base = first.mean(of)
        texts = [title, first.spread(of, shown)]
        for side in others:
            value = side.mean(of)
            is_relative = shown in (duration, milliseconds, size)  # a ratio of metrics or counts says little
            share = f"{value / base:.2f}" if is_relative and base and value is not None else ""
            texts += [side.spread(of, shown), share]
        lines.append(texts)
    return markdown_table(head, lines)


def rows(metric_name: str) -> list[tuple[str, OfRun, Callable[[float], str]]]:
    """Name, value and text of each quantity of the table."""
    return [
        ("training time", lambda run: run.result.training_seconds, duration),
        ("time of a step", step_ms, milliseconds),
        *((f"... {title}", part_of(part), milliseconds) for part, title in TITLES.items()),
        ("... everything else", other_ms, milliseconds),
        ("memory", memory_bytes, size),
        ("weights, masters, optimizer", lambda run: run.result.state_bytes, size),
        ("sent per step and rank", lambda run: run.result.wire_bytes_per_step, size),
        ("skipped steps", lambda run: run.skipped, number),
        ("loss, held out", lambda run: run.result.metrics.get("loss"), number),
        (metric_title(metric_name), metric_of, partial(metric, metric_name)),
    ]


def by_seed(first: RunSetting, other: RunSetting) -> list[str]:
    name = metric_name_of(first)
    theirs = {run.seed: run.result.metric for run in other.runs}
    lines = []
    for run in first.runs:
        before, after = run.result.metric, theirs.get(run.seed)
        difference = "-" if before is None or after is None else signed(name, after - before)
        lines.append([run.seed, metric(name, before), metric(name, after), difference])
    return markdown_table(["seed", f"{metric_title(name)}, {first.label}", other.label, "difference"], lines)


def metric_of(run: RunRecord) -> float | None:
    return run.result.metric


def metric_name_of(side: RunSetting) -> str:
    return side.metric_name or "loss"


def signed(name: str, difference: float) -> str:
    """A difference as text with its sign; that of shares in percentage points."""
    if metric(name, 0.5).endswith("%"):
        return f"{100 * difference:+.2f} points"
    return f"{difference:+.4g}"


def milliseconds(value: float) -> str:
    return f"{number(value)} ms"


def timed(of: Callable[[TimeShares], float]) -> OfRun:
    """What is known of the average step of a run; None where its time was not recorded."""

    def found(run: RunRecord) -> float | None:
        shares = run.recording.time_shares
        return None if shares is None else of(shares)

    return found


step_ms = timed(attrgetter("step_ms"))
other_ms = timed(attrgetter("other_ms"))
num_steps = timed(attrgetter("num_steps"))


def part_of(part: str) -> OfRun:
    """Milliseconds of a step that are spent in this part of it."""
    return timed(lambda shares: shares.parts_ms[part])


def parts_of(side: RunSetting) -> dict[str, float]:
    return {part: side.mean(part_of(part)) or 0.0 for part in PARTS}


def share_of(side: RunSetting, part: str) -> float:
    """The share of a step's time that this part of it takes."""
    return parts_of(side)[part] / (side.mean(step_ms) or math.inf)


def memory_bytes(run: RunRecord) -> float | None:
    _, memory = run.recording.steps["memory_bytes"].points()  # thinned without losing peaks
    return float(memory.max()) if memory.size else None


def is_emulated(run: RunRecord) -> bool:
    decisions = run.recording.of(DecisionEvent).all()
    return any(each.topic == "precision" and "emulated" in each.text for each in decisions)
