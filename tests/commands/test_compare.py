"""`compare`: what it runs, in which order, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from launcher.commands.arguments import Arguments, parse
from launcher.commands.compare import as_sweep
from launcher.errors import ConfigError
from tests.faults.parent import Parent

BREAKING = """
import torch
from launcher.recipe import Loss, Recipe, TensorData, cross_entropy, recipe

@recipe("tiny")
def tiny(config):
    factor = float("nan") if config.precision.name == "fp16" else 1.0

    def loss(network, batch):
        found = cross_entropy(network, batch)
        return Loss(found.sum * factor, found.count, found.outputs)

    x = torch.randn(32, 4, generator=torch.Generator().manual_seed(0))
    data = TensorData({"image": x, "label": (x[:, 0] > 0).long()})
    return Recipe(lambda: torch.nn.Linear(4, 2), data, data, loss, classes=("a", "b"))
"""


def swept(*words: str) -> Arguments:
    return as_sweep(parse(["compare", *words]))


def test_the_precisions_take_turns_seed_by_seed() -> None:
    arguments = swept("precision=fp32,fp16", "recipe=cnn", "seed=0,1", "-cd", "mine")
    assert arguments.command == "train"
    assert arguments.positionals == ("recipe=cnn", "seed=0,1", "precision=fp32,fp16", "sweep.parallel=1")
    assert arguments.flags == {"--config-dir": "mine", "--multirun": None}


@pytest.mark.parametrize("given", ["", "precision=fp16", "precision=fp16,fp16"])
def test_one_precision_is_nothing_to_compare(given: str) -> None:
    with pytest.raises(ConfigError) as refused:
        swept("recipe=cnn", *([given] if given else []))
    assert "two precisions" in str(refused.value)
    assert refused.value.exit_code == 2


@pytest.mark.parametrize("word", ["launch.nproc=1,2", "optim.lr=0.1,0.2", "seed2=range(3)", "model=a,b"])
def test_nothing_else_may_vary(word: str) -> None:
    with pytest.raises(ConfigError) as refused:
        swept("recipe=cnn", "precision=fp32,fp16", word)
    text = str(refused.value)
    assert word.partition("=")[0] in text
    assert "only precision and seed" in text


def test_of_a_key_that_is_given_twice_the_last_word_counts() -> None:
    assert swept("precision=fp32,bf16", "seed=0,1", "precision=fp32,fp16", "seed=2").positionals == (
        "seed=2",
        "precision=fp32,fp16",
        "sweep.parallel=1",
    )


def test_lists_are_no_variation() -> None:
    words = ("precision.fp32_modules=[a,b]", "tracker.tags=[x]")
    assert swept("precision=fp32,fp16", *words).positionals[:2] == words


@pytest.mark.slow
def test_a_run_that_diverges_is_a_finding(tmp_path: Path) -> None:
    (tmp_path / "tiny.py").write_text(BREAKING)
    words = ("train.max_steps=12", "precision=fp32,fp16,bf16", "hydra.sweep.dir=sweep")
    with Parent(tmp_path, *words, nproc=1, command=["compare"]) as parent:
        assert parent.end() == 0, parent.stderr
        assert (
            "- fp16 with seed 0 has failed: the loss was not finite in 5 steps with none applied between them"
            in parent.stdout
        )
        assert "| runs done | 1 of 1 | 0 of 1 |  | 1 of 1 |  |" in parent.stdout
    states = {
        path.parent.name: json.loads(path.read_text())["state"]
        for path in tmp_path.glob("sweep/*/status.json")
    }
    assert states == {"0_precision=fp32": "done", "1_precision=fp16": "failed", "2_precision=bf16": "done"}
