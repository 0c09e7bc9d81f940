"""Runs that differ only in precision and seed, side by side: what was gained, what was lost, and why.

Owns the table, the comparison by seed and the verdict in words. Pure: jobs in, Markdown out. The first
precision is what the others are compared with.
"""

from __future__ import annotations

import math
import re
import shlex
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from launcher.config.messages import program
from launcher.errors import counted
from launcher.report.curve import Spread, joined, mean_and_deviation
from launcher.report.recording import Recording
from launcher.run_dir.result import Result
from launcher.telemetry.events import DecisionEvent, EndEvent
from launcher.telemetry.formatting import duration, markdown_row, markdown_text, metric, metric_title, number
from launcher.telemetry.step_time import FEW_STEPS, PARTS, TITLES, TimeShares

ALIKE = 0.03  # a difference in time or memory below this share is none: nobody would choose by it
WAITS = 0.4  # a part of the step with this share bounds it: without it, 1.7 times as fast
# Student's t at 95 %, by the number of pairs less one: standard errors from which on a difference is one.
CERTAIN = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26)
DATA, COMPUTE, WIRE, UPDATE = "data_ms", "compute_ms", "wire_ms", "update_ms"
# Of the error of a run that diverged: a module made what is not finite from inputs that were.
OUT_OF_RANGE = re.compile(r"first module whose output was not finite: [^;\n]*from inputs between [^;\n]*")


@dataclass(frozen=True)
class Measured:
    """What one run measured; None where it did not get that far."""

    seed: str
    state: str
    seconds: float | None
    shares: TimeShares | None
    windows_ms: Spread  # of a step, by log line; the first, which compiles, left out
    memory_bytes: float | None
    wire_bytes: float | None
    state_bytes: float | None
    loss: float | None  # held out
    metric: float | None
    metric_name: str
    skipped_steps: int
    emulated: bool
    cache_is_off: bool  # of data that can be cached
    error: str  # why it failed
    words: tuple[str, ...] = ()  # the overrides of the run

    @property
    def step_ms(self) -> float | None:
        return None if self.shares is None else self.shares.step_ms

    def part_ms(self, part: str) -> float | None:
        """Milliseconds of a step that are spent in this part of it."""
        return None if self.shares is None else self.shares.parts_ms[part]


@dataclass(frozen=True)
class Side:
    """The runs of one precision."""

    name: str
    runs: tuple[Measured, ...]

    @property
    def done(self) -> list[Measured]:
        return [run for run in self.runs if run.state == "done"]

    def mean(self, of: Callable[[Measured], float | None]) -> float | None:
        values = [value for run in self.done if (value := of(run)) is not None]
        return statistics.fmean(values) if values else None

    def parts_ms(self) -> dict[str, float]:
        return {part: self.mean(part_of(part)) or 0.0 for part in PARTS}

    def share(self, part: str) -> float:
        """The share of a step's time that this part of it takes."""
        return self.parts_ms()[part] / (self.mean(lambda run: run.step_ms) or math.inf)

    @property
    def fewest_steps(self) -> int:
        """The number of steps whose time is known, of the run that has fewest."""
        return min((run.shares.num_steps if run.shares else 0 for run in self.done), default=0)

    def spread(self, of: Callable[[Measured], float | None], shown: Callable[[float], str]) -> str:
        """Mean and standard deviation over the runs that are done."""
        return mean_and_deviation([of(run) for run in self.done], shown)


@dataclass(frozen=True)
class Row:
    """A quantity of the table; with `relative` the other sides are also shown as a share of the first."""

    title: str
    of: Callable[[Measured], float | None]
    shown: Callable[[float], str]
    relative: bool = True


def side_by_side(title: str, sides: Sequence[Side]) -> str:
    """The page: verdicts, table, and the metric by seed."""
    first, *others = sides
    lines = [markdown_text(f"# {title}: {' and '.join(side.name for side in sides)}"), ""]
    lines += [f"- {markdown_text(sentence)}" for side in others for sentence in verdicts(first, side)]
    lines += ["", *table(first, others), ""]
    for side in others:
        lines += by_seed(first, side)
    return "\n".join(lines)


def verdicts(first: Side, other: Side) -> Iterator[str]:
    """What the other precision changes against the first, each in one sentence with its reason."""
    for side in (first, other):
        for run in side.runs:
            if run.state != "done" and (place := beyond_half(first, run)):
                yield (
                    f"{side.name} with seed {run.seed} exceeds the range of fp16, which ends at 65504, where "
                    f"{first.name} stays finite: {place}. To compute such modules in fp32: {rescue_of(run)}"
                )
            elif run.state != "done":
                reason = run.error.partition("\n")[0] or f"it has no result ({run.state})"
                yield f"{side.name} with seed {run.seed} has failed: {reason}"
    if not (first.done and other.done):
        return
    yield time_verdict(first, other)
    if (sentence := memory_verdict(first, other)) is not None:
        yield sentence
    yield metric_verdict(first, other)


def beyond_half(first: Side, run: Measured) -> str:
    """Where a run left the range of fp16, if another precision is finite on the same data; else empty."""
    found = OUT_OF_RANGE.search(run.error)
    finite = any(other.seed == run.seed and other is not run for other in first.done)
    return found[0] if finite and found is not None else ""


def rescue_of(run: Measured) -> str:
    words = [word for word in run.words if not word.startswith("precision.rescue=")]
    return f"{program()} {shlex.join([*words, 'precision.rescue=true'])}"


def time_verdict(first: Side, other: Side) -> str:
    before, after = first.mean(lambda run: run.step_ms), other.mean(lambda run: run.step_ms)
    if before is None or after is None:
        return "The time of a step was not recorded: runs of several log lines have it."
    share = after / before
    took = f"a step takes {number(after)} ms against {number(before)} ms ({share:.2f})"
    if (fewest := min(side.fewest_steps for side in (first, other))) < FEW_STEPS:
        return (
            f"Nothing can be said of the time: {took}, from {counted(fewest, 'measured step')} of a run. At "
            f"least {FEW_STEPS} are needed after the first, which compiles."
        )
    waiting = max((first, other), key=lambda side: side.share(DATA))
    if waiting.share(DATA) >= WAITS:
        return f"{data_advice(waiting)} Of the precision the time says nothing: {took}."
    if abs(share - 1) <= ALIKE:
        return f"{other.name} gains no time over {first.name}: {took}. {reason_of(first, other)}"
    differs, why = time_differs(first, other)
    if not differs:
        return f"Too noisy to say which of {first.name} and {other.name} is faster: {took}, {why}."
    word = "faster" if share < 1 else "slower"
    return f"{other.name} is {word} than {first.name}: {took}, {why}. {reason_of(first, other)}"


def time_differs(first: Side, other: Side) -> tuple[bool, str]:
    """Whether the times of a step differ, and what that rests on: pairs of seeds, else the logged windows."""
    differences = paired(first, other, lambda run: run.step_ms)
    if len(differences) > 1:
        pairs = f"in {len(differences)} pairs"
        if beyond_chance(differences):
            return True, f"{pairs}, beyond what runs differ by in 19 of 20 cases"
        return False, f"{pairs} that vary as much"
    before, after = (joined(run.windows_ms for run in side.done) for side in (first, other))
    fewest = min(before.count, after.count)
    if fewest < 2:
        return False, "with one seed and too few log lines to know how it varies: seed=0,1,2 runs three"
    # The windows of one run share whatever else its machine did, so that their mean is no surer than one.
    spread = math.hypot(before.deviation, after.deviation)
    if abs(after.mean - before.mean) > certain_from(fewest) * spread:
        return True, "with one seed, beyond the spread over its log lines"
    return False, "with one seed, within the spread over its log lines: seed=0,1,2 runs three"


def reason_of(first: Side, other: Side) -> str:
    """Why the step takes as long as it does: the part that bounds it, or the one that changed most."""
    emulated = [side.name for side in (first, other) if any(run.emulated for run in side.done)]
    for part in (WIRE, UPDATE):
        if other.share(part) >= WAITS:
            return ADVICE[part].format(share=percent(other.share(part)))
    parts, parts_before = other.parts_ms(), first.parts_ms()
    changes = {part: parts[part] - parts_before[part] for part in PARTS}
    part = max(changes, key=lambda each: abs(changes[each]))
    most = f"Most of the difference is in {TITLES[part]} ({changes[part]:+.3g} ms)."
    before, after = first.mean(lambda run: run.step_ms) or 0.0, other.mean(lambda run: run.step_ms) or 0.0
    if emulated:
        who = f"{' and '.join(emulated)} is emulated here, in fp32 with roundings"
        if after < before * (1 - ALIKE):
            return f"{most} {who}: faster arithmetic is not the reason."
        return f"{who}: it computes no faster, and gains only where the wire is slow."
    if abs(after - before) <= ALIKE * before:
        return (
            f"{percent(other.share(COMPUTE))} of it is forward and backward, which take the same time: "
            "the model or its batch is too small for this device's half arithmetic to pay, or the device has "
            "none."
        )
    return most


UNITS = ("B", "kB", "MB", "GB")
ADVICE = {
    WIRE: "{share} of it waits for the exchange of gradients: raise data.batch_size, or use fewer ranks.",
    UPDATE: "{share} of it updates the weights, which are fp32 under both: raise data.batch_size.",
}


def data_advice(side: Side) -> str:
    cache = "set data.cache=auto, " if any(run.cache_is_off for run in side.done) else ""
    return (
        f"{percent(side.share(DATA))} of a step of {side.name} waits for data, which no precision changes: "
        f"raise data.workers (sets that are not in memory), {cache}or make the transform cheaper."
    )


def memory_verdict(first: Side, other: Side) -> str | None:
    before, after = first.mean(lambda run: run.memory_bytes), other.mean(lambda run: run.memory_bytes)
    if not before or after is None:
        return None
    share = after / before
    word = "as much memory as" if abs(share - 1) < ALIKE else f"{'less' if share < 1 else 'more'} memory than"
    return f"{other.name} needs {word} {first.name}: {size(after)} against {size(before)}."


def metric_verdict(first: Side, other: Side) -> str:
    """The mean difference of the pairs of runs with one seed, against its standard error."""
    name, differences = metric_name_of(first), paired(first, other, lambda run: run.metric)
    if not differences:
        return f"No seed has {metric_title(name)} from both."
    mean = statistics.fmean(differences)
    found = f"{metric_title(name)} of {other.name} less that of {first.name} is {signed(name, mean)}"
    if len(differences) == 1:
        return f"{found} with one seed, which says little: seed=0,1,2 runs three."
    error = statistics.stdev(differences) / math.sqrt(len(differences))
    pairs = f"in {len(differences)} pairs, with a standard error of {signed(name, error).lstrip('+')}"
    if not beyond_chance(differences):
        return f"{found} {pairs}: no difference that these seeds show."
    return f"{found} {pairs}: a difference, beyond what seeds make in 19 of 20 cases."


def paired(first: Side, other: Side, of: Callable[[Measured], float | None]) -> list[float]:
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


def table(first: Side, others: Sequence[Side]) -> Iterator[str]:
    head = ["", first.name]
    for side in others:
        head += [side.name, f"{side.name} / {first.name}"]
    yield markdown_row(head)
    yield f"|{' --- |' * len(head)}"
    ended = [f"{len(side.done)} of {len(side.runs)}" for side in (first, *others)]
    cells = [cell for text in ended[1:] for cell in (text, "")]
    yield markdown_row(["runs done", ended[0], *cells])
    for row in rows(metric_name_of(first)):
        base = first.mean(row.of)
        texts = [row.title, first.spread(row.of, row.shown)]
        for side in others:
            value = side.mean(row.of)
            share = f"{value / base:.2f}" if row.relative and base and value is not None else ""
            texts += [side.spread(row.of, row.shown), share]
        yield markdown_row(texts)
    yield ""
    yield "Mean ± standard deviation over the runs that are done."


def rows(metric_name: str) -> list[Row]:
    parts = [Row(f"... {title}", part_of(part), milliseconds) for part, title in TITLES.items()]
    return [
        Row("training time", lambda run: run.seconds, duration),
        Row("time of a step", lambda run: run.step_ms, milliseconds),
        *parts,
        Row("... everything else", lambda run: run.shares.other_ms if run.shares else None, milliseconds),
        Row("memory", lambda run: run.memory_bytes, size),
        Row("weights, masters, optimizer", lambda run: run.state_bytes, size),
        Row("sent per step and rank", lambda run: run.wire_bytes, size),
        Row("skipped steps", lambda run: float(run.skipped_steps), number, relative=False),
        Row("loss, held out", lambda run: run.loss, number, relative=False),
        Row(metric_title(metric_name), lambda run: run.metric, lambda v: metric(metric_name, v), False),
    ]


def part_of(part: str) -> Callable[[Measured], float | None]:
    return lambda run: run.part_ms(part)


def by_seed(first: Side, other: Side) -> Iterator[str]:
    name = metric_name_of(first)
    yield markdown_row(["seed", f"{metric_title(name)}, {first.name}", other.name, "difference"])
    yield "| --- | --- | --- | --- |"
    theirs = {run.seed: run for run in other.runs}
    for run in first.runs:
        pair = theirs.get(run.seed)
        values = [run.metric, pair.metric if pair is not None else None]
        both = values[0] is not None and values[1] is not None
        difference = signed(name, values[1] - values[0]) if both else "-"  # type: ignore[operator]
        yield markdown_row([run.seed, metric(name, values[0]), metric(name, values[1]), difference])
    yield ""


def metric_name_of(side: Side) -> str:
    return next((run.metric_name for run in side.runs if run.metric_name), "loss")


def signed(name: str, difference: float) -> str:
    """A difference as text with its sign; that of shares in percentage points."""
    if metric(name, 0.5).endswith("%"):
        return f"{100 * difference:+.2f} points"
    return f"{difference:+.4g}"


def percent(share: float) -> str:
    return f"{share:.0%}".replace("%", " %")


def milliseconds(value: float) -> str:
    return f"{number(value)} ms"


def size(value: float) -> str:
    """Bytes, in the largest unit of which there is one."""
    power = min(int(math.log10(max(value, 1.0)) / 3), len(UNITS) - 1)
    return f"{value / 1000**power:.{1 if power else 0}f} {UNITS[power]}"


def measured(
    seed: str,
    result: Result,
    recording: Recording,
    config: Mapping[str, str],
    words: tuple[str, ...] = (),
) -> Measured:
    """Read a run's result.json (with `state`), its events, and its config by dotted key, if it is known."""
    end, decisions = recording.of(EndEvent).last, recording.of(DecisionEvent).all()
    _, memory = recording.steps["memory_bytes"].points()  # thinned without losing peaks
    return Measured(
        seed=seed,
        state=end.state if end and result.state != "done" else result.state,
        seconds=result.training_seconds,
        shares=recording.time_shares,
        windows_ms=recording.windows_ms,
        memory_bytes=float(memory.max()) if memory.size else None,
        wire_bytes=result.wire_bytes_per_step,
        state_bytes=result.state_bytes,
        loss=result.metrics.get("loss"),
        metric=result.metric,
        metric_name=result.metric_name or "",
        skipped_steps=result.skipped_steps or 0,
        emulated=any(each.topic == "precision" and "emulated" in each.text for each in decisions),
        cache_is_off=config.get("data.cache") == "none",
        error=(end.error if end else None) or "",
        words=words,
    )
