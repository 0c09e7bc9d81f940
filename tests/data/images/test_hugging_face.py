import io
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from PIL import Image

from launcher.config.composition import make_paths_absolute
from launcher.config.resolve import Request, compose_jobs
from launcher.data.images.hugging_face import list_rows
from launcher.data.images.registry import load_images
from launcher.data.loader import LoaderConfig
from launcher.data.map_loader import MapDataset
from launcher.errors import ConfigError, DataError
from launcher.recipe import Recipe
from launcher.trainer.builders.data_check import data_fingerprint
from tests.data.images.photographs import data_config

REPOSITORY = Path(__file__).resolve().parents[3]
datasets = None  # imported by the first test: while tests are collected, each test process would take seconds


@pytest.fixture(autouse=True)
def library_cache(tmp_path_factory, monkeypatch):
    global datasets
    datasets = pytest.importorskip("datasets", reason="the datasets package is not installed")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path_factory.mktemp("library")))
    datasets.disable_progress_bars()


def png(grey):
    file = io.BytesIO()
    Image.new("RGB", (20, 24), (grey,) * 3).save(file, "PNG")
    return file.getvalue()


def rows(count=8, label=None, image=lambda index: png(10 * index)):
    """Images of grey 0, 10, ..., of two classes in turn."""
    kind = datasets.ClassLabel(names=["cat", "dog"]) if label is None else datasets.Value("string")
    features = datasets.Features({"image": datasets.Image(), "label": kind})
    cells = [{"bytes": image(index), "path": None} for index in range(count)]
    labels = [index % 2 if label is None else label(index) for index in range(count)]
    return datasets.Dataset.from_dict({"image": cells, "label": labels}, features=features)


def write_images(folder, count=8):
    folder.mkdir(parents=True, exist_ok=True)
    for index in range(count):
        (folder / f"{index}.png").write_bytes(png(10 * index))


def saved(folder):
    rows().save_to_disk(folder)


def saved_splits(folder):
    datasets.DatasetDict({"train": rows(6), "validation": rows(2), "test": rows(4)}).save_to_disk(folder)


def parquet(folder):
    folder.mkdir()
    rows(6).to_parquet(folder / "train-00000-of-00001.parquet")
    rows(2).to_parquet(folder / "test-00000-of-00001.parquet")


def one_parquet(folder):
    rows().to_parquet(folder)


def class_folders(folder):
    for name in ("cat", "dog"):
        (folder / name).mkdir(parents=True)
    for index in range(8):
        (folder / ("dog" if index % 2 else "cat") / f"{index}.png").write_bytes(png(10 * index))


def metadata(folder):
    write_images(folder)
    lines = [f'{{"file_name": "{n}.png", "kind": "{"dog" if n % 2 else "cat"}"}}\n' for n in range(8)]
    (folder / "metadata.jsonl").write_text("".join(lines))


@pytest.mark.parametrize(
    ("write", "suffix", "options"),
    [
        (saved, "", {}),
        (saved_splits, "", {}),
        (parquet, "", {}),
        (one_parquet, ".parquet", {}),
        (class_folders, "", {}),
        (metadata, "", {"label_column": "kind"}),
    ],
    ids=["saved", "saved splits", "parquet", "one parquet", "class folders", "metadata"],
)
def test_each_form_gives_the_same_images(tmp_path, write, suffix, options):
    path = tmp_path / f"set{suffix}"
    write(path)
    images = load_images(data_config("hf", path, crop_scale=1.0, **options))
    assert images.classes == ("cat", "dog")
    assert (len(images.train), len(images.validation)) == (6, 2)
    seen = [
        (sample["image"][0, 0, 0].item() // 10, sample["label"])
        for part in (images.train, images.validation)
        for sample in map(part.__getitem__, range(len(part)))
    ]
    assert all(number % 2 == label for number, label in seen)
    if write not in (saved_splits, parquet):
        assert sorted(number for number, _ in seen) == list(range(8))


def known(path):
    """What ranks compare of the training set."""
    images = load_images(data_config("hf", path)).train
    recipe = Recipe(lambda: None, images, images, None)
    return data_fingerprint(
        recipe, MapDataset(images, None, LoaderConfig(0, torch.device("cpu"), 0), "training"), {}
    )


@pytest.mark.parametrize("write", [saved, parquet, class_folders])
def test_the_same_images_in_another_place_are_no_other_data(write, tmp_path):
    for name in ("here", "there"):
        write(tmp_path / name)
    assert known(tmp_path / "here") == known(tmp_path / "there")


def test_texts_are_classes_in_alphabetical_order(tmp_path):
    rows(8, label=lambda index: ["owl", "emu"][index % 2]).save_to_disk(tmp_path / "set")
    images = load_images(data_config("hf", tmp_path / "set"))
    assert images.classes == ("emu", "owl")
    for sample in map(images.train.__getitem__, range(len(images.train))):
        number = sample["image"][0, 0, 0].item() // 10
        assert images.classes[sample["label"]] == ["owl", "emu"][number % 2]


def broken(folder):
    folder.mkdir()
    (folder / "train.parquet").write_bytes(b"no parquet")


def unknown_label(folder):
    splits = {"train": rows(4, lambda index: "ab"[index % 2]), "test": rows(2, lambda index: "z")}
    datasets.DatasetDict(splits).save_to_disk(folder)


def unlabelled(folder):
    splits = {"train": rows(4, lambda index: "ab"[index % 2]), "test": rows(4, lambda index: "a")}
    named = datasets.ClassLabel(names=["a", "b"])
    splits = {name: split.cast_column("label", named) for name, split in splits.items()}
    markers = [0, -1, -1, -1]
    splits["test"] = splits["test"].remove_columns("label").add_column("label", markers, feature=named)
    datasets.DatasetDict(splits).save_to_disk(folder)


def test_integers_without_names_may_be_any_classes(tmp_path):
    rows(8, lambda index: index % 2 * 2 - 1).save_to_disk(tmp_path / "set")
    images = load_images(data_config("hf", tmp_path / "set"))
    assert images.classes == ("-1", "1")


def missing_labels(folder):
    rows(4, lambda index: "a" if index else None).save_to_disk(folder)


@pytest.mark.parametrize(
    ("write", "options", "error", "message"),
    [
        (lambda folder: None, {}, ConfigError, r"set does not exist\. Give a folder, a file, or a hub name"),
        (broken, {}, DataError, r"set cannot be read: "),
        (
            saved,
            {"image_column": "photo"},
            DataError,
            r"set has not the column data\.image_column=photo\. Its columns: image \(.*\), label",
        ),
        (
            saved,
            {"label_column": "kind"},
            DataError,
            r"set has not the column data\.label_column=kind\. Its columns: image \(.*\), label",
        ),
        (metadata, {}, DataError, r"no columns of labels\. Its columns: image \(.*\), kind"),
        (unknown_label, {}, DataError, r"1 label\(s\) are not in the training set: z\. It knows a, b"),
        (
            unlabelled,
            {},
            DataError,
            r"row 1 has the label -1 \(3 of 4 rows\)\. -1 marks samples without a label",
        ),
        (missing_labels, {}, DataError, r"row 0 has the label None \(1 of 4 rows\)"),
        (
            lambda f: rows(4, lambda index: ("a", "b", "")[index % 3]).save_to_disk(f),
            {},
            DataError,
            r"row 2 has the label '' \(1 of 4 rows\)\. .* strings that are not empty",
        ),
        (lambda f: rows(4, lambda index: "a").save_to_disk(f), {}, DataError, r"has one class, a"),
    ],
)
def test_what_cannot_be_used(tmp_path, write, options, error, message):
    write(tmp_path / "set")
    with pytest.raises(error, match=message):
        load_images(data_config("hf", tmp_path / "set", **options))


def test_an_empty_cell_is_named_when_it_is_read(tmp_path):
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=["a", "b"])})
    contents = [png(1), None, b"no", png(2)]
    cells = [None if content is None else {"bytes": content, "path": None} for content in contents]
    splits = {
        name: datasets.Dataset.from_dict({"image": cells, "label": [0, 1, 0, 1]}, features=features)
        for name in ("train", "test")
    }
    datasets.DatasetDict(splits).save_to_disk(tmp_path / "set")
    images = load_images(data_config("hf", tmp_path / "set"))
    with pytest.raises(DataError, match=r"set, row 1 has no image in column image"):
        images.train[1]
    with pytest.raises(DataError, match=r"set, row 2 of the validation split cannot be read as an image"):
        images.validation[2]


def test_names_of_the_hub_stay_names_and_what_is_here_becomes_absolute(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").mkdir()

    def resolved(name, **data):
        tree = {
            "data": {"name": name, **data},
            "recipes": {"path": None},
            "checkpoint": {"resume": "auto"},
            "model": {},
        }
        list(make_paths_absolute(tree))
        return tree["data"]

    assert resolved("hf", path="uoft-cs/cifar10")["path"] == "uoft-cs/cifar10"
    assert resolved("hf", path="here")["path"] == str(tmp_path / "here")
    assert resolved("hf", path="./not-here")["path"] == str(tmp_path / "not-here")
    assert resolved("cifar10", path="uoft-cs/cifar10")["path"] == str(tmp_path / "uoft-cs" / "cifar10")
    assert resolved("imagefolder", path="here", csv="a.csv", cache="auto") == {
        **{"name": "imagefolder", "path": str(tmp_path / "here")},
        **{"csv": str(tmp_path / "a.csv"), "cache": "auto"},
    }
    assert resolved("imagefolder", path=None, csv=None, cache="kept")["cache"] == str(tmp_path / "kept")


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize(
    ("words", "refused"),
    [
        (["data=hf", "data.path=user/photographs"], False),
        (["data=hf", "data.path=./gone"], True),
        (["data=imagefolder", "data.path=user/photographs"], True),
        (["data=imagefolder", "data.path=/tmp", "data.csv=/no/such.csv"], True),
        (["data=imagefolder", "data.path=/tmp", "data.cache=/tmp/to/be/made"], False),
    ],
)
def test_what_has_to_exist_is_looked_for_before_a_run(words, refused):
    request = Request(("recipe=resnet18", *words))
    if not refused:
        assert len(compose_jobs(request)) == 1
        return
    with pytest.raises(ConfigError, match="there is no such file or directory"):
        compose_jobs(request)


FROM_HUB = """
from launcher.data.images.registry import load_images
from launcher.errors import DataError
from tests.data.images.photographs import data_config
try:
    load_images(data_config("hf", "user/photographs"))
except DataError as error:
    print(error)
"""


@pytest.mark.slow
def test_without_a_network_a_name_is_given_up_quickly(tmp_path):
    environ = os.environ | {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", FROM_HUB],
        cwd=REPOSITORY,
        env=environ,
        capture_output=True,
        text=True,
        timeout=90,
        check=True,
    )
    assert "data.path=user/photographs is nothing here" in done.stdout
    assert "give a folder: data.path=DIR" in done.stdout
    assert done.stderr == ""


@pytest.mark.parametrize("names", [("image", "mask"), ("img", "image")])
def test_an_image_is_not_chosen_of_several(names, tmp_path):
    """One may be the mask of the other."""
    cells = [{"bytes": png(10 * index), "path": None} for index in range(8)]
    features = {name: datasets.Image() for name in names} | {"label": datasets.ClassLabel(names=["a", "b"])}
    content = dict.fromkeys(names, cells) | {"label": [0, 1] * 4}
    datasets.Dataset.from_dict(content, features=datasets.Features(features)).save_to_disk(tmp_path / "two")
    with pytest.raises(DataError, match=r"has 2 columns of images.*Choose one with data\.image_column"):
        list_rows(str(tmp_path / "two"), None, None, 0.25)
    assert len(list_rows(str(tmp_path / "two"), names[1], None, 0.25)) == 8
