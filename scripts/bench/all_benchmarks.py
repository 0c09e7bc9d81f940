"""Runs the benchmarks that this machine can, and prints their figures in one table.

    scripts/bench/all [--quick] [--only NAME ...] [--json FILE]

Each benchmark is a process of its own, one after another. One that fails is reported with the end of its
output, and the others run. The exit code is 1 if a benchmark failed, and does not depend on the figures. The
result of each replaces its former one in the JSON as soon as it is there; those of the others stay, also if a
run is interrupted. `scripts/bench/tables.py` writes the promised figures into the README.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from scripts.bench import network
from scripts.bench.interleaved import Figure, text_table

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results" / "all.json"
PACKAGES = ("torch", "numpy", "safetensors", "accelerate", "lightning")
TAIL = 2000  # characters kept of a failed benchmark's output


@dataclass(frozen=True)
class Benchmark:
    """A program that takes --quick and --json FILE. `lacking` says what the machine does not have, or ''."""

    name: str
    command: tuple[str, ...]
    limit_s: float
    lacking: Callable[[], str] = lambda: ""
    quick: str = "--quick"

    def run(self, quick: bool, folder: Path) -> dict[str, Any]:
        """Its result file, with seconds; or `skipped`, or `failed` with the end of its output."""
        if reason := self.lacking():
            return {"skipped": reason}
        file = folder / f"{self.name}.json"
        command = [sys.executable, *self.command, "--json", str(file), *([self.quick] if quick else [])]
        began = time.monotonic()
        try:
            done = subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=self.limit_s,
            )
        except subprocess.TimeoutExpired:
            return {"failed": f"still running after {self.limit_s:.0f} s"}
        if done.returncode or not file.exists():
            return {"failed": f"exit code {done.returncode}", "output": done.stdout[-TAIL:]}
        return {"seconds": time.monotonic() - began, **json.loads(file.read_text())}


def on_ranks(program: str) -> tuple[str, ...]:
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    return (*torchrun, str(HERE / program))


def without_gpu() -> str:
    return "" if torch.cuda.is_available() else "this machine has no GPU"


def benchmarks() -> list[Benchmark]:
    return [
        Benchmark("step_cost", (str(HERE / "step_cost.py"),), 900),
        Benchmark("precision_step", on_ranks("precision_step.py"), 900),
        Benchmark("checkpoint", (str(HERE / "checkpoint.py"),), 7200),
        Benchmark("links", (str(HERE / "links.py"),), 1800, network.lacking),
        Benchmark("accuracy", (str(HERE / "accuracy.py"),), 7200),
        Benchmark("launch", (str(HERE / "launch.py"),), 1800),
        Benchmark("shares", (str(HERE / "shares.py"),), 3600),
        Benchmark("gpu", (str(HERE / "gpu_session.py"),), 900, without_gpu, "--dry-run"),
    ]


def figures_in(result: dict[str, Any]) -> list[Figure]:
    return [Figure(**values) for values in result.get("figures", ())]


def versions() -> dict[str, str]:
    return {name: metadata.version(name) for name in PACKAGES if importlib.util.find_spec(name)}


def main(argv: Sequence[str] | None = None, known: Sequence[Benchmark] | None = None) -> int:
    known = benchmarks() if known is None else known
    arguments = parse(argv, [each.name for each in known])
    file = arguments.json or (None if arguments.quick else RESULTS)
    failed, figures = False, []
    with tempfile.TemporaryDirectory() as folder:
        for benchmark in known:
            if arguments.only and benchmark.name not in arguments.only:
                continue
            print(f"{benchmark.name} ...", end=" ", flush=True)
            result = benchmark.run(arguments.quick, Path(folder))
            print(ending_of(result), flush=True)
            failed |= "failed" in result
            figures += figures_in(result)
            if file is not None and "figures" in result:
                keep(file, benchmark.name, {**result, "versions": versions()})
    print(f"\n{text_table(figures)}")
    print("On a loaded machine none of this holds: see load_average.")
    return int(failed)


def ending_of(result: dict[str, Any]) -> str:
    """How a benchmark ended."""
    for word in ("skipped", "failed"):
        if word in result:
            return f"{word}: {result[word]}\n{result.get('output', '')}".rstrip()
    return f"{result['seconds']:.0f} s"


def keep(file: Path, name: str, result: dict[str, Any]) -> None:
    """Replace the result of this benchmark in the file, whole or not at all."""
    results = json.loads(file.read_text()) if file.exists() else {}
    file.parent.mkdir(parents=True, exist_ok=True)
    new = file.with_suffix(".new")
    new.write_text(json.dumps(results | {name: result}, indent=2) + "\n")
    new.replace(file)


def parse(argv: Sequence[str] | None, names: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="two repeats of each, to test the benchmarks")
    parser.add_argument("--only", nargs="+", choices=names, help="these benchmarks")
    parser.add_argument("--json", type=Path, help="where to write the numbers; --quick alone writes none")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
