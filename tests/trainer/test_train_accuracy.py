"""What an evaluation says of the training samples since the one before."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from launcher.distributed.env import WorkerEnv
from launcher.recipe import Loss
from launcher.run_dir.atomic import read_json
from launcher.telemetry import Telemetry
from launcher.telemetry.event_log import read_events
from launcher.telemetry.formatting import evaluation_cells
from launcher.trainer.callbacks.training_metrics import TrainingMetrics
from launcher.trainer.progress import StepIndex
from launcher.trainer.train_accuracy import TrainAccuracy
from tests.forked import launch_forked
from tests.telemetry.made import made
from tests.trainer.reports import LIMITS
from tests.trainer.runs import context_alone

OF_TRAINING = ("train_loss", "train_accuracy")
ALONE = WorkerEnv(0, 1, 0, 1, torch.device("cpu"), None)
LOGITS = torch.tensor([[1.0, 0.0], [0.0, 1.0], [2.0, 0.0]])


@pytest.mark.parametrize(
    ("outputs", "labels", "expected"),
    [
        (LOGITS, torch.tensor([0, 1, 1]), (2, 3)),
        (LOGITS, torch.tensor([0, -100, 1]), (1, 2)),
        (torch.tensor([0, 1, 0]), torch.tensor([0, 1, 1]), (2, 3)),
        (torch.tensor([0, -100, 0]), torch.tensor([0, -100, 1]), (1, 2)),
        (LOGITS.T[None].expand(2, 2, 3), torch.tensor([[0, 1, 1], [0, 1, 0]]), (5, 6)),
        (LOGITS, torch.tensor([[1.0, 0.0], [0.5, 0.5], [1.0, 0.0]]), (0, 0)),  # mixed labels
        (LOGITS, torch.tensor([0, 1]), (0, 0)),
        ({"logits": LOGITS}, torch.tensor([0, 1, 1]), (0, 0)),
        (None, torch.tensor([0, 1, 1]), (0, 0)),
    ],
)
def test_right_answers_are_counted_where_outputs_are_those_of_a_classifier(outputs, labels, expected) -> None:
    answers = TrainAccuracy(ALONE, "label")
    answers.count(Loss(torch.zeros(()), 3, outputs), {"label": labels})
    assert answers.take() == expected
    assert answers.take() == (0, 0)


@pytest.mark.parametrize("size", [(1,), (5, 3)], ids=str)
def test_micro_batches_add_up(size) -> None:
    answers = TrainAccuracy(ALONE, "label")
    drawn = torch.Generator().manual_seed(0)
    predicted = torch.randint(0, 3, (9, *size), generator=drawn)
    labels = torch.randint(-1, 3, (9, *size), generator=drawn)
    for number in range(9):
        answers.count(Loss(torch.zeros(()), 3, predicted[number]), {"label": labels[number]})
    assert answers.take() == (int((predicted == labels).sum()), int((labels >= 0).sum()))


def test_tensors_that_are_filled_again_for_each_micro_batch_are_counted_as_they_were() -> None:
    answers = TrainAccuracy(ALONE, "label")
    predicted, labels = torch.zeros(2, 4, dtype=torch.int64)
    for number in range(3):
        predicted.fill_(number)
        labels.fill_(number if number else 7)
        answers.count(Loss(torch.zeros(()), 4, predicted), {"label": labels})
    assert answers.take() == (8, 12)


def test_without_classes_nothing_is_counted() -> None:
    answers = TrainAccuracy(ALONE, None)
    answers.count(Loss(torch.zeros(()), 3, LOGITS), {"label": torch.tensor([0, 1, 1])})
    assert answers.take() == (0, 0)


def metrics_alone() -> TrainingMetrics:
    return TrainingMetrics(
        replace(context_alone(Telemetry(), LIMITS, 1), train_accuracy=TrainAccuracy(ALONE, None))
    )


def evaluated(metrics: TrainingMetrics) -> Mapping[str, float]:
    """What an evaluation now says of training."""
    metrics.on_eval_start(StepIndex(0, 0, 1))
    return metrics._context.train_metrics


def test_what_was_counted_survives_a_checkpoint() -> None:
    since = {"loss_sum": 3.5, "loss_count": 7.0, "right": 2, "answered": 7}
    before, after = metrics_alone(), metrics_alone()
    before.load_state_dict(since)
    after.load_state_dict(json.loads(json.dumps(before.state_dict())))
    assert evaluated(after) == {"train_loss": 0.5, "train_accuracy": 2 / 7}


def test_the_table_has_them_beside_what_was_held_out() -> None:
    metrics = {"accuracy": 0.5, "macro_f1": 0.4, "train_loss": 2.0, "train_accuracy": 0.25}
    cells = evaluation_cells(made("eval", 5, epoch=0, val_loss=1.0, **metrics, samples=9, seconds=1.0))
    titles = ["val_loss", "accuracy", "train_loss", "train accuracy", "F1", "samples", "seconds"]
    assert list(cells)[2:] == titles
    assert cells["train accuracy"] == "25.00 %"


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
def test_an_epoch_has_the_loss_and_accuracy_of_all_its_samples_also_after_a_resume(tmp_path: Path) -> None:
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
        assert event["train_accuracy"] * sum(samples) == pytest.approx(
            round(event["train_accuracy"] * sum(samples))
        )
    assert found[0]["train_accuracy"] < found[2]["train_accuracy"]
    whole = read_json(tmp_path / "two" / "result.json")["training_seconds"]
    assert whole == pytest.approx(sum(times_ms.values()) / 1e3), "the time of the steps before it, too"
