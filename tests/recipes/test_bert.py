"""Encoders of sentences: from scratch, from a folder, and what is said where neither can be had."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from launcher.data import pretrained_encoder
from launcher.engine import AdamW, Policy, Scaling, Stepper
from launcher.errors import ConfigError
from launcher.recipe import load_recipe, model_builder
from launcher.telemetry.event_log import read_events
from tests.configs import composed
from tests.data.text.test_sentences import written
from tests.forked import launch_forked

pytest.importorskip("tokenizers")
transformers = pytest.importorskip("transformers")

SMALL = ("data.vocab_size=120", "model.width=32", "data.max_seq_len=32", "data.batch_size=8")


def config_of(file: Path, **options):
    config = composed("recipe=bert", f"data.path={file}", "data.cache=none", *SMALL)
    return replace(config, model=replace(config.model, options={**config.model.options, **options}))


def shorter(config):
    """For a model of 24 positions."""
    return replace(config, data=replace(config.data, options={**config.data.options, "max_seq_len": 24}))


@pytest.fixture(scope="module")
def table(tmp_path_factory) -> Path:
    return written(tmp_path_factory.mktemp("table"), "train.tsv")


@pytest.fixture(scope="module")
def saved(table, tmp_path_factory) -> Path:
    """A folder as `save_pretrained` writes it: a model of 24 positions, for three classes."""
    folder = tmp_path_factory.mktemp("saved")
    recipe = load_recipe(config_of(table))
    network = model_builder(
        composed("recipe=bert", *SMALL),
        num_classes=3,
        vocab_size=recipe.train.tokenizer.vocab_size,
        max_seq_len=24,
        pad=0,
    )()
    network.save_pretrained(folder)
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=recipe.train.tokenizer.library_object(), pad_token="[PAD]", model_max_length=24
    )
    tokenizer.save_pretrained(folder)
    return folder


def test_the_model_from_scratch_fits_the_data(table):
    recipe = load_recipe(config_of(table))
    network = recipe.build_model()
    sizes = (network.config.vocab_size, network.config.hidden_size, network.config.num_labels)
    assert sizes == (recipe.train.tokenizer.vocab_size, 32, 2)
    batch = recipe.collate([recipe.train[row] for row in range(3)])
    loss = recipe.loss(network, batch)
    assert loss.count == 3
    assert loss.outputs.shape == (3, 2)
    assert recipe.lengths.tolist() == recipe.train.lengths.tolist()


def test_padding_does_not_change_what_a_row_means(table):
    recipe = load_recipe(config_of(table))
    network = recipe.build_model().eval()
    short, long = recipe.train[0], recipe.train[1]
    longer = (long[0].repeat(3)[:32], long[1].repeat(3)[:32], long[2])
    alone = recipe.loss(network, recipe.collate([short])).outputs
    beside = recipe.loss(network, recipe.collate([short, longer])).outputs
    torch.testing.assert_close(alone[0], beside[0])


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("policy", ["fp16", "amp_fp16", "bf16", "fp32"])
def test_every_precision_keeps_padded_rows_finite(table, policy):
    recipe = load_recipe(config_of(table, dropout=0.0))
    torch.manual_seed(0)
    stepper = Stepper(
        recipe.build_model(), AdamW(1e-2), Policy.named(policy), scaling=Scaling(init=2**12), emulate=True
    )
    batch = recipe.collate([recipe.train[row] for row in range(8)])
    losses = []
    for _ in range(4):
        with stepper.forward():
            loss = recipe.loss(stepper.model, batch)
        stepper.backward(loss.sum, loss.count)
        assert not stepper.step().read().skipped
        losses.append(loss.sum.item())
    assert losses[-1] < losses[0]


def test_weights_and_tokenizer_of_a_folder_are_used(table, saved):
    recipe = load_recipe(shorter(config_of(table, path=str(saved))))
    network = recipe.build_model()
    before = transformers.AutoModelForSequenceClassification.from_pretrained(saved)
    assert torch.equal(network.bert.pooler.dense.weight, before.bert.pooler.dense.weight)
    assert before.num_labels == 3
    assert network.classifier.weight.shape == (2, 32), "a new one for the classes of the data"
    assert network.dtype == torch.float32
    own = load_recipe(config_of(table))
    assert recipe.train[5][0].tolist() == own.train[5][0].tolist()


def test_a_model_that_takes_no_types_gets_none(table, saved, tmp_path):
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(saved)
    config = transformers.DistilBertConfig(
        vocab_size=len(tokenizer), dim=16, hidden_dim=32, n_layers=1, n_heads=2, max_position_embeddings=24
    )
    transformers.DistilBertForSequenceClassification(config).save_pretrained(tmp_path / "saved")
    tokenizer.model_input_names = ["input_ids", "attention_mask"]
    tokenizer.save_pretrained(tmp_path / "saved")
    recipe = load_recipe(shorter(config_of(table, path=str(tmp_path / "saved"))))
    batch = recipe.collate([recipe.train[0]])
    assert set(batch) == {"input_ids", "attention_mask", "label"}
    assert recipe.loss(recipe.build_model(), batch).count == 1


def test_longer_sequences_than_the_model_can_read_are_refused(table, saved):
    with pytest.raises(
        ConfigError, match=r"data\.max_seq_len=32 is more than the 24 tokens that .* can read"
    ):
        load_recipe(config_of(table, path=str(saved)))


def copied(saved: Path, tmp_path: Path, leave_out: str) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "copy", ignore=shutil.ignore_patterns(leave_out)))


def test_pickles_are_refused(table, saved, tmp_path):
    folder = copied(saved, tmp_path, "*.safetensors")
    torch.save({}, folder / "pytorch_model.bin")
    recipe = load_recipe(shorter(config_of(table, path=str(folder))))
    with pytest.raises(ConfigError, match=r"its model cannot be loaded: .*safetensors"):
        recipe.build_model()


def test_a_folder_without_a_tokenizer(table, saved, tmp_path):
    with pytest.raises(ConfigError, match=r"has no tokenizer \(tokenizer\.json"):
        pretrained_encoder(str(copied(saved, tmp_path, "tokenizer*")))


@pytest.mark.parametrize("path", ["/nowhere/at/all", "a/b/c"])
def test_what_is_neither_folder_nor_name(table, path):
    with pytest.raises(ConfigError, match=rf"model\.path={path}: its \w+ cannot be loaded"):
        load_recipe(config_of(table, path=path))


def test_without_a_network_the_error_names_the_folder(table, monkeypatch):
    import huggingface_hub

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigError, match=r"model\.path=nobody/nothing.*does not answer.*model\.path=DIR"):
        load_recipe(config_of(table, path="nobody/nothing"))


def test_it_trains_in_fp16_on_two_ranks(table, tmp_path):
    words = [
        "recipe=bert",
        f"data.path={table}",
        *SMALL,
        "data.cache=cache",
        "optim.lr=0.01",
        "train.max_steps=6",
    ]
    (tmp_path / "cache").mkdir()
    done = launch_forked(
        tmp_path, [*words, "train.eval_every_steps=3", "tracker=none", "run.dir=run", "launch.nproc=2"]
    )
    assert done.returncode == 0, done.stderr
    events = list(read_events(tmp_path / "run" / "metrics.jsonl"))
    assert {event["step"] for event in events if event["event"] == "eval"} >= {3, 6}
    assert {event["skipped"] for event in events if event["event"] == "step"} == {0}
