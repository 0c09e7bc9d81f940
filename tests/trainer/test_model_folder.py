"""The folder that one can predict with: what a run writes into it, and what reads it."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from launcher.data.text.tokenizer import fitted
from launcher.evaluation.prediction import facts_of
from launcher.recipe import Loss, Recipe, TensorData, cross_entropy
from launcher.recipe.registry import load_recipe
from launcher.telemetry import Telemetry
from launcher.trainer.errors.recipe_errors import wrap_recipe
from launcher.trainer.results import write_model_folder
from tests.configs import composed
from tests.forked import launch_forked
from tests.trainer.callbacks.test_step_logger import Recorder
from tests.trainer.reports import LIMITS
from tests.trainer.runs import context_alone

SENTENCES = ["a man sleeps", "a dog eats the cake", "the man eats"]


def warnings_of(run_dir: Path, recipe: Recipe, network: nn.Module) -> list[str]:
    """The warnings with which the folder is written."""
    recorder = Recorder()
    context = context_alone(Telemetry([recorder]), LIMITS, 1)
    context.config = composed(f"run.dir={run_dir}")
    context.recipe, context.stepper = recipe, cast(Any, SimpleNamespace(model=network))
    write_model_folder(context)
    return [event["text"] for event in recorder.of("warning")]


def test_images_have_their_normalisation_also_behind_the_guards() -> None:
    recipe = load_recipe(composed("recipe=cnn", "data=digits"))
    facts = facts_of(wrap_recipe(recipe, "logs"))
    image = torch.full((1, 1, 8, 8), 51, dtype=torch.uint8)
    mean, std = (facts["normalisation"][name][0] for name in ("mean", "std"))
    found = recipe.eval_transform({"image": image})["image"]
    torch.testing.assert_close(found, torch.full((1, 1, 8, 8), (0.2 - mean) / std))
    assert facts["classes"] == [str(digit) for digit in range(10)]


def test_rows_of_numbers_in_a_column_called_image_are_no_images() -> None:
    data = TensorData({"image": torch.zeros(4, 2), "label": torch.zeros(4, dtype=torch.int64)})
    recipe = Recipe(lambda: nn.Linear(2, 2), data, data, cross_entropy)
    assert facts_of(recipe)["input"] == {"kind": "row"}


def test_a_recipe_without_classes_and_images_has_no_facts(tmp_path: Path) -> None:
    recipe = Recipe(lambda: nn.Linear(1, 1), {}, {}, lambda network, batch: Loss(torch.zeros(()), 1))
    assert warnings_of(tmp_path, recipe, nn.Linear(1, 1)) == []
    assert [file.name for file in (tmp_path / "model").iterdir()] == ["prediction.json"]
    assert json.loads((tmp_path / "model" / "prediction.json").read_text()) == {}


def test_a_config_that_refuses_to_be_saved_does_not_end_the_run(tmp_path: Path) -> None:
    class Refusing:
        def save_pretrained(self, folder: Path) -> None:
            raise ValueError("temperature must be above 0")

    network = nn.Linear(1, 1)
    network.config = Refusing()
    recipe = Recipe(lambda: network, {}, {}, lambda network, batch: None, classes=("no", "yes"))
    warnings = warnings_of(tmp_path, recipe, network)
    assert json.loads((tmp_path / "model" / "prediction.json").read_text()) == {"classes": ["no", "yes"]}
    assert warnings == [
        f"{tmp_path / 'model'} is incomplete, and so is what export makes of it: ValueError: temperature "
        "must be above 0"
    ]


def test_transformers_reads_the_folder(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    small = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    tokenizer = fitted(SENTENCES, 100, True)
    config = transformers.BertConfig(vocab_size=tokenizer.vocab_size, num_labels=2, **small)
    network = transformers.BertForSequenceClassification(config).eval()
    data = SimpleNamespace(tokenizer=tokenizer)
    recipe = Recipe(lambda: network, data, data, lambda network, batch: None, classes=("no", "yes"))
    assert warnings_of(tmp_path, recipe, network) == []
    save_file(network.state_dict(), tmp_path / "model" / "model.safetensors", {"format": "pt"})

    read = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "model").eval()
    inputs = transformers.AutoTokenizer.from_pretrained(tmp_path / "model")(
        SENTENCES, padding=True, return_tensors="pt"
    )
    assert read.config.id2label == {0: "no", 1: "yes"}
    assert config.id2label != read.config.id2label, "the model in training is left as it is"
    for ids, row in zip(inputs["input_ids"].tolist(), tokenizer.encode(SENTENCES, 50), strict=True):
        assert ids[: len(row[0])] == row[0]
        assert set(ids[len(row[0]) :]) <= {tokenizer.pad}
    assert torch.equal(read(**inputs).logits, network(**inputs).logits)


def test_export_makes_a_folder_of_a_run(tmp_path: Path) -> None:
    words = ["recipe=cnn", "data=digits", "train.max_steps=1", "launch.nproc=1", "tracker=none"]
    done = launch_forked(tmp_path, [*words, "run.dir=run"])
    assert done.returncode == 0, done.stderr
    refused = launch_forked(tmp_path, ["export", "nowhere", "made/"])
    assert refused.returncode == 2, refused.stderr
    assert not (tmp_path / "made").exists()
    refused = launch_forked(tmp_path, ["export", "run", "weights.pt"])
    assert refused.returncode == 2
    assert "in the format safetensors: name it weights.safetensors." in refused.stderr
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "prediction.json").write_text("{}")
    refused = launch_forked(tmp_path, ["export", "run", "mine"])
    assert refused.returncode == 2
    assert (tmp_path / "mine" / "prediction.json").read_text() == "{}", "a file that no export wrote"
    assert {file.name for file in (tmp_path / "run" / "checkpoints").iterdir()} <= {"step-00000001"}
    for target in ("made/", "made"):  # the second time it is there
        done = launch_forked(tmp_path, ["export", "run", target])
        assert done.returncode == 0, done.stderr
        assert sorted(file.name for file in (tmp_path / "made").iterdir()) == [
            "model.safetensors",
            "prediction.json",
        ]
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    facts = json.loads((tmp_path / "made" / "prediction.json").read_text())
    assert {name: facts[name] for name in ("classes", "normalisation")} == {
        name: result[name] for name in ("classes", "normalisation")
    }
    assert facts["input"] == {"kind": "image", "size": [1, 8, 8]}
    assert facts["model"] == {
        "name": "cnn",
        "arguments": {"num_classes": 10, "in_channels": 1, "height": 8, "width": 8},
        "file": None,
    }
