import contextlib
import dataclasses
import re

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from torch import nn

from launcher.data.loader import TensorData, epoch_order
from launcher.distributed.process_group import WorkerEnv
from launcher.errors import ConfigError
from launcher.evaluation.evaluate import (
    Evaluation,
    check_every_sample_once,
    classification_report_text,
    confusion_matrix,
    evaluate,
    macro_metrics,
)
from launcher.recipe import Loss, Recipe, cross_entropy
from tests.ranks.harness import RankFailure, run_ranks

ALONE = WorkerEnv(0, 1, 0, 1, torch.device("cpu"), None)
CLASSES = ("red", "green", "blue")


def recipe_for(data, **changes):
    recipe = Recipe(
        build_model=lambda: nn.Linear(4, 3),
        train=data,
        validation=data,
        loss=lambda model, batch: cross_entropy(model, batch, inputs="x"),
        eval_transform=lambda batch: {**batch, "x": batch["x"] * 2},
        classes=CLASSES,
    )
    return dataclasses.replace(recipe, **changes)


def points(num_samples):
    generator = torch.Generator().manual_seed(0)
    return TensorData(
        {
            "x": torch.randn(num_samples, 4, generator=generator),
            "label": torch.randint(0, 3, (num_samples,), generator=generator),
        }
    )


def linear_model():
    model = nn.Linear(4, 3)
    with torch.no_grad():
        model.weight.copy_(torch.arange(12).view(3, 4) % 5 - 2)
        model.bias.zero_()
    return model


def evaluate_points(env, num_samples, batch_size=5):
    data = points(num_samples)
    return evaluate(recipe_for(data), linear_model(), contextlib.nullcontext, data, env, batch_size)


def reference(num_samples):
    """(mean loss, labels, predictions) of the whole set in one forward pass."""
    data = points(num_samples)
    logits = linear_model()(data.columns["x"] * 2)
    loss = nn.functional.cross_entropy(logits.double(), data.columns["label"])
    return loss.item(), data.columns["label"].numpy(), logits.argmax(dim=1).numpy()


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("num_samples", [2, 23])  # 2 samples leave the third rank without any
def test_every_number_of_ranks_finds_the_same(world_size, num_samples):
    results = run_ranks(world_size, evaluate_points, num_samples)
    loss, labels, predictions = reference(num_samples)
    for result in results:
        assert result.loss == pytest.approx(loss, rel=1e-6)
        assert np.array_equal(result.labels, labels)
        assert np.array_equal(result.predictions, predictions)
        assert result.samples == num_samples
        assert result.accuracy == (labels == predictions).mean()
        assert result.loss == results[0].loss
        assert result.metrics == results[0].metrics


def claim_a_larger_job(env):
    """Two ranks of three: the third one's samples are missing."""
    env = dataclasses.replace(env, world_size=3)
    return evaluate_points(env, 23)


def repeat_the_first_rank(env):
    env = dataclasses.replace(env, rank=0)
    return evaluate_points(env, 23)


@pytest.mark.parametrize(
    ("work", "message"),
    [
        (claim_a_larger_job, "on 3 ranks missed 8 and repeated 0 of 23 samples"),
        (repeat_the_first_rank, "on 2 ranks missed 12 and repeated 11 of 23 samples"),
    ],
)
def test_missed_and_repeated_samples_are_noticed(work, message):
    with pytest.raises(RankFailure, match=message):
        run_ranks(2, work)


def test_the_count_check_accepts_only_ones():
    check_every_sample_once(torch.ones(5, dtype=torch.int64), 2)
    with pytest.raises(AssertionError, match="missed 1 and repeated 2 of 5"):
        check_every_sample_once(torch.tensor([1, 0, 2, 1, 3]), 2)


def test_the_model_is_in_evaluation_mode_only_meanwhile_and_unchanged():
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Dropout(0.5))
    model[2].eval()  # frozen by its owner
    before = {name: value.clone() for name, value in model.state_dict().items()}
    modes = []

    def loss(network, batch):
        modes.append([module.training for module in network])
        assert not torch.is_grad_enabled()
        return cross_entropy(network, batch, inputs="x")

    data = points(12)
    evaluate(recipe_for(data, loss=loss), model, contextlib.nullcontext, data, ALONE, 5)
    assert modes == [[False] * 3] * 3
    assert [module.training for module in model] == [True, True, False]
    assert model.training
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_the_mode_is_restored_after_an_error():
    def fail(network, batch):
        raise ValueError("no")

    model, data = linear_model(), points(4)
    with pytest.raises(ValueError, match="no"):
        evaluate(recipe_for(data, loss=fail), model, contextlib.nullcontext, data, ALONE, 5)
    assert model.training


def test_the_forward_context_surrounds_every_batch():
    depth, entered = [0], [0]

    @contextlib.contextmanager
    def context():
        depth[0] += 1
        entered[0] += 1
        yield
        depth[0] -= 1

    def loss(network, batch):
        assert depth == [1]
        return cross_entropy(network, batch, inputs="x")

    data = points(12)
    evaluate(recipe_for(data, loss=loss), linear_model(), context, data, ALONE, 5)
    assert entered == [3]


def test_a_recipe_without_classes_measures_the_loss_per_token():
    data = TensorData({"x": torch.ones(7, 4)})
    recipe = recipe_for(
        data, classes=None, loss=lambda model, batch: Loss(batch["x"].sum(), 10 * len(batch["x"]))
    )
    result = evaluate(recipe, linear_model(), contextlib.nullcontext, data, ALONE, 3)
    assert result == Evaluation(0.8, 7, {}, None, None, None)
    assert result.accuracy is None


@pytest.mark.parametrize(
    ("predictions", "message"),
    [
        (lambda n: None, "one predicted class for each of 4 samples; it gave none"),
        (lambda n: torch.zeros(n, 3, dtype=torch.int64), r"it gave shape \[4, 3\]"),
        (lambda n: torch.full((n,), 3), r"its predictions go from 3 to 3. They have to lie in 0\.\.2"),
        (lambda n: torch.full((n,), -1), "its predictions go from -1 to -1"),
    ],
)
def test_a_recipe_that_predicts_no_classes_is_refused(predictions, message):
    data = points(4)
    recipe = recipe_for(
        data, loss=lambda model, batch: Loss(torch.zeros(()), 4, predictions(len(batch["x"])))
    )
    with pytest.raises(ConfigError, match=message):
        evaluate(recipe, linear_model(), contextlib.nullcontext, data, ALONE, 8)


def evaluation_of(labels, predictions, classes=CLASSES):
    return Evaluation(0.0, len(labels), {}, classes, np.asarray(labels), np.asarray(predictions))


pairs = st.integers(1, 40).flatmap(
    lambda n: st.tuples(*(arrays(np.int64, n, elements=st.integers(0, 2)) for _ in range(2)))
)


@settings(max_examples=60, deadline=None)
@given(pairs)
def test_metrics_equal_those_of_scikit_learn(pair):
    from sklearn import metrics

    ours = macro_metrics(confusion_matrix(evaluation_of(*pair)))
    precision, recall, f1, _ = metrics.precision_recall_fscore_support(
        *pair, average="macro", zero_division=0
    )
    assert ours == pytest.approx(
        {
            "accuracy": metrics.accuracy_score(*pair),
            "macro_precision": precision,
            "macro_recall": recall,
            "macro_f1": f1,
        }
    )


@settings(max_examples=30, deadline=None)
@given(pairs)
def test_the_report_agrees_with_the_metrics(pair):
    evaluation = evaluation_of(*pair)
    text = classification_report_text(evaluation)
    metrics = macro_metrics(confusion_matrix(evaluation))
    macro = re.search(r"macro avg +([\d.]+) +([\d.]+) +([\d.]+) +(\d+)", text)
    assert [float(number) for number in macro.groups()] == pytest.approx(
        [metrics["macro_precision"], metrics["macro_recall"], metrics["macro_f1"], len(pair[0])], abs=6e-5
    )


def test_confusion_matrix_and_report_by_hand():
    evaluation = evaluation_of([0, 0, 1, 1, 1], [0, 1, 1, 1, 0])
    matrix = confusion_matrix(evaluation)
    assert matrix.dtype == np.int64
    assert matrix.tolist() == [[1, 1, 0], [1, 2, 0], [0, 0, 0]]
    report = classification_report_text(evaluation)
    assert re.search(r"red +0\.5000 +0\.5000 +0\.5000 +2", report)
    assert re.search(r"green +0\.6667 +0\.6667 +0\.6667 +3", report)
    assert "blue" not in report


def test_labels_keep_the_order_of_the_set():
    order = epoch_order(30, 0, 0)
    data = TensorData(points(30).select(order))
    result = evaluate(recipe_for(data), linear_model(), contextlib.nullcontext, data, ALONE, 7)
    assert np.array_equal(result.labels, reference(30)[1][order.numpy()])
    assert np.array_equal(result.predictions, reference(30)[2][order.numpy()])
