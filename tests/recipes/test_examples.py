"""The recipes to copy from: each trains on two ranks with the command in its docstring."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from launcher.config.groups import recipes_dir
from launcher.recipe import registry_of
from launcher.run_dir.records import CHECKPOINTS
from launcher.telemetry.event_log import read_events
from tests.forked import launch_forked

EXAMPLES = recipes_dir() / "examples"
RECIPES = (
    "dataset",
    "segmentation",
    "learned_weights",
    "frozen_trunk",
    "huggingface",
    "lion",
    "photographs",
    "recurrent",
    "unpadded",
)
SHORT = ["launch.nproc=2", "tracker=none", "train.log_every_steps=1000", "run.dir=run"]


def command_of(name: str) -> list[str]:
    """The words after `scripts/run` of the last command in the docstring, with absolute paths."""
    doc = (EXAMPLES / f"{name}.py").read_text().split('"""')[1].replace("\\\n", " ")
    words = shlex.split(re.findall(r"scripts/run (recipe=.*)", doc)[-1])
    return [word.replace("recipes/examples", str(EXAMPLES)) for word in words]


def train(name: str, directory: Path, *words: str) -> dict:
    """The last evaluation of the example."""
    done = launch_forked(directory, [*command_of(name), *SHORT, *words])
    assert done.returncode == 0, done.stderr
    assert "Warning" not in done.stderr
    (*_, last) = (e for e in read_events(directory / "run" / "metrics.jsonl") if e["event"] == "eval")
    return last


def test_they_are_no_recipes_of_the_program() -> None:
    assert registry_of(None).recipes.keys().isdisjoint(RECIPES)
    assert sorted(path.stem for path in EXAMPLES.glob("*.py")) == sorted(
        [*RECIPES, "flat_loop", "gan", "grpo"]
    )


def test_a_plain_dataset_with_a_transform_learns_and_resumes_with_the_same_samples(tmp_path: Path) -> None:
    (tmp_path / "whole").mkdir()
    words = ("schedule=constant", "data.num_workers=1")
    whole = weights_of("dataset", tmp_path / "whole", *words)
    weights_of("dataset", tmp_path, *words, "train.max_steps=20")
    assert train("dataset", tmp_path, *words)["accuracy"] > 0.9
    assert json.loads((tmp_path / "run" / "result.json").read_text())["weights_sha256"] == whole


@pytest.mark.slow
def test_a_dataset_of_photographs_is_read_with_pil(tmp_path: Path) -> None:
    for name, colour in (("blue", (30, 60, 200)), ("red", (200, 60, 30))):
        (tmp_path / name).mkdir()
        for i in range(40):
            Image.new("RGB", (24 + i, 40), colour).save(tmp_path / name / f"{i}.jpg")
    words = (f"data.path={tmp_path}", "recipe.side=16", "train.epochs=2", "data.batch_size=8")
    last = train("photographs", tmp_path, *words)
    assert last["samples"] == 16
    assert last["accuracy"] == 1


@pytest.mark.slow
def test_segmentation_measures_its_own_metric(tmp_path: Path) -> None:
    last = train("segmentation", tmp_path, "train.epochs=1")
    assert last["mean_iou"] > 0.5
    assert last["samples"] == 160


@pytest.mark.slow
def test_the_weights_of_several_losses_are_learned(tmp_path: Path) -> None:
    last = train("learned_weights", tmp_path, "train.epochs=3")
    assert last["accuracy"] > 0.8
    assert last["ink_error"] < 0.5
    (newest,) = list((tmp_path / "run" / CHECKPOINTS).glob("*/weights*.safetensors"))[-1:]
    learned = load_file(newest)["log_variances"]
    assert (learned.abs() > 1e-2).all(), "they start at 0"


@pytest.mark.slow
def test_a_frozen_trunk_stays_as_it_was_loaded(tmp_path: Path) -> None:
    torch.manual_seed(0)
    trunk = registry_of(None).models["cnn"](10, 1, 8, 8).state_dict()
    save_file(trunk, tmp_path / "trunk.safetensors")
    train("frozen_trunk", tmp_path, "train.max_steps=5")
    (newest,) = list((tmp_path / "run" / CHECKPOINTS).glob("*/weights*.safetensors"))[-1:]
    found = load_file(newest)
    for name in ("conv1.weight", "conv1.bias", "conv2.weight", "conv2.bias"):
        assert torch.equal(found[name].half(), trunk[name].half())
    assert found["fc.weight"].shape == (2, 512)


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize(
    ("weights", "text"),
    [
        ("null", "give the others with model.init_from=FILE"),
        ("nowhere.safetensors", "cannot be read: No such file or directory"),
    ],
)
def test_a_trunk_without_weights_is_refused(weights, text, tmp_path: Path) -> None:
    words = [word for word in command_of("frozen_trunk") if not word.startswith("model.init_from")]
    done = launch_forked(tmp_path, [*words, *SHORT, f"model.init_from={weights}"])
    assert done.returncode == 2
    assert text in done.stderr
    assert "export RUN FILE" in done.stderr


def weights_of(name: str, directory: Path, *words: str) -> str:
    train(name, directory, *words)
    return json.loads((directory / "run" / "result.json").read_text())["weights_sha256"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["lion", "unpadded"])
def test_what_is_kept_between_steps_survives_a_resume(name: str, tmp_path: Path) -> None:
    (tmp_path / "whole").mkdir()
    whole = weights_of(name, tmp_path / "whole", "schedule=constant", "train.max_steps=20")
    half = weights_of(name, tmp_path, "schedule=constant", "train.max_steps=18")
    assert weights_of(name, tmp_path, "schedule=constant", "train.max_steps=20") == whole != half


@pytest.mark.slow
def test_a_recurrent_network_learns_from_segments_and_weights(tmp_path: Path) -> None:
    first, last = (train("recurrent", tmp_path, f"train.epochs={n}", "schedule=constant") for n in (1, 4))
    assert last["val_loss"] < 0.5 * first["val_loss"]


@pytest.mark.slow
@pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("transformers", "datasets")),
    reason="needs transformers and datasets",
)
def test_a_model_and_a_data_set_of_hugging_face_train(tmp_path: Path) -> None:
    last = train("huggingface", tmp_path, "train.max_steps=8", "data.num_workers=0")
    assert last["samples"] == 240


@pytest.mark.slow
def test_the_two_networks_of_a_gan_stay_equal_on_all_ranks(tmp_path: Path) -> None:
    environ = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(EXAMPLES.parents[1])}
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [sys.executable, *torchrun, str(EXAMPLES / "gan.py"), "--steps", "200"],
        cwd=tmp_path,
        env=environ,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    radius = float(re.search(r"made points lie at ([\d.]+) from the centre", done.stdout)[1])
    assert 0.5 < radius < 1.5
