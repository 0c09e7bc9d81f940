"""CIFAR-10 in each form that people have gives the same set, and no pickle runs code."""

import io
import os
import pickle
import struct

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image

from launcher.data.images.cifar_batches import CLASSES, TEST, TRAIN
from launcher.data.images.registry import load_images
from launcher.errors import ConfigError, DataError
from tests.data.images.test_registry import REAL_CIFAR10, data_config, png, write_parquet

ROWS = 4  # of a batch


@pytest.fixture(autouse=True)
def library_cache(tmp_path_factory, monkeypatch):
    datasets = pytest.importorskip("datasets", reason="the datasets package is not installed")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path_factory.mktemp("library")))


def content(seed=0):
    """Images uint8 [24, 3, 32, 32] and labels of the six batches."""
    generator = np.random.default_rng(seed)
    return generator.integers(0, 256, (6 * ROWS, 3, 32, 32), np.uint8), [n % 10 for n in range(6 * ROWS)]


def of_batches(images, labels):
    for number, name in enumerate((*TRAIN, *TEST)):
        part = slice(number * ROWS, (number + 1) * ROWS)
        yield name, images[part].reshape(ROWS, -1), labels[part]


def python_2(data, labels):
    """Opcodes of Python 2, whose strings and arrays the published files have."""
    text = lambda value: b"U" + bytes([len(value)]) + value  # noqa: E731  # SHORT_BINSTRING
    long_text = b"T" + struct.pack("<i", data.size) + data.tobytes()  # BINSTRING
    array = (
        b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n(I0\ntU\x01btR(K\x01K"
        + bytes([len(data)])
        + b"M"
        + struct.pack("<H", data.shape[1])
        + b"\x86cnumpy\ndtype\n(U\x02u1K\x00K\x01tR(K\x03U\x01|NNN"
        + 2 * b"J\xff\xff\xff\xff"
        + b"K\x00tbI00\n"
        + long_text
        + b"tb"
    )
    ints = b"](" + b"".join(b"K" + bytes([each]) for each in labels) + b"e"
    return (
        b"\x80\x02}("
        + text(b"batch_label")
        + text(b"a batch")
        + text(b"labels")
        + ints
        + text(b"data")
        + array
        + b"u."
    )


def python_3(protocol):
    def written(data, labels):
        return pickle.dumps({b"data": data, b"labels": labels, b"filenames": [b"a.png"]}, protocol)

    return written


def write_pickled(folder, images, labels, dumps=python_2):
    folder.mkdir(parents=True, exist_ok=True)
    for name, data, numbers in of_batches(images, labels):
        (folder / name).write_bytes(dumps(data, numbers))


def write_binary(folder, images, labels):
    folder.mkdir(parents=True, exist_ok=True)
    for name, data, numbers in of_batches(images, labels):
        rows = np.concatenate([np.array(numbers, np.uint8)[:, None], data], axis=1)
        (folder / f"{name}.bin").write_bytes(rows.tobytes())


def write_hub(folder, images, labels):
    folder.mkdir(parents=True, exist_ok=True)
    names = {"_type": "ClassLabel", "names": list(CLASSES)}
    for name, part in (("train", slice(0, 5 * ROWS)), ("test", slice(5 * ROWS, None))):
        cells = []
        for image in images[part]:
            file = io.BytesIO()
            Image.fromarray(image.transpose(1, 2, 0)).save(file, "PNG")
            cells.append(file.getvalue())
        write_parquet(folder / f"{name}-00000-of-00001.parquet", cells, labels[part], class_names=names)


@pytest.mark.parametrize(
    ("write", "below"),
    [
        (write_pickled, ""),
        (write_pickled, "cifar-10-batches-py"),
        (lambda *args: write_pickled(*args, python_3(2)), ""),
        (lambda *args: write_pickled(*args, python_3(4)), ""),
        (write_binary, ""),
        (write_binary, "cifar-10-batches-bin"),
        (write_hub, ""),
    ],
    ids=["python", "torchvision", "protocol 2", "protocol 4", "binary", "binary archive", "hub"],
)
def test_every_form_gives_the_same_set(tmp_path, write, below):
    images, labels = content()
    write(tmp_path / below, images, labels)
    found = load_images(data_config("cifar10", tmp_path, cache="none"))
    assert found.classes == CLASSES
    both = torch.cat([part.columns["image"] for part in (found.train, found.validation)])
    assert torch.equal(both, torch.from_numpy(images))
    assert found.train.columns["label"].tolist() == labels[: 5 * ROWS]
    assert found.validation.columns["label"].tolist() == labels[5 * ROWS :]
    assert both.dtype == torch.uint8


@pytest.mark.skipif(not REAL_CIFAR10.is_dir(), reason=f"no CIFAR-10 in {REAL_CIFAR10}")
@pytest.mark.parametrize("write", [write_pickled, write_binary])
def test_the_real_images_in_other_forms(tmp_path, write):
    rows = pq.ParquetFile(REAL_CIFAR10 / "train.parquet").read_row_group(0).slice(0, 6 * ROWS).to_pylist()
    images = np.stack(
        [np.asarray(Image.open(io.BytesIO(row["img"]["bytes"]))).transpose(2, 0, 1) for row in rows]
    )
    write(tmp_path, images, [row["label"] for row in rows])
    found = load_images(data_config("cifar10", tmp_path)).train
    assert torch.equal(found.columns["image"], torch.from_numpy(images[: 5 * ROWS]))
    assert found.columns["label"].tolist() == [row["label"] for row in rows[: 5 * ROWS]]


class Call:
    """Calls a function when it is unpickled."""

    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (Call(os.system, "touch ran"), "it names posix.system, which no batch of CIFAR-10 does"),
        (Call(eval, "open('ran', 'w')"), "it names .*eval"),
        (Call(getattr, "x", "upper"), "it names .*getattr"),
        (np.array([None]), "TypeError"),
        (np.zeros(2), "ValueError: cannot reshape"),
    ],
)
@pytest.mark.parametrize("protocol", [2, 4])
def test_a_pickle_that_names_anything_else_is_refused(tmp_path, monkeypatch, value, message, protocol):
    monkeypatch.chdir(tmp_path)
    images, labels = content()
    write_pickled(tmp_path, images, labels)
    (tmp_path / "data_batch_2").write_bytes(pickle.dumps({b"data": value, b"labels": [1]}, protocol))
    with pytest.raises(DataError, match=rf"data_batch_2 cannot be read as a batch of CIFAR-10: .*{message}"):
        load_images(data_config("cifar10", tmp_path))
    assert not (tmp_path / "ran").exists()


def changed(name, data):
    def change(folder):
        (folder / name).write_bytes(data)

    return change


def pickled(**columns):
    return pickle.dumps({key.encode(): value for key, value in columns.items()}, 2)


IMAGE = np.zeros((1, 3072), np.uint8)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda folder: (folder / "data_batch_3").unlink(),
            r"is not a folder with data_batch_1 to 5",
        ),
        (changed("test_batch", b""), "test_batch cannot be read as a batch of CIFAR-10: EOFError"),
        (changed("test_batch", b"\x80\x02}("), "test_batch cannot be read"),
        (
            changed("test_batch", pickle.dumps([1], 2)),
            "test_batch cannot be read as a batch of CIFAR-10: Type",
        ),
        (changed("test_batch", pickled(labels=[1])), "KeyError: b'data'"),
        (changed("test_batch", pickled(data=IMAGE, fine_labels=[1])), "KeyError: b'labels'"),
        (changed("test_batch", pickled(data=IMAGE[:, 1:], labels=[1])), "ValueError: cannot reshape"),
        (changed("test_batch", pickled(data=IMAGE, labels=[1, 2])), "its 1 images have 2 labels"),
        (changed("test_batch", pickled(data=IMAGE, labels=[10])), "or some that are not 0 to 9"),
        (changed("test_batch", pickled(data=[1], labels=[1])), "AttributeError: 'list' object"),
    ],
)
def test_what_is_damaged_is_named(tmp_path, change, message):
    write_pickled(tmp_path, *content())
    change(tmp_path)
    with pytest.raises((DataError, ConfigError), match=message):
        load_images(data_config("cifar10", tmp_path))


def test_a_binary_batch_that_is_cut_off_is_named(tmp_path):
    write_binary(tmp_path, *content())
    os.truncate(tmp_path / "data_batch_1.bin", 5000)
    with pytest.raises(
        DataError, match=r"data_batch_1\.bin cannot be read .*: cannot reshape array of size 5000"
    ):
        load_images(data_config("cifar10", tmp_path))


def test_a_folder_of_something_else_has_all_forms_in_its_error(tmp_path):
    (tmp_path / "cat.png").write_bytes(png())
    with pytest.raises(ConfigError, match=r"not a folder with data_batch_1 .* \.bin, or parquet files"):
        load_images(data_config("cifar10", tmp_path))
