"""Runs that start from a file of weights: what they train from, what they record, and their resume."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from launcher.checkpoint.export import export
from tests.faults.launching import Ended, run

STILL = "optim.lr=1e-30"  # no step moves a weight


def config_of(ended: Ended) -> dict:
    return dict(yaml.safe_load((ended.directory / "config.yaml").read_text()))


def decision(ended: Ended) -> dict:
    (*_, last) = (event for event in ended.events("decision") if event["topic"] == "weights")
    return dict(last)


@pytest.mark.slow
def test_a_run_starts_from_the_export_of_another_and_a_resume_from_its_own_checkpoint(tmp_path: Path) -> None:
    assert run(tmp_path / "first", "train.max_steps=6").codes == [0]
    file = tmp_path / "weights.safetensors"
    export(tmp_path / "first", file)
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    words = (f"model.init_from={file}", STILL)
    ended = run(tmp_path / "second", *words, "train.max_steps=1", ranks=2)
    assert ended.codes == [0, 0], ended
    given, trained = load_file(file), load_file(ended.checkpoints[1] / "weights.safetensors")
    for name in ("inner.weight", "inner.bias", "norm.weight", "outer.weight", "ballast"):
        assert torch.equal(given[name], trained[name]), name  # masters: not rounded to fp16
    assert trained["passes"] == given["passes"] + 1
    assert config_of(ended)["model"]["init_from_sha256"] == digest
    assert decision(ended)["text"].startswith(f"{len(given)} of {len(given)} tensors from {file}")
    assert decision(ended)["sha256"] == digest

    file.unlink()
    resumed = run(tmp_path / "second", *words, "train.max_steps=2", ranks=2)
    assert resumed.codes == [0, 0], resumed
    assert decision(resumed)["text"] == f"of the checkpoint, not of model.init_from={file}"
    assert config_of(resumed)["model"]["init_from_sha256"] == digest


@pytest.mark.slow
def test_a_file_that_cannot_be_used_ends_all_ranks_with_one_error(tmp_path: Path) -> None:
    file = tmp_path / "weights.safetensors"
    save_file({"other": torch.zeros(3)}, file)
    ended = run(tmp_path / "run", f"model.init_from={file}", ranks=2)
    assert ended.codes == [2, 2]
    assert "No tensor fits by name and shape: it is of another model." in ended.outputs[0]
    assert ended.checkpoints == {}
