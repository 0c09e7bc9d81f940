"""Real runs of the launcher whose recipe takes times before each training step, and writes them to a file."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from launcher.engine import StepResult
from launcher.os.lifetime import ENDS_WITH_STARTER
from launcher.trainer.progress import StepIndex
from launcher.trainer.train_step import TrainStep

ROOT = Path(__file__).resolve().parents[2]


def times_of(
    title: str, words: Sequence[str], variables: Mapping[str, str], folder: Path, limit_s: float
) -> Any:
    """The JSON of `folder`/times.json after a run with these words. Raises RuntimeError where it fails."""
    # Without what a user has set for the tracker, whose default is measured.
    kept = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
    paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH", "")])])
    done = subprocess.run(
        [sys.executable, "-m", "launcher", *words],
        env=kept | {"PYTHONPATH": paths, ENDS_WITH_STARTER: "1", **variables},
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=limit_s,
    )
    file = folder / "times.json"
    if done.returncode or not file.exists():
        raise RuntimeError(f"{title}: exit code {done.returncode}\n{done.stdout[-3000:]}")
    return json.loads(file.read_text())


def call_before_each_step(call: Callable[[], None]) -> None:
    """Not by a function of the recipe: a transform, say, costs the launcher what the other side lacks."""
    run = TrainStep.run

    def called(task: TrainStep, index: StepIndex) -> StepResult:
        call()
        return run(task, index)

    TrainStep.run = called  # type: ignore[method-assign]
