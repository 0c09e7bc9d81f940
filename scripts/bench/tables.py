"""Writes the figures that the project promises, as measured last, into the READMEs.

    python -m scripts.bench.tables

A table stands between `<!-- figures -->` and `<!-- end of figures -->`, that of the front page between
`<!-- front -->` and `<!-- end of front -->`. A test compares them with the results.
"""

from __future__ import annotations

import json
from fnmatch import fnmatch
from pathlib import Path

from scripts.bench.all_benchmarks import RESULTS, figures_in
from scripts.bench.interleaved import HEAD, cells

ROOT = Path(__file__).resolve().parents[2]
READMES = (ROOT / "README.md", ROOT / "scripts" / "README.md")
# What the front page shows: the figure and its baseline, as a pattern, and how the page says it.
FRONT = {
    (
        "accuracy that fp16 loses, resnet18",
        "fp32",
    ): "points of held-out accuracy that fp16 loses, ResNet-18 on digits; baseline: fp32, same seeds",
    ("bytes, 2 ranks, ours", "ddp"): "bytes that a rank sends per step; baseline: DDP in fp32",
    (
        "step at 1000 Mbit/s, ours, fp32 arithmetic",
        "ddp",
    ): "time per step over 1 Gbit/s, fp32 arithmetic, fp16 gradients; baseline: DDP in fp32",
    (
        "step at 1000 Mbit/s, ours, fp32 arithmetic",
        "ddp + hook, *",
    ): "the same; baseline: DDP with `fp16_compress_hook`, GradScaler and tuned buckets",
    (
        "step of two ranks, emulated fp16",
        "ddp + GradScaler, fp32",
    ): "time per step without a slow link, fp16 emulated; baseline: DDP in fp32 with GradScaler",
    (
        "CPU time of a small step, native arithmetic",
        "raw",
    ): "CPU time per step of a tiny network, one process; baseline: a loop with torch's AMP",
    (
        "from SIGKILL of a rank to the first all-reduce, 2 ranks",
        "torchrun",
    ): "time from SIGKILL of a rank to the first all-reduce after the restart; baseline: torchrun",
    (
        "from the command to the first all-reduce, 2 ranks",
        "torchrun",
    ): "time from the command to the first all-reduce; baseline: torchrun",
}


def markdown_table() -> str:
    """The promised figures of all results, with how many times and when they were measured."""
    lines = [(*HEAD, "n, date"), ("---",) * (len(HEAD) + 1)]
    for result in json.loads(RESULTS.read_text()).values():
        when = f"{result['n']}, {result['machine']['date']}"
        lines += [(*cells(each), when) for each in figures_in(result) if each.promised is not None]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def front_table() -> str:
    """The figures of the front page, ratios to a baseline where nothing else is said, with their interval."""
    found = {}
    for result in json.loads(RESULTS.read_text()).values():
        for each in figures_in(result):
            found[each.what, each.baseline] = each, result["n"], result["machine"]["date"]
    lines = [
        "| two ranks, unless stated otherwise | ratio or value | 90 % interval | n, date |",
        "| --- | --- | --- | --- |",
    ]
    for (what, baseline), said in FRONT.items():
        (each, n, date), *_ = [found[key] for key in found if key[0] == what and fnmatch(key[1], baseline)]
        lines.append(f"| {said} | {each.value:.2f} | {each.low:.2f} to {each.high:.2f} | {n}, {date} |")
    return "\n".join(lines) + "\n"


TABLES = {"figures": markdown_table, "front": front_table}


def with_tables(text: str) -> str:
    """The text with its tables as the results have them."""
    for name, table in TABLES.items():
        begin, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->"
        if begin in text:
            before, rest = text.split(begin)
            text = f"{before}{begin}\n{table()}\n{end}{rest.split(end)[1]}"
    return text


if __name__ == "__main__":
    for readme in READMES:
        readme.write_text(with_tables(readme.read_text()))
