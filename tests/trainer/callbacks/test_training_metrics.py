"""What an evaluation says of the training samples since the one before."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest

from launcher.run_dir.atomic import read_json
from launcher.telemetry import Telemetry
from launcher.telemetry.event_log import read_events
from launcher.telemetry.formatting import evaluation_cells
from launcher.trainer.callbacks.training_metrics import TrainingMetrics
from launcher.trainer.progress import Position
from tests.forked import launch_forked
from tests.telemetry.made import made
from tests.trainer.reports import LIMITS
from tests.trainer.runs import context_alone


def metrics_alone() -> TrainingMetrics:
    return TrainingMetrics(context_alone(Telemetry(), LIMITS, 1))


def evaluated(metrics: TrainingMetrics) -> Mapping[str, float]:
    """What an evaluation now says of training."""
    metrics.on_eval_start(Position(0, 0, 1))
    return metrics._context.train_metrics


def test_what_was_counted_survives_a_checkpoint() -> None:
    since = {"loss_sum": 3.5, "loss_count": 7.0}
    before, after = metrics_alone(), metrics_alone()
    before.load_state_dict(since)
    after.load_state_dict(json.loads(json.dumps(before.state_dict())))
    assert evaluated(after) == {"train_loss": 0.5}


def test_the_table_has_it_beside_what_was_held_out() -> None:
    metrics = {"accuracy": 0.5, "macro_f1": 0.4, "train_loss": 2.0}
    cells = evaluation_cells(made("eval", 5, epoch=0, val_loss=1.0, **metrics, samples=9, seconds=1.0))
    titles = ["val_loss", "accuracy", "train_loss", "F1", "samples", "seconds"]
    assert list(cells)[2:] == titles


SHORT = [
    "recipe=cnn",
    "data=digits",
    "data.batch_size=200",
    "launch.nproc=2",
    "tracker=none",
    "train.epochs=2",
]
SAMPLES = [200] * 7 + [38]  # of the steps of an epoch


@pytest.mark.slow
def test_an_epoch_has_the_loss_of_all_its_samples_also_after_a_resume(tmp_path: Path) -> None:
    resumed = "checkpoint.resume=one/checkpoints/step-00000010"  # within the second epoch
    found, losses, times_ms = [], {}, {}
    for words in (
        ["run.dir=one", "train.max_steps=11", "checkpoint.every_steps=1"],
        ["run.dir=two", resumed],
    ):
        done = launch_forked(tmp_path, [*SHORT, "train.log_every_steps=1", *words])
        assert done.returncode == 0, done.stderr
        events = read_events(tmp_path / words[0].removeprefix("run.dir=") / "metrics.jsonl")
        losses |= {event["step"]: event["loss"] for event in events if event["event"] == "step"}
        times_ms |= {event["step"]: event["step_ms"] for event in events if event["event"] == "step"}
        found += [event for event in events if event["event"] == "eval"]
    assert [event["step"] for event in found] == [8, 11, 16]
    for event, steps in zip(found, (range(1, 9), range(9, 12), range(9, 17)), strict=True):
        samples = [SAMPLES[(step - 1) % 8] for step in steps]
        mean = sum(losses[step] * n for step, n in zip(steps, samples, strict=True)) / sum(samples)
        assert event["train_loss"] == pytest.approx(mean)
    whole = read_json(tmp_path / "two" / "result.json")["training_seconds"]
    assert whole == pytest.approx(sum(times_ms.values()) / 1e3), "the time of the steps before it, too"
