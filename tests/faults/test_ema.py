"""Runs with a moving average of the weights: what it changes, what it does not, and its resume."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from launcher.checkpoint.export import export
from launcher.checkpoint.storage import load
from tests.faults.launching import Ended, run
from tests.snapshots import comparable

LENGTH = ("train.max_steps=8", "checkpoint.every_steps=3", "train.eval_every_steps=4")
EMA = ("ema.decay=0.8", "ema.every_steps=3")
# A scale at which the first gradients overflow: its steps are skipped.
SKIPPING = "precision.loss_scale.init_scale=2097152"


def average_of(ended: Ended, step: int) -> object:
    snapshot = load(ended.checkpoints[step])
    assert snapshot.average is not None
    return comparable(snapshot.average), comparable(snapshot.average_buffers)


@pytest.mark.slow
def test_it_changes_no_step_is_evaluated_and_exported_and_resumes_bit_for_bit(tmp_path: Path) -> None:
    words = (*LENGTH, SKIPPING)
    plain = run(tmp_path / "plain", *words, ranks=2)
    whole = run(tmp_path / "whole", *words, *EMA, ranks=2)
    assert whole.digest == plain.digest
    assert 0 < whole.result["skipped_steps"] < 8
    assert whole.result["evaluated_weights"] == "ema"
    assert whole.result["ema_sha256"] != whole.digest
    assert "ema_sha256" not in plain.result
    assert whole.result["metrics"]["val_loss"] != plain.result["metrics"]["val_loss"]
    assert whole.result["state_bytes"] > plain.result["state_bytes"]
    assert [e["topic"] for e in whole.events("decision") if e["topic"] == "ema"] == ["ema"]

    start = f"checkpoint.resume={whole.checkpoints[3]}"
    resumed = run(tmp_path / "resumed", *words, *EMA, start, ranks=2)
    assert resumed.digest == whole.digest
    assert resumed.result["ema_sha256"] == whole.result["ema_sha256"]
    for step in (6, 8):
        assert average_of(resumed, step) == average_of(whole, step)
    assert resumed.events("eval") != []
    for one, other in zip(resumed.events("eval"), whole.events("eval"), strict=True):
        assert (one["step"], one["val_loss"]) == (other["step"], other["val_loss"])

    file = tmp_path / "weights.safetensors"
    assert export(whole.directory, file).averaged
    exported, snapshot = load_file(file), load(whole.checkpoints[8])
    assert snapshot.average.counters["applied"] == whole.result["applied_steps"], "of the last steps, too"
    for name, value in (snapshot.average.weights | snapshot.average.buffers).items():
        assert torch.equal(exported[name], value), name
    assert not export(whole.directory, file, averaged=False).averaged
    exported = load_file(file)
    for name, value in (snapshot.engine.weights | snapshot.engine.buffers).items():
        assert torch.equal(exported[name], value), name
    assert not export(plain.directory, file).averaged


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp16", "fp32"])
def test_sharded_and_on_other_ranks_it_resumes(tmp_path: Path, precision: str) -> None:
    words = (*LENGTH, *EMA, f"precision={precision}", "ddp.shard_optimizer=true")
    whole = run(tmp_path / "whole", *words, ranks=2)
    for start in (f"checkpoint.resume={whole.checkpoints[3]}", f"checkpoint.resume={whole.checkpoints[6]}"):
        resumed = run(tmp_path / f"resumed{start[-1]}", *words, start, ranks=2)
        assert resumed.digest == whole.digest
        assert resumed.result["ema_sha256"] == whole.result["ema_sha256"]
    alone = run(tmp_path / "alone", *words, start)
    assert alone.codes == [0], alone
    assert alone.result["metrics"]["val_loss"] == pytest.approx(whole.result["metrics"]["val_loss"], rel=0.1)


@pytest.mark.slow
def test_a_bit_of_it_that_differs_between_ranks_ends_the_run(tmp_path: Path) -> None:
    ended = run(tmp_path / "run", *LENGTH, *EMA, "ddp.check_replicas_every_steps=1", ranks=2, prepare=drift)
    assert 9 in ended.codes, ended
    assert "inner.weight (average)" in ended.outputs[0] + ended.outputs[1]


def drift() -> None:
    import os

    from launcher.engine import ExponentialMovingAverage

    update = ExponentialMovingAverage.update

    def and_drift(self: ExponentialMovingAverage, step: int) -> None:
        update(self, step)
        if os.environ["RANK"] == "1":
            self.tensors()[0][:] *= 1 + 1e-6

    ExponentialMovingAverage.update = and_drift  # type: ignore[method-assign]
