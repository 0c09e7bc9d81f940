"""A hook that raises is found before the first step, without a trace in the run."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.launching import Ended, run

pytestmark = pytest.mark.timeout(90)

RECIPE = """
import torch
from torch import nn
from launcher.recipe import Recipe, TensorData, cross_entropy, recipe

def loss(network, batch):
    return cross_entropy(network, batch, inputs="x")

def after(model, index):
    pass  # HOOK
    return {}

@recipe("small")
def small(config):
    x = torch.randn(100, 4)
    columns = {"x": x, "label": (x[:, 0] > 0).long()}
    train, validation = (TensorData({key: each[part] for key, each in columns.items()}) for part in PARTS)
    return Recipe(lambda: NET, train, validation, loss, on_eval_end=after)
"""
PLAIN, NORM = "nn.Linear(4, 2)", "nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))"
# Of 100 samples: those to train on, with 16 per step, and those to evaluate on.
EVEN, ONE_LEFT = (f"(slice({count}), slice({count}, {count + 16}))" for count in (64, 65))


def started(directory: Path, parts: str, net: str = PLAIN, hook: str = "pass") -> Ended:
    directory.mkdir(exist_ok=True)
    text = RECIPE.replace("PARTS", parts).replace("NET", net)
    (directory / "small.py").write_text(text.replace("pass  # HOOK", hook))
    words = f"recipes.path={directory / 'small.py'}", "recipe.uses=small"
    return run(directory / "run", *words, ranks=2)


def test_a_hook_that_raises_is_found_before_the_first_step(tmp_path) -> None:
    ended = started(tmp_path, EVEN, hook="raise ValueError('no picture today')")
    assert 1 in ended.codes, ended
    assert not ended.events("step"), ended
    for each in ("no picture today", "on_eval_end"):
        assert any(each in output for output in ended.outputs), (each, ended)


def test_a_last_batch_of_one_sample_under_batch_norm_ends_with_what_to_change(tmp_path) -> None:
    """At the end of the first epoch, on all ranks: the other one does not wait for that without samples."""
    ended = started(tmp_path, ONE_LEFT, net=NORM)
    assert 7 in ended.codes, ended
    assert ended.events("step"), ended
    for each in ("Expected more than 1 value per channel", "set data.drop_last=true"):
        assert any(each in output for output in ended.outputs), (each, ended)


def leave_out_trial() -> None:
    from launcher.trainer import after_evaluation

    after_evaluation.sanity_check = lambda job, step: None


def test_the_trial_leaves_no_trace(tmp_path) -> None:
    """Of BatchNorm, dropout, a counter in a buffer, and noise of all generators."""
    words = ("train.epochs=2", "precision.loss_scale.init_scale=1048576")
    tried = run(tmp_path / "tried", *words, ranks=2)
    plain = run(tmp_path / "plain", *words, ranks=2, prepare=leave_out_trial)
    assert tried.digest == plain.digest
    losses = [[event["loss"] for event in each.events("step")] for each in (tried, plain)]
    assert losses[0] == losses[1]
