"""All checks and measurements of a GPU in one command.

    scripts/bench/gpu [--minutes 9] [--wheels DIR] [--cifar10 DIR] [--only PART ...] [--json FILE] [--dry-run]

Runs its parts one after another, each as a process with a time limit, for at most --minutes in total. Prints
each failure as it comes and one table, failures first, and writes one JSON file, also when it is interrupted.
--wheels installs packages without network. --dry-run runs the same parts on a CPU with tiny sizes.

    H3, H2      time per step over torch's AMP: ResNet-18 with 32 pixels, ResNet-50 with 224
    H5          the AdamW update of BERT-large over torch's fused AdamW and over a copy
    H8          peak memory of ResNet-50 over torch's AMP
    kernels, launcher, restart, wires: versions; a run and its resume; a restart; a group of one
    tests/gpu, launches: the tests; kernels and synchronisations per step
    H6          time per step over Accelerate and Lightning Fabric
    H1, H4      ResNet-50 and BERT-base in fp16 over TF32; one also over fp32, the other over torch's AMP
    H9          share of the speed of a large matrix product that ResNet-50 and GPT reach
    H10         accuracy and time on CIFAR-10 (--cifar10 DIR), fp16 over fp32

Batches are smaller on a GPU with 16 GB.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
RESULTS = HERE / "results" / "gpu.json"
PACKAGES = ("torch", "triton", "hydra-core", "omegaconf", "safetensors", "numpy", "accelerate", "lightning")
TAIL = 2000  # characters kept of a failed part's output
BAD = ("failed", "out of time")
ORDER = (*BAD, "no time", "skipped", "done")
SKIPPED = 77  # exit code of a part that is skipped


@dataclass(frozen=True)
class Part:
    """A command of this session. `{json}` in it stands for the file of its results."""

    name: str
    command: tuple[str, ...]
    limit_s: float
    environ: Mapping[str, str] = field(default_factory=dict)


@dataclass
class Outcome:
    """The outcome of a part; `state` is one of ORDER."""

    part: str
    state: str
    seconds: float = 0.0
    exit_code: int | None = None
    told: str = ""  # last line of its output
    output: str = ""  # end of its output, where it failed
    found: Any = None


def parts(arguments: argparse.Namespace) -> list[Part]:
    """The parts, most important first: all limits of the first four fit into the session."""
    dry = ("--dry-run",) if arguments.dry_run else ()
    road, speed = str(HERE / "gpu_road.py"), str(HERE / "gpu_speed.py")
    tests = ("-m", "pytest", "-m", "gpu", "tests/gpu", "-p", "no:cacheprovider", "--tb=short")
    few = ("-k", "comparison or recurrent") if arguments.dry_run else ()
    on_cpu = {"LAUNCHER_TEST_DEVICE": "cpu"} if arguments.dry_run else {}
    cifar10 = ("--cifar10", str(arguments.cifar10)) if arguments.cifar10 else ()
    roads = (("kernels", 100), ("launcher", 200), ("restart", 150), ("wires", 100))
    # A limit has room for a cold start: imports from a slow disk, Triton's first kernels, cuDNN's trials.
    first, later = ("H3", "H2", "H5", "H8"), (("H6", 100), ("H1", 100), ("H4", 120), ("H9", 120))
    found = [
        *(Part(name, (speed, name, "--json", "{json}", *dry), 100) for name in first),
        *(Part(name, (road, name, "--json", "{json}", *dry), limit) for name, limit in roads),
        Part("tests/gpu", (*tests, *few), 240, on_cpu),
        Part("launches", (road, "launches", "--json", "{json}", *dry), 100),
        *(
            Part(name, (speed, name, "--json", "{json}", *dry, *cifar10), limit)
            for name, limit in (*later, ("H10", 240))
        ),
    ]
    if arguments.wheels:
        wheels = sorted(map(str, arguments.wheels.glob("*.whl")))
        pip = ("-m", "pip", "install", "--no-index", "--no-deps", "--disable-pip-version-check")
        found.insert(0, Part("wheels", (*pip, *wheels), 90))
    return [part for part in found if not arguments.only or part.name in arguments.only]


def run(part: Part, limit_s: float, folder: Path) -> Outcome:
    """Run one part for at most `limit_s` seconds, then kill all its processes."""
    file = folder / f"{part.name.replace('/', '-')}.json"
    command = [sys.executable, *(word.replace("{json}", str(file)) for word in part.command)]
    began = time.monotonic()
    with open(folder / "output", "w+", encoding="utf-8", errors="replace") as output:
        ended: list[int] = []  # a SIGTERM before the `try` would leave the part behind: it waits until there
        before = signal.signal(signal.SIGTERM, lambda number, frame: ended.append(number))
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=os.environ | part.environ,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            signal.signal(signal.SIGTERM, before)
            if ended:
                signal.raise_signal(signal.SIGTERM)
            exit_code: int | None = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            exit_code = None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # with all its processes
            process.wait()
        output.seek(0)
        text = output.read()
    state = {0: "done", SKIPPED: "skipped", None: "out of time"}.get(exit_code, "failed")
    return Outcome(
        part.name,
        state,
        time.monotonic() - began,
        exit_code,
        told=next((line for line in reversed(text.splitlines()) if line.strip()), "")[:200],
        output="" if state == "done" else text[-TAIL:],
        found=json.loads(file.read_text()) if file.exists() else None,
    )


def session(todo: Sequence[Part], minutes: float, file: Path | None, dry_run: bool) -> list[Outcome]:
    """Run the parts that fit into the time, and print each; `file` is rewritten after each of them."""
    deadline = time.monotonic() + 60 * minutes
    outcomes: list[Outcome] = []
    with tempfile.TemporaryDirectory(prefix="gpu-session-") as folder:
        for part in todo:
            left = deadline - time.monotonic()
            enough = left > min(part.limit_s, 10)
            outcome = (
                run(part, min(part.limit_s, left), Path(folder)) if enough else Outcome(part.name, "no time")
            )
            outcomes.append(outcome)
            print(row(outcome), flush=True)
            if outcome.state in BAD:  # at once: the session may be cut off before its end
                print(f"{outcome.part}, exit code {outcome.exit_code}:\n{outcome.output}", flush=True)
            if file is not None:
                file.write_text(json.dumps(report(outcomes, dry_run), indent=1) + "\n")
    return outcomes


def report(outcomes: Sequence[Outcome], dry_run: bool) -> dict[str, Any]:
    """The table of outcomes, failures first."""
    return {
        "what": "parts of scripts/bench/gpu, those that failed first",
        "dry_run": dry_run,
        "machine": machine(),
        "parts": [asdict(outcome) for outcome in failures_first(outcomes)],
    }


def failures_first(outcomes: Sequence[Outcome]) -> list[Outcome]:
    return sorted(outcomes, key=lambda outcome: ORDER.index(outcome.state))


def machine() -> dict[str, Any]:
    """Hardware, versions, date. From nvidia-smi, because this process must not use the GPU."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True)
        gpus = answer.stdout.splitlines()
    except (OSError, subprocess.SubprocessError):
        gpus = []
    versions = {}
    for package in PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[package] = metadata.version(package)
    return {
        "gpus": gpus,
        "cores": len(os.sched_getaffinity(0)),
        "python": sys.version.split()[0],
        "versions": versions,
        "date": datetime.datetime.now(tz=datetime.UTC).isoformat(timespec="seconds"),
    }


def row(outcome: Outcome) -> str:
    return f"{outcome.part:12} {outcome.state:12} {outcome.seconds:6.1f} s  {outcome.told}"


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse(argv)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # kills the part as well
    file = arguments.json or (None if arguments.dry_run else RESULTS)  # where a result would lie
    outcomes = session(parts(arguments), arguments.minutes, file, arguments.dry_run)
    print(f"\n{file or ''}\n" + "\n".join(map(row, failures_first(outcomes))))
    return int(any(outcome.state in BAD for outcome in outcomes))


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=9)
    parser.add_argument("--wheels", type=Path, help="folder of wheels to install first, without network")
    parser.add_argument("--cifar10", type=Path, help="folder of CIFAR-10, for H10")
    parser.add_argument("--only", nargs="+", default=[], metavar="PART")
    parser.add_argument(
        "--json", type=Path, help=f"where to write the results; default: {RESULTS.name} beside it"
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="on a CPU, tiny; without --json writes nothing"
    )
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
