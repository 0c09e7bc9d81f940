"""What a recipe shows after its evaluations: on rank 0 alone, and without a trace in the run."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from PIL import Image

from launcher.errors import ConfigError
from launcher.telemetry.tracker import Picture, Text
from launcher.telemetry.tracker.rows import media_of, scalars_of
from launcher.trainer.after_evaluation import sorted_by_kind
from tests.faults.launching import Ended, run

pytestmark = pytest.mark.timeout(90)

RECIPE = """
import random, time
import torch
from torch import nn
from launcher.recipe import Recipe, TensorData, cross_entropy, recipe

def after_evaluation(model, index):
    assert not model.training and not torch.is_grad_enabled()
    logits = model(torch.ones(2, 4))
    random.random(), torch.rand(3)
    from PIL import Image as Pictures
    class Figure:  # saves itself as one of matplotlib does
        def savefig(self, file, format):
            Pictures.new("L", (9, 9)).save(file, format)
    pass  # SHOWN
    return {
        "a sample": f"<{index.global_step}>",
        "width": logits.shape[1],
        "drawn": torch.rand(()),
        "a/figure": Figure(),
        "pixels": torch.zeros(5, 7, 3, dtype=torch.uint8),
        "picture": Pictures.new("L", (3, 2)),
    }

@recipe("shown")
def shown(config):
    x = torch.randn(48, 4)
    data = TensorData({"image": x, "label": x[:, :3].argmax(1)})
    build = lambda: nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 3))
    return Recipe(build, data, data, cross_entropy, classes=("a", "b", "c"), on_eval_end=AFTER)
"""
WORDS = ("recipe.uses=shown", "train.max_steps=6")


def run_recipe(directory: Path, *words: str, after="after_evaluation", shown="", ranks=2) -> Ended:
    directory.mkdir(exist_ok=True)
    file = directory / "shown.py"
    file.write_text(RECIPE.replace("AFTER", after).replace("pass  # SHOWN", shown or "pass"))
    return run(directory / "run", f"recipes.path={file}", *WORDS, *words, ranks=ranks)


@pytest.fixture(scope="module")
def ended(tmp_path_factory) -> Ended:
    found = run_recipe(tmp_path_factory.mktemp("shown"), "tracker=wandb", "tracker.mode=offline")
    assert found.codes == [0, 0], found
    return found


@pytest.mark.slow
def test_texts_numbers_and_pictures_are_recorded(ended: Ended) -> None:
    first, last = ended.events("after_evaluation")
    assert last["texts"] == {"a sample": "<6>"}
    assert last["numbers"]["width"] == 3
    assert list(last["pictures"]) == ["a/figure", "pixels", "picture"]
    sizes = []
    for path in last["pictures"].values():
        with Image.open(path) as picture:
            sizes.append(picture.size)
    assert sizes == [(9, 9), (7, 5), (3, 2)]
    assert Path(last["pictures"]["a/figure"]) == ended.directory / "pictures" / "a_figure-00000006.png"
    assert first["numbers"]["drawn"] != last["numbers"]["drawn"]
    assert ended.outputs[0].count("a sample: <6>") == 1
    assert "a sample" not in ended.outputs[1]


@pytest.mark.slow
def test_the_tracker_shows_them(ended: Ended) -> None:
    event = ended.events("after_evaluation")[-1]
    assert media_of(event)["after_evaluation/a sample"] == Text("<6>")
    assert scalars_of(event)["after_evaluation/width"] == 3
    assert isinstance(media_of(event)["after_evaluation/pixels"], Picture)
    media = list((ended.directory / "wandb").glob("offline-run-*/files/media/*/after_evaluation/**/*.*"))
    assert sorted(path.suffix for path in media) == [".html"] * 2 + [".png"] * 6
    texts = [path.read_text() for path in media if path.suffix == ".html"]
    assert any("<pre>&lt;6&gt;</pre>" in text for text in texts)


@pytest.mark.slow
def test_the_run_is_the_same_without_it(ended: Ended, tmp_path: Path) -> None:
    """Bit for bit: dropout draws what it would have drawn."""
    without = run_recipe(tmp_path, after="None")
    assert without.digest == ended.digest
    assert not without.events("after_evaluation")
    assert not (without.directory / "pictures").exists()


@pytest.mark.slow
def test_a_resumed_run_records_it_once(tmp_path: Path) -> None:
    assert run_recipe(tmp_path, ranks=1).codes == [0]
    again = run_recipe(tmp_path, "train.max_steps=8", ranks=1)
    assert again.codes == [0], again
    steps = [event["step"] for event in again.events("after_evaluation")]
    assert steps == sorted(set(steps))
    assert steps[-1] == 8


@pytest.mark.slow
def test_statistics_that_it_changes_are_restored(ended: Ended, tmp_path: Path) -> None:
    changed = run_recipe(tmp_path, shown="model.train(); model(torch.ones(2, 4))")
    assert changed.digest == ended.digest


@pytest.mark.slow
def test_an_exception_is_one_message(tmp_path: Path) -> None:
    text = "the recipe's on_eval_end failed at "
    ended = run_recipe(tmp_path, shown="1 / 0", ranks=2)
    assert ended.codes == [1, 1], ended
    assert sum(output.count(text) for output in ended.outputs) == 1, ended
    traces = sum(output.count("Traceback (most recent") for output in ended.outputs)
    assert traces == 1, "of rank 0, which alone calls the function"
    assert text in json.loads((ended.directory / "result.json").read_text())["error"]


@pytest.mark.parametrize(
    ("line", "when"),
    [
        ("model[0].weight.mul_(2)", "tried"),
        pytest.param("if index.global_step == 6: model[0].weight.mul_(2)", "called", marks=pytest.mark.slow),
    ],
)
def test_changed_weights_are_an_error(tmp_path: Path, line, when) -> None:
    ended = run_recipe(tmp_path, shown=line, ranks=1)
    assert ended.codes == [2], ended
    assert "on_eval_end has changed weights of the model" in ended.result["error"]
    assert bool(ended.events("step")) == (when == "called")


def test_before_the_first_step_it_gets_the_index_of_the_first_evaluation(tmp_path: Path) -> None:
    ended = run_recipe(tmp_path, shown='raise ValueError(f"at {index.global_step}")', ranks=1)
    assert "ValueError: at 3" in ended.result["error"], ended


@pytest.mark.parametrize(
    ("returned", "text"),
    [
        ("text", "returned str. It has to return a mapping from name to text, number or picture"),
        ({"a": torch.zeros(3, 4)}, "gave ndarray as 'a'. It may give texts, numbers and"),
        ({"a": torch.zeros(3, dtype=torch.uint8)}, "gave ndarray as 'a'"),
        ({"a": None}, "gave NoneType as 'a'"),
    ],
)
def test_what_cannot_be_shown_is_refused(returned, text) -> None:
    with pytest.raises(ConfigError, match=re.escape(text)):
        sorted_by_kind(returned)
