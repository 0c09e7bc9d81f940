"""`predict` of real runs: the classes that their evaluations find, from a run and from an exported folder."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from launcher.data.images.folder import list_folder
from launcher.data.images.registry import load_images
from launcher.errors import DataError
from launcher.evaluation.prediction import Predictor
from tests.configs import composed
from tests.data.images.photographs import ANTS_BEES
from tests.forked import launch_forked

ONE = ["launch.nproc=1", "tracker=none", "run.dir=run"]


def launched(directory: Path, *words: str) -> str:
    done = launch_forked(directory, list(words))
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_digits_are_told_apart_by_a_run_and_by_its_export_alike(tmp_path: Path) -> None:
    launched(tmp_path, "recipe=cnn", "data=digits", "train.epochs=8", *ONE)
    columns = load_images(composed("recipe=cnn", "data=digits").data).validation.columns
    files, labels = [], columns["label"][:40].tolist()
    for number, pixels in enumerate(columns["image"][:40]):
        files.append(f"{number}.png")
        Image.fromarray(pixels[0].numpy()).save(tmp_path / files[-1])
    found = launched(tmp_path, "predict", "run", *files)
    classes = re.findall(r"\.png: (\d) \d+\.\d\d%, \d ", found)
    assert sum(int(each) == label for each, label in zip(classes, labels, strict=True)) >= 36
    launched(tmp_path, "export", "run", "made/")
    assert launched(tmp_path, "predict", "made", *files) == found


@pytest.mark.slow
@pytest.mark.skipif(not ANTS_BEES.is_dir(), reason=f"needs the photographs in {ANTS_BEES}")
def test_photographs_are_cut_as_in_the_evaluation(tmp_path: Path) -> None:
    """The validation photographs of a run have the accuracy that the run has measured."""
    words = ["recipe=cnn", "data=imagefolder", f"data.path={ANTS_BEES}", "data.image_size=32"]
    said = launched(tmp_path, *words, "train.epochs=2", "data.batch_size=32", *ONE)
    listing = list_folder(ANTS_BEES, composed(*words).data.val_fraction, None, None)
    held_out = range(listing.num_train, len(listing))
    files = [str(listing.source(number)[0]) for number in held_out]
    found = re.findall(r": (ants|bees) ", launched(tmp_path, "predict", "run", *files))
    right = [
        listing.classes.index(name) == listing.labels[n] for name, n in zip(found, held_out, strict=True)
    ]
    assert f"accuracy {100 * np.mean(right):.2f} %" in said


@pytest.mark.slow
def test_sentences_are_tokenised_as_in_the_evaluation(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    rows = [
        f"the {animal} is {word}\t{word}"
        for animal in ("dog", "cat", "cow", "hen")
        for word in ("big", "red")
    ]
    (tmp_path / "train.tsv").write_text("sentence1\tlabel\n" + "\n".join(rows * 20) + "\n")
    words = ["recipe=bert", "data.path=train.tsv", "model.layers=1", "model.width=32", "data.cache=none"]
    launched(
        tmp_path, *words, "data.sentence2=null", "data.label=label", "train.epochs=12", "optim.lr=3e-3", *ONE
    )
    (tmp_path / "new.txt").write_text("the dog is red\nthe cow is big\n")
    first, second = launched(tmp_path, "predict", "run", "new.txt").splitlines()
    assert first.startswith("new.txt:1: red ")
    assert second.startswith("new.txt:2: big ")


def predictor(folder: Path) -> Predictor:
    """Of rows of 8 numbers, by a recipe file of its own."""
    (folder / "rows.py").write_text(
        "from torch import nn\nfrom launcher.recipe import model\n"
        '@model("linear")\ndef linear(inputs): return nn.Linear(inputs, 2)\n'
    )
    built = {"name": "linear", "arguments": {"inputs": 8}, "file": str(folder / "rows.py")}
    weights = {"weight": torch.eye(2, 8), "bias": torch.zeros(2)}
    return Predictor(folder, {"classes": ["a", "b"], "model": built}, weights)


def test_rows_are_read_from_csv_and_npy_and_others_are_refused(tmp_path: Path) -> None:
    rows = np.eye(2, 8) * 9
    np.savetxt(tmp_path / "x.csv", rows, delimiter=",")
    np.save(tmp_path / "x.npy", rows)
    for name in ("x.csv", "x.npy"):
        found = [text[:1] for _, text in predictor(tmp_path).predictions(tmp_path / name)]
        assert found == ["a", "b"]
    (tmp_path / "short.csv").write_text("1,2\n")
    for name, text in (("short.csv", r"does not fit the model: mat1"), ("none.csv", "no such file")):
        with pytest.raises(DataError, match=text):
            list(predictor(tmp_path).predictions(tmp_path / name))


OWN = """
import torch
from torch import nn
from launcher.recipe import Recipe, TensorData, cross_entropy, recipe

@recipe
def own(config):
    x = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
    data = TensorData({"image": x, "label": (x[:, 0] > 0).long()})
    return Recipe(lambda: nn.Linear(4, 2), data, data, cross_entropy, classes=("below", "above"))
"""


def test_a_recipe_of_one_file_builds_its_model_again(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN)
    launched(tmp_path, "recipe=own.py", "train.epochs=8", "data.batch_size=16", "optim.lr=1", *ONE)
    np.savetxt(tmp_path / "x.csv", [[3.0, 0, 0, 0], [-3.0, 0, 0, 0]], delimiter=",")
    assert re.findall(r": (\w+) (?:9|100)", launched(tmp_path, "predict", "run", "x.csv")) == [
        "above",
        "below",
    ]
    launched(tmp_path, "export", "run", "made/")
    refused = launch_forked(tmp_path, ["predict", "made", "x.csv"])
    assert refused.returncode == 2
    assert "Give the run in its place" in refused.stderr


def test_what_cannot_be_predicted_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for words, text in (
        (["empty"], "give a run and files"),
        (["empty", "a.png"], "this is no run, and no folder"),
    ):
        refused = launch_forked(tmp_path, ["predict", *words])
        assert refused.returncode == 2
        assert text in refused.stderr
