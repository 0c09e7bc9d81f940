"""The best evaluation of a run stands beside its last one, with its step and its value."""

from __future__ import annotations

import pytest

from launcher.checkpoint.export import export
from tests.faults.launching import EPOCH, run

pytestmark = pytest.mark.timeout(90)


def test_the_best_evaluation_is_named_with_its_step_also_after_a_resume(tmp_path) -> None:
    words = "schedule=constant", "optim.lr=1.5", "train.eval_every_steps=3"
    run(tmp_path / "run", *words, "train.max_steps=14")
    ended = run(tmp_path / "run", *words, f"train.max_steps={2 * EPOCH}")
    assert ended.codes == [0], ended
    losses = {event["step"]: event["val_loss"] for event in ended.events("eval")}
    step = min(losses, key=losses.__getitem__)
    assert step < 2 * EPOCH, "the last evaluation is not the best"
    assert (ended.result["best_step"], ended.result["best_metric"]) == (step, losses[step])
    assert ended.result["metric"] == losses[2 * EPOCH]
    assert f"; the best val_loss: {losses[step]:.4f} after step {step}" in ended.outputs[0]
    exported = export(ended.directory, tmp_path / "best.safetensors", best=True)
    assert exported.metric is not None
    assert (exported.step, exported.metric.value) == (step, losses[step])
