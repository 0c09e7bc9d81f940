"""The decoder: causal, as large as it says, and trained in fp16 on two ranks."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from launcher.errors import ConfigError
from launcher.recipe import load_recipe, model_builder
from launcher.telemetry.event_log import read_events
from tests.configs import composed
from tests.forked import launch_forked

TEXT = "the quick brown fox jumps over the lazy dog\n" * 200
SMALL = ("model.layers=1", "model.heads=2", "model.width=32", "data.block_size=16", "data.cache=none")


def config_of(path: Path, *words: str):
    return composed("recipe=gpt", f"data.path={path}", *SMALL, *words)


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return path


def test_a_token_knows_nothing_of_those_after_it(file):
    torch.manual_seed(0)
    network = load_recipe(config_of(file)).build_model().eval()
    tokens = torch.randint(0, 20, (2, 16))
    other = tokens.clone()
    other[:, 9] = (other[:, 9] + 1) % 20
    before, after = network(tokens), network(other)
    assert torch.equal(before[:, :9], after[:, :9])
    assert not torch.isclose(before[:, 9:], after[:, 9:]).all(dim=2).any()


def test_it_has_the_parameters_of_the_paper():
    config = composed("recipe=gpt", "model.layers=12", "model.heads=12", "model.width=768")
    with torch.device("meta"):
        network = model_builder(config, vocab_size=50257, context=1024)()
    assert sum(parameter.numel() for parameter in network.parameters()) == 124_439_808  # of GPT-2


def test_the_loss_counts_tokens(file):
    recipe = load_recipe(config_of(file))
    network = recipe.build_model()
    batch = {"tokens": recipe.train.columns["tokens"][:3]}
    loss = recipe.loss(network, batch)
    assert loss.count == 3 * 16
    logits = network(batch["tokens"][:, :-1].long())
    each = [
        F.cross_entropy(logits[row, at], batch["tokens"][row, at + 1].long())
        for row in range(3)
        for at in range(16)
    ]
    torch.testing.assert_close(loss.sum, torch.stack(each).sum())


def test_a_width_that_does_not_divide_by_the_heads_is_refused():
    with pytest.raises(ConfigError, match=r"model\.width=30 does not divide by model\.heads=4"):
        model_builder(composed("recipe=gpt", "model.width=30"), vocab_size=5, context=8)()


def test_a_longer_text_than_the_context_is_written(file):
    recipe = load_recipe(config_of(file, "data.sample_tokens=40"))
    network = recipe.build_model().eval()
    torch.manual_seed(3)
    first = recipe.on_eval_end(network, None)["sample"]
    torch.manual_seed(3)
    assert recipe.on_eval_end(network, None)["sample"] == first
    assert len(first) == 41
    assert set(first) <= set(TEXT)
    config = config_of(file)
    silent = replace(config.data, options={**config.data.options, "sample_tokens": 0})
    assert load_recipe(replace(config, data=silent)).on_eval_end is None


def test_it_learns_in_fp16_on_two_ranks_and_shows_what_it_writes(file, tmp_path):
    words = ["recipe=gpt", f"data.path={file}", *SMALL, "data.sample_tokens=20", "optim.lr=0.01"]
    words += ["train.max_steps=8", "train.epochs=9", "train.eval_every_steps=4", "tracker=none"]
    done = launch_forked(
        tmp_path, [*words, "run.dir=run", "launch.nproc=2", "telemetry.gradient_histogram_every_steps=5"]
    )
    assert done.returncode == 0, done.stderr
    events = list(read_events(tmp_path / "run" / "metrics.jsonl"))
    evaluations = [event for event in events if event["event"] == "eval"]
    assert [event["step"] for event in evaluations] == [4, 8]
    assert evaluations[1]["perplexity"] < 0.9 * evaluations[0]["perplexity"]
    samples = [event["texts"]["sample"] for event in events if event["event"] == "after_evaluation"]
    assert [len(sample) for sample in samples] == [21, 21]
