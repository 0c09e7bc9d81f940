"""The soak can fail: what must hold after a run is broken, and noticed."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from scripts.soaking.checks import Expected, problems_of_run
from tests.snapshots import publish_steps

ROOT = Path(__file__).parents[2]
EXPECTED = Expected("the digest", steps=6, skipped=(2,))
RESULT = {"state": "done", "exit": 0, "steps": 6, "weights_sha256": "the digest", "skipped_steps": 1}
STATUS = {"state": "done", "exit": 0, "step": 6}


def write_events(run_dir: Path, repeated: int = 0) -> None:
    steps: list[dict[str, Any]] = [{"event": "step", "step": step} for step in range(1, 7)]
    told = [*steps[:repeated], *steps, {"event": "overflow", "step": 2}, {"event": "end", "step": 6}]
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(event) + "\n" for event in told))


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """What a run of six steps leaves, the checkpoint of whose step 3 was damaged on the way."""
    (tmp_path / "result.json").write_text(json.dumps(RESULT))
    (tmp_path / "status.json").write_text(json.dumps(STATUS))
    write_events(tmp_path)
    folder = tmp_path / "checkpoints"
    publish_steps(folder, 3)[0].rename(folder / "damaged-step-00000003")
    publish_steps(folder, 3, 4, 6)
    return tmp_path


def lose_a_byte(run_dir: Path) -> None:
    file = run_dir / "checkpoints" / "step-00000006" / "weights.safetensors"
    os.truncate(file, file.stat().st_size - 1)


BROKEN: dict[str, tuple[Callable[[Path], object], str]] = {
    "another digest": (
        lambda run_dir: (run_dir / "result.json").write_text(json.dumps(RESULT | {"weights_sha256": "b"})),
        "weights_sha256 is b",
    ),
    "a step recorded twice": (lambda run_dir: write_events(run_dir, 1), "steps [1] are recorded twice"),
    "a damaged checkpoint": (lose_a_byte, "step-00000006: weights.safetensors has"),
    "damage that was not set aside": (
        lambda run_dir: shutil.rmtree(run_dir / "checkpoints" / "damaged-step-00000003"),
        "step-00000003 was damaged and is not set aside",
    ),
    "an unfinished checkpoint": (
        lambda run_dir: (run_dir / "checkpoints" / ".unfinished-step-00000006-ab").mkdir(),
        ".unfinished-step-00000006-ab is left over",
    ),
}


@pytest.mark.parametrize(("break_it", "text"), BROKEN.values(), ids=BROKEN)
def test_what_is_broken_is_noticed(run_dir: Path, break_it, text) -> None:
    assert problems_of_run(run_dir, EXPECTED, ["step-00000003"]) == []
    break_it(run_dir)
    (problem,) = problems_of_run(run_dir, EXPECTED, ["step-00000003"])
    assert text in problem


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_short_soak_is_survived(tmp_path: Path) -> None:
    file = tmp_path / "soak.json"
    done = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "soaking" / "main.py"), "--quick", "--json", str(file)],
        env=os.environ | {"PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    last = done.stdout.splitlines()[-1]
    assert re.fullmatch(r"soak: 5 faults in 1 rounds, all survived, digest \w{16} equal in all", last)
    assert list(tmp_path.iterdir()) == [file]
    assert sum(json.loads(file.read_text())["survived"].values()) == 5
