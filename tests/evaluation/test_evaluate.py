import contextlib
import dataclasses

import numpy as np
import pytest
import torch
from torch import nn

from launcher.data.tensors import TensorData
from launcher.distributed.env import WorkerEnv
from launcher.evaluation.evaluate import (
    EvalLoop,
    Evaluation,
    EvaluationStopped,
    evaluate,
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
    return evaluate(EvalLoop(recipe_for(data), linear_model(), contextlib.nullcontext, env), data, batch_size)


def reference(num_samples):
    """(mean loss, labels, predictions) of the whole set in one forward pass."""
    data = points(num_samples)
    logits = linear_model()(data.columns["x"] * 2)
    loss = nn.functional.cross_entropy(logits.double(), data.columns["label"])
    return loss.item(), data.columns["label"].numpy(), logits.argmax(dim=1).numpy()


@pytest.mark.sampled(every=6, first=2)  # two samples on three ranks
@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("num_samples", [2, 23])  # 2 samples leave the third rank without any
def test_every_number_of_ranks_finds_the_same(world_size, num_samples):
    results = run_ranks(world_size, evaluate_points, num_samples)
    loss, labels, predictions = reference(num_samples)
    for result in results:
        assert result.loss == pytest.approx(loss, rel=1e-6)
        assert result.samples == num_samples
        assert result.metrics["accuracy"] == (labels == predictions).mean()
        assert result.loss == results[0].loss
        assert result.metrics == results[0].metrics
    counts = np.zeros((3, 3), np.int64)
    np.add.at(counts, (labels, predictions), 1)
    assert np.array_equal(results[0].confusion.counts, counts)


def claim_a_larger_job(env):
    """Two ranks of three: the third one's samples are missing."""
    env = dataclasses.replace(env, world_size=3)
    return evaluate_points(env, 23)


def repeat_the_first_rank(env):
    env = dataclasses.replace(env, rank=0)
    return evaluate_points(env, 23)


@pytest.mark.sampled(every=2, first=1)
@pytest.mark.parametrize(
    ("work", "message"),
    [
        (claim_a_larger_job, "15 of 23 samples were evaluated on 3 ranks"),
        (repeat_the_first_rank, "22 of 23 samples were evaluated on 2 ranks"),
    ],
)
def test_missed_and_repeated_samples_are_noticed(work, message):
    with pytest.raises(RankFailure, match=message):
        run_ranks(2, work)


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
    evaluate(EvalLoop(recipe_for(data, loss=loss), model, contextlib.nullcontext, ALONE), data, 5)
    assert modes == [[False] * 3] * 3
    assert [module.training for module in model] == [True, True, False]
    assert model.training
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_the_mode_is_restored_after_an_error():
    def fail(network, batch):
        raise ValueError("no")

    model, data = linear_model(), points(4)
    with pytest.raises(ValueError, match="no"):
        evaluate(EvalLoop(recipe_for(data, loss=fail), model, contextlib.nullcontext, ALONE), data, 5)
    assert model.training


def interrupt_the_last_rank(env):
    asked = [0]

    def interrupted():
        asked[0] += 1
        return env.rank == env.world_size - 1 and asked[0] == 2

    data = points(23)
    with pytest.raises(EvaluationStopped):
        evaluate(
            EvalLoop(recipe_for(data), linear_model(), contextlib.nullcontext, env),
            data,
            5,
            interrupted=interrupted,
        )
    return asked[0]


def test_an_interruption_of_one_rank_is_one_of_all_ranks():
    assert interrupt_the_last_rank(ALONE) == 2
    assert run_ranks(2, interrupt_the_last_rank) == [3, 2]  # the other rank measures all of its 12 samples


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
    evaluate(EvalLoop(recipe_for(data, loss=loss), linear_model(), context, ALONE), data, 5)
    assert entered == [3]


def test_a_recipe_without_classes_measures_the_loss_per_token():
    data = TensorData({"x": torch.ones(7, 4)})
    recipe = recipe_for(
        data, classes=None, loss=lambda model, batch: Loss(batch["x"].sum(), 10 * len(batch["x"]))
    )
    result = evaluate(EvalLoop(recipe, linear_model(), contextlib.nullcontext, ALONE), data, 3)
    assert result == Evaluation(0.8, 7, {}, {})


def weighted_loss(network: nn.Module, batch: dict[str, torch.Tensor]) -> Loss:
    away = network(batch["x"]).square().sum(1)
    return Loss((batch["weight"] * away).sum(), batch["weight"].sum())


@pytest.mark.parametrize("largest", [1.0, 1e-3])
def test_a_loss_may_count_weights(largest):
    """Also where the weights of a whole set add up to less than one sample."""
    data = points(23)
    data = TensorData(data.columns | {"weight": torch.linspace(0, largest, 23)})
    recipe = recipe_for(data, loss=weighted_loss, classes=None)
    found = evaluate(EvalLoop(recipe, linear_model(), contextlib.nullcontext, ALONE), data, 5)
    away = linear_model()(data.columns["x"] * 2).detach().square().sum(1)
    expected = (data.columns["weight"] * away).sum() / data.columns["weight"].sum()
    assert found.loss == pytest.approx(float(expected), rel=1e-6)
