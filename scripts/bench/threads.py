"""Time of a training step with OMP_WAIT_POLICY=PASSIVE over the default, under which idle threads spin.

    python scripts/bench/threads.py [--quick] [--json FILE]

1 rank with 2 threads, 2 ranks with 1 thread, 2 ranks with 2 threads; an MLP and a ResNet-18, under the fp16
policy. The variable must be set before torch is loaded, so each side is a set of processes of its own. Both
sets live as long as the measurement and take turns: while one runs steps, the other waits for a line on its
standard input.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from types import TracebackType

CASES = ((1, 2), (2, 1), (2, 2))  # ranks, threads of each
STEPS = {"mlp": 50, "resnet18": 2}  # in each turn
SIDES: dict[str, dict[str, str]] = {"default": {}, "passive": {"OMP_WAIT_POLICY": "PASSIVE"}}
NOT_WORSE = 1.02


class Ranks:
    """The processes of one side. They run steps when told to."""

    def __init__(self, ranks: int, threads: int, environ: dict[str, str], folder: Path) -> None:
        inherited = {key: value for key, value in os.environ.items() if key != "OMP_WAIT_POLICY"}
        self._processes = [
            subprocess.Popen(
                [sys.executable, __file__, "--rank", str(rank), str(ranks), str(folder / "store")],
                env={**inherited, "OMP_NUM_THREADS": str(threads), **environ},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(ranks)
        ]

    def __enter__(self) -> Ranks:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        for process in self._processes:
            process.stdin.close()  # type: ignore[union-attr]  # it ends there
        for process in self._processes:
            process.wait(timeout=60)
            process.stdout.close()  # type: ignore[union-attr]

    def run(self, model: str, steps: int) -> None:
        """Run so many steps on all ranks."""
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write(f"{model} {steps}\n")
            process.stdin.flush()
        for rank, process in enumerate(self._processes):
            assert process.stdout is not None
            if process.stdout.readline() != "done\n":
                raise RuntimeError(f"rank {rank} has ended; its error is above")


def work(rank: int, ranks: int, store: str) -> None:
    """A rank: build both models, then run the steps that standard input asks for."""
    import torch
    import torch.distributed as dist
    from torch import nn

    from launcher.recipe import registry_of
    from scripts.bench.baselines import Setup
    from scripts.bench.ours import ours

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    if ranks > 1:
        dist.init_process_group("gloo", store=dist.FileStore(store, ranks), rank=rank, world_size=ranks)
    torch.manual_seed(0)
    models = {
        "mlp": (nn.Sequential(nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 10)), torch.randn(64, 784)),
        "resnet18": (
            registry_of(None).models["resnet18"](num_classes=10, in_channels=1, image_size=8),
            torch.randn(32, 1, 8, 8),
        ),
    }
    labels = torch.randint(10, (64,))
    step_of = {name: ours(model, Setup()) for name, (model, _) in models.items()}
    for line in sys.stdin:
        name, steps = line.split()
        inputs = models[name][1]
        for _ in range(int(steps)):
            step_of[name]((inputs, labels[: len(inputs)]))
        print("done", flush=True)
    if ranks > 1:
        dist.destroy_process_group()


def main() -> None:
    arguments = parse()
    if arguments.rank:
        rank, ranks, store = arguments.rank
        return work(int(rank), int(ranks), store)
    from scripts.bench.interleaved import Goal, goal_table, interleave, row_of, write

    rows, goals = {}, []
    repeats = 2 if arguments.quick else arguments.repeats
    for ranks, threads in CASES:
        with tempfile.TemporaryDirectory() as name:
            folders = {side: Path(name) / side for side in SIDES}
            for folder in folders.values():
                folder.mkdir()
            with (
                Ranks(ranks, threads, SIDES["default"], folders["default"]) as default,
                Ranks(ranks, threads, SIDES["passive"], folders["passive"]) as passive,
            ):
                for model, steps in STEPS.items():
                    steps = 1 if arguments.quick else steps
                    sides = {
                        "default": partial(default.run, model, steps),
                        "passive": partial(passive.run, model, steps),
                    }
                    times = interleave(sides, repeats)
                    times = {side: [each / steps for each in values] for side, values in times.items()}
                    what = f"{model}, {ranks} rank(s) x {threads} thread(s)"
                    rows[what] = {side: row_of(values) for side, values in times.items()}
                    goals.append(Goal.of("wait", what, times, "passive", "default", NOT_WORSE))
    print(goal_table(goals))
    write(arguments.json, "a step with OMP_WAIT_POLICY=PASSIVE over the default", repeats, rows, goals)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=12)
    parser.add_argument("--quick", action="store_true", help="two repeats, to test this file")
    parser.add_argument("--json", type=Path, help="where to write the numbers")
    parser.add_argument("--rank", nargs=3, help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
