"""Whole runs of two ranks with telemetry.gpu_stats=true and the stand-in for the driver's library."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from launcher.telemetry.event_log import read_events
from tests.faults.launching import WORDS

ROOT = Path(__file__).parents[3]


def launched(folder: Path, library: Path, *words: str) -> Path:
    """The directory of a run that is done."""
    done = subprocess.run(
        [sys.executable, "-m", "launcher", *WORDS, "run.dir=run", "launch.nproc=2", *words],
        cwd=folder,
        env=os.environ
        | {"PYTHONPATH": str(ROOT), "LD_LIBRARY_PATH": str(library), "CUDA_VISIBLE_DEVICES": "0,1"},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode in (0, 75), done.stderr
    return folder / "run"


def weights(run: Path) -> str:
    return str(json.loads((run / "result.json").read_text())["weights_sha256"])


@pytest.mark.slow
def test_a_run_reports_its_energy_and_adds_that_of_a_resumed_one(library: Path, tmp_path: Path) -> None:
    run = launched(
        tmp_path, library, "telemetry.gpu_stats=true", "train.epochs=1", "checkpoint.every_steps=13"
    )
    first = [event for event in read_events(run / "metrics.jsonl") if event["event"] == "gpu"]
    assert first[-1]["step"] == 13
    assert [gpu["index"] for gpu in first[-1]["gpus"]] == [0, 1]
    before_j = first[-1]["run_energy_j"]
    measured = weights(run)
    assert json.loads((run / "result.json").read_text())["energy_kwh"] == pytest.approx(before_j / 3.6e6)
    launched(tmp_path, library, "telemetry.gpu_stats=true", "train.epochs=2", "checkpoint.every_steps=13")
    events = read_events(run / "metrics.jsonl")
    gpu = [event for event in events if event["event"] == "gpu"]
    assert gpu[-1]["run_energy_j"] == pytest.approx(before_j + sum(e["energy_j"] for e in gpu[len(first) :]))
    kwh = json.loads((run / "result.json").read_text())["energy_kwh"]
    assert kwh == pytest.approx(gpu[-1]["run_energy_j"] / 3.6e6)
    other = tmp_path / "other"
    other.mkdir()
    run = launched(other, library, "train.epochs=1")
    assert weights(run) == measured
    assert [event for event in read_events(run / "metrics.jsonl") if event["event"] == "gpu"] == []
    assert "energy_kwh" not in json.loads((run / "result.json").read_text()), "auto, and no rank uses a GPU"
