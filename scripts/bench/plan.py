"""How long `plan` takes for a ResNet-50, as a user types it, beside the import of torch that it needs.

    python scripts/bench/plan.py [--quick] [--repeats N] [--json FILE]

Both sides are processes of their own, from a warm page cache, in turn.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from scripts.bench.interleaved import Figure, interleave, row_of, text_table, write

ROOT = Path(__file__).resolve().parents[2]
PLAN = ("-m", "launcher", "plan", "recipe=resnet50", "--json")
IMPORT = ("-c", "import torch")
PROMISED_S = 5.0


def run(words: tuple[str, ...], folder: str) -> None:
    environ = os.environ | {"PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, *words], cwd=folder, env=environ, check=True, stdout=subprocess.DEVNULL)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=8)
    parser.add_argument("--quick", action="store_true", help="one repeat, to test this file")
    parser.add_argument("--json", type=Path, help="where to write the numbers")
    arguments = parser.parse_args()
    repeats = 1 if arguments.quick else arguments.repeats
    with tempfile.TemporaryDirectory() as folder:
        sides = {"plan": lambda: run(PLAN, folder), "import torch": lambda: run(IMPORT, folder)}
        times = interleave(sides, repeats, warm_up=1, clock=time.perf_counter)
    figure = Figure.alone("plan of a ResNet-50", times["plan"], "s", PROMISED_S)
    print(text_table([figure]))
    print(f"import torch alone: {statistics.median(times['import torch']):.2f} s")
    rows = {name: row_of(found) for name, found in times.items()}
    write(arguments.json, "time of a plan", repeats, rows, [figure])


if __name__ == "__main__":
    main()
