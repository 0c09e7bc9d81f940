"""What the launcher's loop adds to a small step, over the same steps written by hand.

    python scripts/bench/loop.py [--quick] [--json FILE] [--repeats 12]

Runs `python -m launcher` as users do, with monitor, evaluator, checkpoints, votes, replica checks, answers,
heartbeat and files at their defaults, and without a terminal, so without a progress bar; see
`loop_recipe.py`. One rank, one thread that computes. Rows, by the processor time of the training process,
that of the launcher's other threads on its side, and by wall time:

- the loop of the engine's README, which does nothing else, with a step of about 0.4 ms, in emulated fp16 and
  in fp32: the microseconds that the launcher adds;
- a bare Stepper around the same batches, gathered by hand from tensors; without a tracker, and with the
  default one (wandb, offline), with a step of about 1.8 ms;
- a hand-written loop around torch's DataLoader, with 0 and with 2 processes. With processes wall time
  counts: what they do is not in the processor time of the one that trains.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from scripts.bench.interleaved import Figure, Times, median_interval, row_of, text_table, write
from scripts.bench.loop_recipe import SETTINGS, Settings
from scripts.bench.real_run import times_of

LIMIT_S = 300
STEPS_PER_EPOCH, BATCH = 50, 128
WORDS = (
    "recipe=resnet18",
    "recipe.uses=bench_loop",
    f"recipes.path={Path(__file__).with_name('loop_recipe.py')}",
    "launch.nproc=1",
    "train.epochs=100000",
    "train.eval_every_epochs=100000",
    "optim.lr=0.01",
    "precision.loss_scale.init_scale=1024",  # neither side skips a step: what they do then is not measured
    "schedule=constant",
    "schedule.warmup_fraction=0",
)


@dataclass(frozen=True)
class Case:
    """One run of the launcher, judged by the times of `clock`."""

    title: str
    source: str
    tracker: str
    workers: int = 0
    clock: str = "cpu"
    precision: str = "fp16"

    @property
    def batch(self) -> int:
        return 32 if self.source == "readme" else BATCH

    @property
    def width(self) -> int:
        return 64 if self.source == "readme" else 256

    def words(self) -> list[str]:
        return [
            f"tracker={self.tracker}",
            f"data.num_workers={self.workers}",
            f"precision={self.precision}",
            f"data.batch_size={self.batch}",
        ]


CASES = (
    Case("the README's loop, fp16", "readme", "none"),
    Case("the README's loop, fp32", "readme", "none", precision="fp32"),
    Case("bare Stepper, tracker=none", "tensors", "none"),
    Case("bare Stepper, default tracker", "tensors", "wandb"),
    Case("DataLoader, 0 processes", "loader", "none"),
    Case("DataLoader, 2 processes", "loader", "none", workers=2, clock="wall"),
)


def measure(case: Case, rounds: int, block: int) -> dict[str, Times]:
    """Seconds of a step by clock and side. Raises RuntimeError where the run fails."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "times.json"
        settings = Settings(
            *(case.source, case.workers, block, rounds, STEPS_PER_EPOCH, case.batch, str(file), case.width)
        )
        words = [*WORDS, *case.words(), f"train.max_steps={settings.total_steps}", f"run.dir={folder}/run"]
        found: dict[str, Times] = times_of(
            case.title, words, {SETTINGS: json.dumps(asdict(settings))}, Path(folder), LIMIT_S
        )
        return found


def rows_of(times: dict[str, Times]) -> dict[str, dict[str, float]]:
    return {
        f"{side}, {clock}": row_of(seconds)
        for clock, sides in times.items()
        for side, seconds in sides.items()
    }


def figure_of(case: Case, times: dict[str, Times]) -> Figure:
    if case.source == "readme":
        return added(case, times[case.clock])
    what = f"{case.clock} time of a step over {case.title}"
    return Figure.ratio(what, times[case.clock], "launcher", "by hand")


def added(case: Case, times: Times) -> Figure:
    """The time that the launcher adds to a step."""
    us = [1e6 * (one - other) for one, other in zip(times["launcher"], times["by hand"], strict=True)]
    ours, theirs = (1e6 * statistics.median(times[side]) for side in ("launcher", "by hand"))
    what = f"microseconds that the launcher adds to {case.title}"
    return Figure(what, ours, "us", "by hand", theirs, statistics.median(us), *median_interval(us))


def tell(title: str, rows: dict[str, dict[str, float]]) -> None:
    print(f"\n{title:32} {'min us':>8} {'median us':>10}")
    for name, row in rows.items():
        print(f"{name:32} {1e3 * row['min_ms']:8.0f} {1e3 * row['median_ms']:10.0f}", flush=True)


def main(argv: Sequence[str] | None = None) -> None:
    arguments = parse(argv)
    rounds, block = (2, 5) if arguments.quick else (arguments.repeats, arguments.block)
    found: dict[str, Any] = {}
    figures: list[Figure] = []
    for case in CASES:
        if arguments.only and not any(word in case.title for word in arguments.only):
            continue
        times = measure(case, rounds, block)
        found[case.title] = rows_of(times)
        figures.append(figure_of(case, times))
        tell(case.title, found[case.title])
    print(f"\n{text_table(figures)}")
    write(arguments.json, "what the launcher's loop adds to a step", rounds, found, figures, block=block)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=12, help="blocks of each side")
    parser.add_argument("--block", type=int, default=200, help="steps of a block")
    parser.add_argument("--only", nargs="+", help="cases whose title contains one of these")
    parser.add_argument("--quick", action="store_true", help="two short blocks, to test this file")
    parser.add_argument("--json", type=Path, help="where to write the numbers")
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
