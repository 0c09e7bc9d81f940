"""CIFAR-10 as its authors publish it: the pickled batches of the Python version and the binary batches.

Owns the two formats (https://www.cs.toronto.edu/~kriz/cifar.html) and the folders around them. A batch is
unpickled by a reader that admits what these files hold, and nothing that could run code.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor

from launcher.data.tensors import TensorData
from launcher.errors import DataError, described

TRAIN = tuple(f"data_batch_{number}" for number in range(1, 6))
TEST = ("test_batch",)
FOLDERS = ("", "cifar-10-batches-py", "cifar-10-batches-bin")  # torchvision's root has the second
CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
SHAPE = (3, 32, 32)
PIXELS = 3 * 32 * 32

Columns = tuple[Any, Any]  # images uint8 [n, 3072], labels of integers [n]


def batch_files(folder: Path) -> list[Path] | None:
    """The six files in the folder or in the one that the archives unpack to; None if one is missing."""
    for place in (folder / name for name in FOLDERS):
        for suffix in ("", ".bin"):
            files = [place / f"{name}{suffix}" for name in (*TRAIN, *TEST)]
            if all(file.is_file() for file in files):
                return files
    return None


def read_batches(files: Sequence[Path], name: str) -> tuple[TensorData, TensorData, tuple[str, ...]]:
    """Train and test with columns image uint8 [n, 3, 32, 32] and label int64 [n], and the classes."""
    read = read_binary if files[0].suffix == ".bin" else read_pickled
    parts = [_checked(file, read) for file in files]
    train, test = parts[: len(TRAIN)], parts[len(TRAIN) :]
    return _joined(train, name), _joined(test, name), CLASSES


def read_binary(file: Path) -> Columns:
    """A batch of the binary version: rows of a label's byte and 3,072 bytes of pixels."""
    rows = np.fromfile(file, np.uint8).reshape(-1, 1 + PIXELS)
    return rows[:, 1:], rows[:, 0]


def read_pickled(file: Path) -> Columns:
    """A batch of the Python version: a pickled dictionary with `data` and `labels`."""
    with open(file, "rb") as opened:
        content = Unpickler(opened, encoding="bytes").load()
    return content[b"data"].values, content[b"labels"]


class Unpickler(pickle.Unpickler):
    """Admits numpy's arrays besides what pickle holds without any class: bytes, lists, dicts, numbers.

    A pickle can name any function of any module to call; all other names raise UnpicklingError.
    """

    def find_class(self, module: str, name: str) -> Any:
        return ADMITTED.get((module, name)) or _refuse(module, name)


def _refuse(module: str, name: str) -> NoReturn:
    raise pickle.UnpicklingError(f"it names {module}.{name}, which no batch of CIFAR-10 does")


def _latin1(text: str, encoding: str) -> bytes:
    """Bytes as Python 3 writes them into the old protocols of pickle, whatever encoding these name."""
    return text.encode("latin1")


class _Dtype:
    """Stands for numpy's dtype of bytes. An array of any other has another number of bytes than its shape."""

    def __init__(self, *arguments: object) -> None:
        """Ignore what the pickle says."""

    def __setstate__(self, state: object) -> None:
        """Ignore the byte order, which bytes do not have."""


class _Array:
    """Takes what a pickle says of an array, in place of numpy's own code, which trusts it."""

    def __init__(self, *arguments: object) -> None:
        self.values = np.zeros(0, np.uint8)

    def __setstate__(self, state: tuple[int, tuple[int, ...], _Dtype, bool, bytes]) -> None:
        _, shape, _, by_columns, content = state
        self.values = np.frombuffer(content, np.uint8).reshape(shape, order="F" if by_columns else "C")


ADMITTED: dict[tuple[str, str], Callable[..., Any]] = {
    ("numpy.core.multiarray", "_reconstruct"): _Array,
    ("numpy._core.multiarray", "_reconstruct"): _Array,
    ("numpy", "ndarray"): _Array,
    ("numpy", "dtype"): _Dtype,
    ("_codecs", "encode"): _latin1,
}


def _checked(file: Path, read: Callable[[Path], Columns]) -> tuple[Tensor, Tensor]:
    """Images uint8 [n, 3, 32, 32] and labels int64 [n] of a file. Raises DataError, naming it."""
    try:
        data, labels = read(file)
        images, classes = np.array(data).reshape(-1, *SHAPE), np.array(labels, np.int64)
        if not len(images) == len(classes) > 0 or not set(classes) <= set(range(len(CLASSES))):
            raise ValueError(
                f"its {len(images)} images have {len(classes)} labels, or some that are not 0 to 9"
            )
        return torch.from_numpy(images), torch.from_numpy(classes)
    except Exception as error:  # a damaged pickle raises nearly any
        raise DataError(f"{file} cannot be read as a batch of CIFAR-10: {described(error)}") from error


def _joined(parts: Sequence[tuple[Tensor, Tensor]], name: str) -> TensorData:
    images, labels = (torch.cat(column) for column in zip(*parts, strict=True))
    return TensorData({"image": images, "label": labels}, name)
