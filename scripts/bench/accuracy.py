"""Held-out accuracy in fp16 beside fp32 with the same seeds: mean, deviation and paired difference.

    python scripts/bench/accuracy.py [--quick] [--seeds 3] [--json FILE] [key=value ...]

Runs `compare` with ResNet-18 on handwritten digits on two ranks; further words replace the recipe and its
settings, such as `recipe=cnn data.path=DIR`.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from scripts.bench.interleaved import Figure, median_interval, text_table, write

ROOT = Path(__file__).resolve().parents[2]
WORDS = ("tracker=none", "launch.nproc=2")
LOST_POINTS = 0.3  # of fp32's accuracy, at most


def measure(words: list[str], seeds: int, folder: Path) -> dict[str, list[float]]:
    """The metric of each run in percent, by precision and in the order of the seeds."""
    varied = [
        f"precision=fp32,fp16 seed={','.join(map(str, range(seeds)))}",
        f"hydra.sweep.dir={folder}/runs",
    ]
    command = [sys.executable, "-m", "launcher", "compare", *" ".join(varied).split(), *WORDS, *words]
    subprocess.run(command, cwd=folder, env=os.environ | {"PYTHONPATH": str(ROOT)}, check=True)
    found: dict[str, dict[int, float]] = {"fp32": {}, "fp16": {}}
    for job in (folder / "runs").glob("*/overrides.txt"):
        given = dict(line.split("=", 1) for line in job.read_text().splitlines())
        result = json.loads(job.with_name("result.json").read_text())
        found[given["precision"]][int(given["seed"])] = 100 * result["metric"]
    return {precision: [by_seed[seed] for seed in range(seeds)] for precision, by_seed in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("words", nargs="*", default=["recipe=resnet18"])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="two steps with two seeds, to test this file")
    parser.add_argument("--json", type=Path, help="where to write the numbers")
    arguments = parser.parse_args()
    seeds, words = (2, ["train.max_steps=2"]) if arguments.quick else (arguments.seeds, [])
    with tempfile.TemporaryDirectory() as folder:
        found = measure([*arguments.words, *words], seeds, Path(folder))
    lost = [one - other for one, other in zip(found["fp32"], found["fp16"], strict=True)]
    ours, theirs = statistics.mean(found["fp16"]), statistics.mean(found["fp32"])
    what = f"accuracy that fp16 loses, {arguments.words[0].partition('=')[2]}"
    interval = median_interval(lost)
    figure = Figure(what, ours, "%", "fp32", theirs, statistics.median(lost), *interval, promised=LOST_POINTS)
    rows = {
        name: {"mean": statistics.mean(values), "deviation": statistics.stdev(values), "values": values}
        for name, values in {**found, "fp32 - fp16": lost}.items()
    }
    print(text_table([figure]))
    write(arguments.json, "accuracy by precision", seeds, rows, [figure])


if __name__ == "__main__":
    main()
