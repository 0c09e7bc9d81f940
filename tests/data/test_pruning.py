"""Cache folders lose what has not been used for long, and nothing else."""

import os
import time
from pathlib import Path

import pytest
import torch

from launcher.data.images.cache import decoded_images
from launcher.data.tensor_cache import KEPT_DAYS, Stored, cached, prune
from tests.data.images.test_cache import Images

OLD_S = (KEPT_DAYS + 1) * 86400


def age(path: Path, seconds: float = OLD_S) -> Path:
    os.utime(path, (time.time() - seconds,) * 2)
    return path


def images(folder: Path, key: str = "k") -> Path:
    before = set(folder.iterdir())
    decoded_images(folder, Images((2, 2), key=key), 2)
    (path,) = set(folder.iterdir()) - before or before
    return path


def tensors(folder: Path) -> Path:
    before = set(folder.iterdir())
    cached(folder, {"key": "k"}, lambda: Stored({"x": torch.ones(2)}, {}))
    (path,) = set(folder.iterdir()) - before
    return path


@pytest.mark.parametrize("make", [images, tensors])
def test_a_new_cache_removes_one_that_nobody_has_used_for_long(tmp_path, make):
    old, recent = age(make(tmp_path)), age(images(tmp_path, "recent"), OLD_S - 2 * 86400)
    new = images(tmp_path, "new")
    assert set(tmp_path.iterdir()) == {recent, new}
    assert not old.exists()


@pytest.mark.parametrize("make", [images, tensors])
def test_use_makes_it_young(tmp_path, make):
    path = age(make(tmp_path))
    if make is images:
        decoded_images(tmp_path, Images((2, 2)), 2)
    else:
        cached(tmp_path, {"key": "k"}, lambda: pytest.fail("it is there"))
    prune(tmp_path)
    assert path.exists()


def test_what_is_open_is_kept_however_old(tmp_path):
    path = age(images(tmp_path))
    decoded = decoded_images(tmp_path, Images((2, 2)), 2)
    age(path)
    prune(tmp_path)
    assert path.exists()
    del decoded
    prune(tmp_path)
    assert not path.exists()


def test_other_files_are_left_alone(tmp_path):
    name = "0" * 32
    others = [tmp_path / each for each in ("notes.images", f"{name}.txt", f"{name}0.images", "a.safetensors")]
    for path in others:
        path.write_text("precious")
    (tmp_path / f"{name}.images").symlink_to(others[0])
    (tmp_path / f"{name}.partial").mkdir()
    everything = {age(path) for path in tmp_path.iterdir()}
    prune(tmp_path)
    assert set(tmp_path.iterdir()) == everything
    prune(tmp_path / "absent")
