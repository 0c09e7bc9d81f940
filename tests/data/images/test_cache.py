"""The cache of decoded photographs: built once, whole or not at all, and with the pixels that crops need."""

import os
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from launcher.data.images import cache
from launcher.data.images.cache import decoded_images
from launcher.data.images.image_file import ORIENTATION
from launcher.data.images.registry import load_images
from launcher.errors import DataWarning
from tests.data.images.photographs import ANTS_BEES, data_config, encoded, write_classes


class Images:
    """Greys of some sizes in memory, which count how often they are decoded."""

    def __init__(self, *sizes, key="k"):
        self.key, self.read = key, 0
        self.files = [encoded(Image.new("RGB", size, (10 * n,) * 3)) for n, size in enumerate(sizes)]

    def __len__(self):
        return len(self.files)

    def source(self, index):
        self.read += 1
        return self.files[index], f"image {index}"


def test_nothing_is_cut_off_and_the_shorter_side_is_resized(tmp_path):
    found = decoded_images(tmp_path, Images((40, 80), (30, 20), (8, 4)), side=10)
    assert [found[index].size for index in range(3)] == [(10, 20), (15, 10), (8, 4)]
    assert [found[index].getpixel((0, 0)) for index in range(3)] == [(0, 0, 0), (10, 10, 10), (20, 20, 20)]


def test_an_image_lies_as_its_orientation_says(tmp_path):
    exif = Image.Exif()
    exif[ORIENTATION] = 6
    images = Images((4, 4))
    images.files = [encoded(Image.new("RGB", (40, 20)), "JPEG", exif=exif)]
    assert decoded_images(tmp_path, images, side=10)[0].size == (10, 20)


def test_it_is_built_once_by_whoever_is_first(tmp_path):
    images = Images(*[(12, 12)] * 20)
    threads = [threading.Thread(target=decoded_images, args=(tmp_path, images, 8)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert images.read == 20
    assert len(list(tmp_path.glob("*.images"))) == 1


@pytest.mark.parametrize("other", [Images((9, 9), key="other"), Images((9, 9), (9, 9))], ids=["key", "count"])
def test_another_listing_has_another_file(tmp_path, other):
    decoded_images(tmp_path, Images((9, 9)), 8)
    decoded_images(tmp_path, other, 8)
    decoded_images(tmp_path, other, 4)
    assert len(list(tmp_path.glob("*.images"))) == 3


def test_an_image_that_cannot_be_read_is_left_out(tmp_path):
    images = Images((9, 9), (9, 9))
    images.files[0] = b"no image"
    found = decoded_images(tmp_path, images, 8)
    assert (found[0], found[1].size) == (None, (8, 8))


def test_a_build_that_is_interrupted_leaves_nothing(tmp_path, monkeypatch):
    def stop(descriptor):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(cache.os, "fsync", stop)
        with pytest.raises(KeyboardInterrupt):
            decoded_images(tmp_path, Images((9, 9)), 8)
    assert [file.suffix for file in tmp_path.iterdir()] in ([], [".lock"])
    assert decoded_images(tmp_path, Images((9, 9)), 8) is not None


def test_a_folder_that_cannot_be_made_is_a_warning(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.warns(DataWarning, match=r"no cache of decoded images in .*data\.cache=DIR"):
        assert decoded_images(tmp_path / "file", Images((9, 9)), 8) is None


# -- as a set of photographs uses it


def samples(images):
    """All samples of both parts, each with random numbers of its own."""
    found = []
    for part in (images.train, images.validation):
        for index in range(len(part)):
            torch.manual_seed(index)
            found.append(part[index]["image"])
    return found


def loaded(folder: Path, where: str):
    return load_images(data_config(path=folder, cache=where, image_size=16))


def test_an_epoch_from_the_cache_decodes_nothing(tmp_path):
    folder = write_classes(tmp_path / "set")
    images = loaded(folder, str(tmp_path / "cache"))
    found = samples(images)
    for file in folder.rglob("*.png"):
        file.unlink()
    assert all(map(torch.equal, samples(images), found))


def test_images_that_need_no_resizing_are_the_same_from_the_cache(tmp_path):
    folder = tmp_path / "set"
    generator = np.random.default_rng(0)
    for name in ("cat", "dog"):
        (folder / name).mkdir(parents=True)
        for index in range(4):
            pixels = generator.integers(0, 256, (18, 24, 3), np.uint8)  # 18 = 256 / 224 of 16 pixels
            Image.fromarray(pixels).save(folder / name / f"{index}.png")
    assert all(
        map(torch.equal, samples(loaded(folder, "none")), samples(loaded(folder, str(tmp_path / "c"))))
    )


@pytest.mark.parametrize("change", ["content", "time", "name"])
def test_a_file_that_changed_is_decoded_again(tmp_path, change):
    folder = write_classes(tmp_path / "set")
    loaded(folder, str(tmp_path / "cache"))
    file = folder / "cat" / "0.png"
    if change == "content":
        file.write_bytes(encoded(Image.new("RGB", (21, 31))))
    elif change == "time":
        os.utime(file, ns=(1, 1))
    else:
        file.rename(file.with_name("other.png"))
    loaded(folder, str(tmp_path / "cache"))
    assert len(list((tmp_path / "cache").glob("*.images"))) == 2


def test_nothing_is_kept_unless_it_is_asked_for(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    folder = write_classes(tmp_path / "set")
    loaded(folder, "none")
    assert not (tmp_path / "home").exists()
    loaded(folder, "auto")
    assert len(list((tmp_path / "home" / "fp16-launcher").glob("*.images"))) == 1


@pytest.mark.skipif(not ANTS_BEES.is_dir(), reason=f"no photographs in {ANTS_BEES}")
def test_real_photographs_look_alike_from_the_cache(tmp_path):
    """Resized twice instead of once: a little smoother."""
    with_cache, without = (
        load_images(data_config(path=ANTS_BEES, cache=where, image_size=64)).validation
        for where in (str(tmp_path), "none")
    )
    pairs = [(with_cache[n]["image"].float(), without[n]["image"].float()) for n in range(0, 90, 9)]
    assert max(float((one - other).abs().mean()) for one, other in pairs) < 8
