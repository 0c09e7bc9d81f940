import hashlib
import io
import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from launcher.config.schema import AugmentConfig, DataConfig
from launcher.data.augment import crop_and_flip
from launcher.data.images.registry import DIGITS, load_images, split
from launcher.data.tensors import TensorData
from launcher.errors import ConfigError, DataError, PreflightError

REPOSITORY = Path(__file__).resolve().parents[3]
REAL_CIFAR10 = REPOSITORY.parent / "shared" / "data" / "cifar10"
DIGEST = "87ff0c9e40dc7e2c0e34e7257799c2e3f3aec1a016363bb11cad869ec428a826"
CLASS_NAMES = {"_type": "ClassLabel", "names": ["cat", "dog", "owl"]}


def data_config(name, path=None, val_fraction=0.2, **options):
    return DataConfig(
        name=name,
        path=None if path is None else str(path),
        batch_size=8,
        micro_batch_size=None,
        val_fraction=val_fraction,
        num_workers="auto",
        share="equal",
        max_bad_samples=0,
        drop_last=False,
        augment=AugmentConfig(random_crop_padding=1, random_horizontal_flip=True),
        options=options,
    )


def png(value=0, size=(6, 6), mode="RGB"):
    file = io.BytesIO()
    Image.new(mode, size, value if mode == "L" else (value, 0, 255)).save(file, "PNG")
    return file.getvalue()


def write_parquet(
    file, images, labels, *, columns=("img", "label"), class_names=CLASS_NAMES, label_type=None
):
    cells = pa.array(
        [image if isinstance(image, dict) else {"bytes": image, "path": None} for image in images],
        type=pa.struct([("bytes", pa.binary()), ("path", pa.string())]),
    )
    table = pa.table([cells, pa.array(labels, type=label_type or pa.int64())], names=list(columns))
    if class_names is not None:
        features = {columns[0]: {"_type": "Image"}, columns[1]: class_names}
        metadata = json.dumps({"info": {"features": features}})
        table = table.replace_schema_metadata({"huggingface": metadata})
    pq.write_table(table, file)


def write_pair(folder, images, labels, **how):
    for name in ("train", "test"):
        write_parquet(folder / f"{name}.parquet", images, labels, **how)


@pytest.fixture(autouse=True)
def cache_home(tmp_path_factory, monkeypatch):
    """Where `data.cache=auto` keeps what it decoded, beside what the library keeps."""
    home = tmp_path_factory.mktemp("cache")
    datasets = pytest.importorskip("datasets", reason="the datasets package is not installed")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path_factory.mktemp("library")))
    monkeypatch.setenv("XDG_CACHE_HOME", str(home))
    return home


# -- digits and synthetic


def test_digits_are_the_arrays_of_scikit_learn():
    """The digest was computed once from load_digits of scikit-learn 1.9.1, as uint8."""
    with np.load(DIGITS) as arrays:
        content = arrays["images"].tobytes() + arrays["labels"].tobytes()
    assert hashlib.sha256(content).hexdigest() == DIGEST
    assert DIGITS.stat().st_size < 100_000


def test_digits_have_the_shape_and_scale_they_promise():
    images = load_images(data_config("digits"))
    assert (len(images.train), len(images.validation)) == (1438, 359)
    assert (images.channels, images.height, images.width) == (1, 8, 8)
    assert images.train.columns["image"].dtype == torch.uint8
    assert images.train.columns["label"].dtype == torch.int64
    normalised = images.eval_transform()(images.train.columns)["image"]
    assert normalised.dtype == torch.float32
    assert abs(float(normalised.mean())) < 0.01
    assert abs(float(normalised.std()) - 1) < 0.01


def test_synthetic_images_follow_their_sizes():
    config = data_config("synthetic", num_samples=50, num_classes=4, channels=2, image_size=12)
    images, again = load_images(config), load_images(config)
    assert images.train.columns["image"].shape == (40, 2, 12, 12)
    assert len(images.validation) == 10
    assert images.classes == ("class0", "class1", "class2", "class3")
    assert torch.equal(images.train.columns["image"], again.train.columns["image"])
    normalised = images.eval_transform()(images.train.columns)["image"]
    assert abs(float(normalised.mean())) < 0.2
    assert abs(float(normalised.std()) - 1) < 0.2


def test_synthetic_images_can_be_learned():
    images = load_images(data_config("synthetic", num_samples=400, image_size=8))
    train, validation = (images.eval_transform()(part.columns) for part in (images.train, images.validation))
    means = torch.stack([train["image"][train["label"] == c].mean(dim=0).flatten() for c in range(10)])
    nearest = torch.cdist(validation["image"].flatten(1), means).argmin(dim=1)
    assert float((nearest == validation["label"]).float().mean()) > 0.99


# -- the split


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 3), min_size=8, max_size=100), st.floats(0.2, 0.8))
def test_split_holds_the_same_share_of_every_class_out(labels, fraction):
    labels = torch.tensor([0] * 5 + labels)
    parts = split(TensorData({"label": labels, "index": torch.arange(len(labels))}), fraction)
    indices = torch.cat([part.columns["index"] for part in parts])
    assert sorted(indices.tolist()) == list(range(len(labels)))
    for label in labels.unique():
        held_out = int((parts[1].columns["label"] == label).sum())
        assert abs(held_out - fraction * int((labels == label).sum())) <= 0.5


@pytest.mark.parametrize("fraction", [1e-6, 1.0])
def test_split_needs_both_parts(fraction):
    with pytest.raises(ConfigError, match=r"data\.val_fraction=.* leaves"):
        load_images(data_config("digits", val_fraction=fraction))


# -- normalisation and augmentation


def test_crops_and_mirrored_images_are_those_of_the_padded_ones_each_as_often():
    images = torch.randint(1, 256, (3000, 3, 7, 5), dtype=torch.uint8)
    torch.manual_seed(0)
    found = crop_and_flip(images, padding=1, flip=True)
    padded = np.pad(images.numpy(), ((0, 0), (0, 0), (1, 1), (1, 1)))
    seen = Counter()
    for image, cropped in zip(padded, found.numpy(), strict=True):
        places = [(top, left) for top in range(3) for left in range(3)]
        crops = {place: image[:, place[0] : place[0] + 7, place[1] : place[1] + 5] for place in places}
        (which,) = [
            (*place, mirrored)
            for place, crop in crops.items()
            for mirrored in (False, True)
            if np.array_equal(cropped, crop[:, :, ::-1] if mirrored else crop)
        ]
        seen[which] += 1
    assert len(seen) == 18
    assert max(seen.values()) < 2 * min(seen.values())


def test_no_augmentation_changes_nothing():
    images = torch.randint(0, 256, (4, 3, 7, 5), dtype=torch.uint8)
    assert crop_and_flip(images, padding=0, flip=False) is images


def test_train_transform_keeps_the_other_columns_and_the_stored_images():
    images = load_images(data_config("digits"))
    before = images.train.columns["image"].clone()
    batch = images.train.select(torch.arange(16))
    result = images.train_transform(AugmentConfig(2, True))(batch)
    assert result["image"].dtype == torch.float32
    assert result["image"].shape == (16, 1, 8, 8)
    assert torch.equal(result["label"], batch["label"])
    assert torch.equal(images.train.columns["image"], before)


# -- parquet


def test_decoded_images_are_kept_and_read_without_the_library(tmp_path, cache_home, monkeypatch):
    write_pair(tmp_path, [png(value) for value in (10, 20, 30)], [0, 2, 1])
    config = data_config("cifar10", tmp_path)
    first = load_images(config)
    monkeypatch.setitem(sys.modules, "datasets", None)
    again = load_images(config)
    for part, same in ((first.train, again.train), (first.validation, again.validation)):
        assert all(torch.equal(part.columns[name], same.columns[name]) for name in ("image", "label"))
    assert again.classes == first.classes
    assert len(list(cache_home.rglob("*.safetensors"))) == 1


@pytest.mark.parametrize("change", ["the files", "a cut-off cache", "none"])
def test_what_is_kept_is_not_trusted_after_a_change(tmp_path, cache_home, change):
    write_pair(tmp_path, [png(value) for value in (10, 20, 30)], [0, 2, 1])
    config = data_config("cifar10", tmp_path)
    load_images(config)
    write_pair(tmp_path, [png(value) for value in (40, 50, 60)], [0, 2, 1])
    (tmp_path / "train.parquet").touch()
    if change == "a cut-off cache":
        load_images(config)
        for each in cache_home.rglob("*.safetensors"):
            os.truncate(each, each.stat().st_size // 2)
    elif change == "none":
        config = data_config("cifar10", tmp_path, cache="none")
    assert load_images(config).train.columns["image"][:, 0, 0, 0].tolist() == [40, 50, 60]


def test_files_of_ones_own_are_read_without_the_cache_of_the_library(tmp_path, monkeypatch):
    write_pair(tmp_path, [png(value) for value in (10, 20, 30)], [0, 2, 1])
    (tmp_path / "file").write_text("")
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "file" / "cache"))
    assert len(load_images(data_config("cifar10", tmp_path, cache="none")).train) == 3


def test_a_cache_that_cannot_be_written_is_no_reason_to_fail(tmp_path):
    write_pair(tmp_path, [png(value) for value in (10, 20, 30)], [0, 2, 1])
    (tmp_path / "file").write_text("")
    images = load_images(data_config("cifar10", tmp_path, cache=str(tmp_path / "file")))
    assert len(images.train) == 3


@pytest.mark.parametrize("class_names", [CLASS_NAMES, None], ids=["hub layout", "plain struct"])
def test_parquet_is_read(tmp_path, class_names):
    write_pair(tmp_path, [png(value) for value in (10, 20, 30)], [0, 2, 1], class_names=class_names)
    images = load_images(data_config("cifar10", tmp_path))
    assert images.train.columns["image"].shape == (3, 3, 6, 6)
    assert images.train.columns["image"][:, 0, 0, 0].tolist() == [10, 20, 30]
    assert images.train.columns["image"][:, 2].unique().tolist() == [255]
    assert images.validation.columns["label"].tolist() == [0, 2, 1]
    assert images.classes == (("cat", "dog", "owl") if class_names else ("0", "1", "2"))


def test_shards_are_read_in_order_and_image_may_be_the_columns_name(tmp_path):
    for shard in range(3):
        write_parquet(
            tmp_path / f"train-0000{shard}-of-00003.parquet",
            [png(shard)],
            [shard],
            columns=("image", "label"),
        )
    write_parquet(tmp_path / "test-00000-of-00001.parquet", [png(9)], [0], columns=("image", "label"))
    images = load_images(data_config("cifar10", tmp_path))
    assert images.train.columns["label"].tolist() == [0, 1, 2]
    assert images.train.columns["image"][:, 0, 0, 0].tolist() == [0, 1, 2]


def test_other_columns_are_found_by_their_types(tmp_path):
    write_pair(tmp_path, [png(3), png(4)], [1, 0], columns=("photo", "kind"))
    assert load_images(data_config("cifar10", tmp_path)).classes == ("cat", "dog", "owl")


def test_labels_without_names_are_classes_in_their_order(tmp_path):
    write_pair(tmp_path, [png()] * 4, [0, 10, 2, 0], class_names=None)
    images = load_images(data_config("cifar10", tmp_path))
    assert images.classes == ("0", "2", "10")
    assert images.train.columns["label"].tolist() == [0, 2, 1, 0]


def test_the_column_called_label_comes_before_one_of_class_labels(tmp_path):
    write_pair(tmp_path, [png()] * 2, [0, 1], columns=("img", "coarse"))
    for name in ("train", "test"):
        table = pq.read_table(tmp_path / f"{name}.parquet")
        metadata = json.loads(table.schema.metadata[b"huggingface"])
        metadata["info"]["features"]["label"] = {"dtype": "int64", "_type": "Value"}
        table = table.append_column("label", pa.array([1, 0], pa.int64()))
        pq.write_table(
            table.replace_schema_metadata({"huggingface": json.dumps(metadata)}), tmp_path / f"{name}.parquet"
        )
    images = load_images(data_config("cifar10", tmp_path))
    assert images.train.columns["label"].tolist() == [1, 0]


def test_grey_images_get_three_channels(tmp_path):
    write_pair(tmp_path, [png(7, mode="L")], [0])
    assert load_images(data_config("cifar10", tmp_path)).train.columns["image"].unique().tolist() == [7]


def damaged(file):
    content = bytearray(file.read_bytes())
    content[8:200] = bytes(192)
    file.write_bytes(content)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (
            lambda d: (d / "test.parquet").unlink(),
            r"leaves 3 for training and 0 for validation",
        ),
        (lambda d: (d / "test.parquet").write_bytes(b"not a parquet file"), r"cannot be read"),
        (lambda d: (d / "train.parquet").write_bytes(b""), r"cannot be read"),
        (lambda d: os.truncate(d / "train.parquet", 300), r"cannot be read"),
        (lambda d: damaged(d / "train.parquet"), r"cannot be (read|decoded)"),
        (
            lambda d: write_pair(d, [png()], [0], columns=("img", "kind"), class_names=None),
            r"no columns of labels\. Its columns: img \(dict\), kind \(int64\)\. .* data\.label_column",
        ),
        (
            lambda d: write_pair(d, [png()], [0], columns=("photo", "label"), class_names=None),
            r"no columns of images\. Its columns: photo",
        ),
        (
            lambda d: write_pair(d, [png(), png()], [0, 3]),
            r"1 label\(s\) are not in the training set: 3\. It knows cat, dog, owl",
        ),
        (lambda d: write_pair(d, [png()], [-1]), r"row 0 has the label -1 \(1 of 1 rows\)"),
        (
            lambda d: write_parquet(d / "test.parquet", [png()], [-1], class_names=None),
            r"row 0 has the label -1 \(1 of 1 rows\)",
        ),
        (lambda d: write_pair(d, [png(), png()], [0, None]), r"row 1 has the label None"),
        (
            lambda d: write_pair(d, [png(), png(size=(5, 6))], [0, 1]),
            r"has images of 5 x 6, 6 x 6 pixels",
        ),
        (
            lambda d: write_pair(d, [png(), b"\xff\xd8\xff\xe0 no"], [0, 1]),
            r"row 1 cannot be read as an image",
        ),
        (lambda d: write_pair(d, [png()[:40]], [0]), r"row 0 cannot be read as an image"),
        (lambda d: write_pair(d, [png(), None], [0, 1]), r"row 1 has no image in column img"),
        (
            lambda d: write_pair(d, [{"bytes": None, "path": __file__}], [0]),
            r"row 0 .* cannot be read as an image",
        ),
        (lambda d: write_pair(d, [], []), r"cannot be read: An error occurred while generating the dataset"),
    ],
)
def test_bad_parquet_is_a_data_error(tmp_path, spoil, message):
    write_pair(tmp_path, [png()] * 3, [0, 1, 2])
    spoil(tmp_path)
    with pytest.raises(DataError, match=message):
        load_images(data_config("cifar10", tmp_path))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (data_config("cifar10", "/no/such/folder"), r"data\.path=/no/such/folder is not a folder with data"),
        (data_config("cifar10", __file__), r"is not a folder with data_batch_1"),
        (
            data_config("cifar10", "/no/such/folder", image_size=3),
            r"data\.image_size .* It has cache",
        ),
        (data_config("digits", "/tmp"), r"data\.path=/tmp is set, but data=digits"),
        (data_config("digits", size=3), r"data\.size is not an option of data=digits"),
        (
            data_config("digist"),
            r"data\.name=digist .* Nearest: digits\. Known: digits, synthetic, cifar10",
        ),
        (data_config("synthetic", image_sise=3), r"data\.image_sise .* It has num_samples, num_classes"),
        (data_config("synthetic", channels=0), r"data\.channels=0: must be a whole number"),
        (data_config("synthetic", channels="3"), r"data\.channels='3': must be"),
    ],
)
def test_bad_config_is_a_config_error(config, message):
    with pytest.raises(ConfigError, match=message):
        load_images(config)


def test_missing_datasets_package_names_the_line_that_installs_it(monkeypatch, tmp_path):
    write_pair(tmp_path, [png()], [0])
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(PreflightError, match="-m pip install datasets"):
        load_images(data_config("cifar10", tmp_path))


LOAD_FROM_HUB = """
from tests.data.images.test_registry import data_config
from launcher.errors import DataError
from launcher.data.images.registry import load_images
try:
    load_images(data_config("cifar10"))
except DataError as error:
    print(error)
"""


@pytest.mark.slow
def test_without_a_network_the_hub_is_given_up_quickly(tmp_path):
    # port 9 of this machine answers no one: the same as no network, on any machine
    environ = os.environ | {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(tmp_path)}
    result = subprocess.run(
        [sys.executable, "-c", LOAD_FROM_HUB],
        cwd=REPOSITORY,
        env=environ,
        capture_output=True,
        text=True,
        timeout=90,
        check=True,
    )
    assert result.stdout.startswith("data.path=uoft-cs/cifar10 is nothing here")
    assert "give a folder: data.path=DIR with parquet" in result.stdout
    assert "OfflineModeIsEnabled" in result.stdout  # it was told so, and did not retry for 24 s
    assert result.stderr == ""


LOAD_FOLDER = """
import sys
from tests.data.images.test_registry import data_config
from launcher.data.images.registry import load_images
images = load_images(data_config("cifar10", sys.argv[1], cache="none"))
print(len(images.train), int(images.train.columns["image"].sum()))
"""


@pytest.mark.slow
def test_two_processes_read_a_folder_at_once_and_leave_nothing_in_it(tmp_path):
    folder = tmp_path / "data"
    folder.mkdir()
    write_pair(folder, [png(value % 200) for value in range(300)], [value % 3 for value in range(300)])
    (tmp_path / "file").write_text("")
    environ = os.environ | {"HF_HOME": str(tmp_path / "file" / "hf")}  # cannot be written
    command = [sys.executable, "-W", "error", "-c", LOAD_FOLDER, str(folder)]
    readers = [
        subprocess.Popen(
            command, cwd=REPOSITORY, env=environ, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        for _ in range(2)
    ]
    outputs = [reader.communicate(timeout=60) for reader in readers]
    assert outputs[0] == outputs[1]
    assert outputs[0][0].startswith("300 ")
    assert outputs[0][1] == ""
    assert sorted(entry.name for entry in folder.iterdir()) == ["test.parquet", "train.parquet"]


@pytest.mark.slow
@pytest.mark.skipif(not REAL_CIFAR10.is_dir(), reason=f"no CIFAR-10 in {REAL_CIFAR10}")
def test_the_real_cifar10():
    images = load_images(data_config("cifar10", REAL_CIFAR10))
    assert (len(images.train), len(images.validation)) == (50_000, 10_000)
    assert images.classes[0] == "airplane"
    assert images.train.columns["label"].bincount().tolist() == [5000] * 10
    normalised = images.eval_transform()(images.validation.columns)["image"]
    assert torch.allclose(normalised.mean(dim=(0, 2, 3)), torch.zeros(3), atol=0.03)
    assert torch.allclose(normalised.std(dim=(0, 2, 3)), torch.ones(3), atol=0.03)
