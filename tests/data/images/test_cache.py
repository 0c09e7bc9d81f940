import logging
import multiprocessing
import os
import resource
import shutil
import warnings

import numpy as np
import pytest
import torch
from torch.utils.data import default_collate

from launcher.data.batch_plan import BatchPlan, generator_for
from launcher.data.images.cache import open_cache
from launcher.data.images.catalog import load_images
from launcher.data.indexed import IndexedData, LoadedBatches
from launcher.data.loader import Loading, loader_processes
from launcher.data.reader import BatchRequest
from launcher.errors import DataWarning
from tests.data.images.photographs import corners, data_config, encoded, num_stored, write_classes

SHAPE = (3, 4, 5)


def image(index):
    return np.full(SHAPE, index, np.uint8)


def in_child(work):
    """The exit code of a forked process that does the work."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of a fork beside threads
        process = multiprocessing.get_context("fork").Process(target=work)
        process.start()
    process.join(30)
    code = process.exitcode
    process.close()
    return code


def filled(folder, count=3, key="k"):
    cache = open_cache(folder, key, count, SHAPE)
    for index in range(count):
        cache.put(index, image(index))
    return cache


def test_images_come_back_and_the_file_gets_its_name_when_it_is_whole(tmp_path):
    cache = open_cache(tmp_path, "k", 3, SHAPE)
    for index in range(3):
        assert not cache.path.exists()
        assert cache.get(index) is None
        cache.put(index, image(index))
        assert (cache.get(index) == index).all()
    assert list(tmp_path.iterdir()) == [cache.path]
    again = open_cache(tmp_path, "k", 3, SHAPE)
    assert num_stored(again) == 3
    assert all((again.get(index) == index).all() for index in range(3))


def test_what_cannot_be_decoded_is_no_reason_to_stay_unfinished(tmp_path):
    cache = open_cache(tmp_path, "k", 2, SHAPE)
    cache.give_up(0)
    cache.put(1, image(1))
    assert cache.path.exists()
    again = open_cache(tmp_path, "k", 2, SHAPE)
    assert again.get(0) is None
    assert (again.get(1) == 1).all()


def test_another_set_has_another_file(tmp_path):
    filled(tmp_path, 3, "k")
    for count, key, shape in ((3, "other", SHAPE), (4, "k", SHAPE), (3, "k", (3, 5, 4))):
        assert num_stored(open_cache(tmp_path, key, count, shape)) == 0


@pytest.mark.parametrize(
    "spoil",
    [
        lambda path: os.truncate(path, 5000),
        lambda path: os.truncate(path, 0),
        lambda path: path.write_bytes(bytes(path.stat().st_size)),
        lambda path: path.write_bytes(path.read_bytes() + b"more"),
    ],
    ids=["cut off", "empty", "zeros", "longer"],
)
def test_a_file_that_is_not_what_it_should_be_is_replaced(tmp_path, spoil):
    cache = filled(tmp_path)
    spoil(cache.path)
    assert num_stored(open_cache(tmp_path, "k", 3, SHAPE)) == 0
    assert num_stored(filled(tmp_path)) == 3
    assert num_stored(open_cache(tmp_path, "k", 3, SHAPE)) == 3


def test_a_link_in_its_place_is_not_followed(tmp_path):
    victim = tmp_path / "victim"
    victim.write_text("precious")
    cache = filled(tmp_path / "cache")
    cache.path.unlink()
    cache.path.symlink_to(victim)
    with pytest.warns(DataWarning, match="symbolic link"):
        assert open_cache(tmp_path / "cache", "k", 3, SHAPE) is None
    assert victim.read_text() == "precious"


def test_processes_fill_it_together_and_another_run_goes_on_where_one_was_killed(tmp_path):
    cache = open_cache(tmp_path, "k", 4, SHAPE)

    def store():
        cache.put(0, image(0))
        open_cache(tmp_path, "k", 4, SHAPE).put(1, image(1))
        os.kill(os.getpid(), 9)

    in_child(store)
    assert num_stored(cache) == 2
    again = open_cache(tmp_path, "k", 4, SHAPE)
    assert (again.get(0) == 0).all()
    again.put(2, image(2))
    cache.put(3, image(3))
    assert cache.path.exists()
    assert (again.get(3) == 3).all()


def test_where_no_file_names_the_boot_images_are_kept_all_the_same(tmp_path, monkeypatch):
    monkeypatch.setattr("launcher.data.images.cache.BOOT_ID", tmp_path / "none")
    filled(tmp_path)
    assert num_stored(open_cache(tmp_path, "k", 3, SHAPE)) == 3


def test_what_an_earlier_boot_left_unfinished_is_not_used(tmp_path, monkeypatch):
    open_cache(tmp_path, "k", 2, SHAPE).put(0, image(0))
    (tmp_path / "boot").write_text("another-boot")
    monkeypatch.setattr("launcher.data.images.cache.BOOT_ID", tmp_path / "boot")
    cache = filled(tmp_path, 2)
    assert cache.path.exists()
    assert list(tmp_path.glob("*.partial")) == []


def test_a_disk_that_is_too_small_is_a_warning_before_anything_is_written(tmp_path):
    free = shutil.disk_usage(tmp_path).free
    with pytest.warns(DataWarning, match=r"takes .* GB, more than half of what is free"):
        assert open_cache(tmp_path, "k", free // 60, SHAPE) is None


def test_a_disk_that_fills_up_ends_the_storing_and_not_the_run(tmp_path):
    cache = open_cache(tmp_path, "k", 3, SHAPE)
    cache.put(0, image(0))

    def fill():
        resource.setrlimit(resource.RLIMIT_FSIZE, (8200, 8200))
        logging.getLogger("launcher").addHandler(logging.NullHandler())
        cache.put(2, image(2))
        assert cache.get(2) is None
        assert (cache.get(0) == 0).all()

    assert in_child(fill) == 0
    assert num_stored(cache) == 1


def test_a_folder_that_cannot_be_made_is_a_warning(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.warns(DataWarning, match=r"no cache of decoded images in .*: (Not a directory|File exists)"):
        assert open_cache(tmp_path / "file", "k", 3, SHAPE) is None


# -- of photographs


def samples(images):
    return [
        {name: torch.as_tensor(value) for name, value in part.sample(index, generator_for(index)).items()}
        for part in (images.train, images.validation)
        for index in range(len(part))
    ]


def batches(images, workers):
    """Two epochs of training batches, and an evaluation, as the training process gets them."""
    how = Loading(workers, torch.device("cpu"), seed=0)
    train, validation = (IndexedData(part, None, how, "any") for part in (images.train, images.validation))
    plan = BatchPlan(len(images.train), 2, None, world_size=1, rank=0, seed=0, drop_last=False)
    with loader_processes():
        loaded = LoadedBatches(train, plan, None, 2 * plan.steps_per_epoch)
        found = [loaded.step(epoch, step)[0] for epoch in range(2) for step in range(plan.steps_per_epoch)]
        return found + [batch for _, batch in validation.evaluation_batches(0, 1, 2)]


def equal(one, other):
    return all(torch.equal(a[name], b[name]) for a, b in zip(one, other, strict=True) for name in a)


def test_the_second_epoch_decodes_nothing_and_sees_the_same(tmp_path):
    write_classes(tmp_path / "set")
    config = data_config(path=tmp_path / "set", cache=str(tmp_path / "cache"))
    first = load_images(config)
    decoded = samples(first)
    for file in (tmp_path / "set").rglob("*.png"):
        file.rename(file.with_suffix(".gone"))  # nothing is left that could be decoded
    assert equal(samples(first), decoded)
    for file in (tmp_path / "set").rglob("*.gone"):
        file.rename(file.with_suffix(".png"))
    assert equal(samples(load_images(config)), decoded)


def test_without_space_the_same_pixels_come_out(tmp_path):
    write_classes(tmp_path / "set")
    (tmp_path / "file").write_text("")
    with pytest.warns(DataWarning, match="no cache"):
        without = load_images(data_config(path=tmp_path / "set", cache=str(tmp_path / "file")))
    with_cache = load_images(data_config(path=tmp_path / "set", cache=str(tmp_path / "cache")))
    assert equal(samples(without), samples(with_cache))
    assert equal(samples(without), samples(with_cache))


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_are_the_same_with_pixels_from_the_cache_and_decoded(tmp_path, workers):
    write_classes(tmp_path / "set")
    config = data_config(path=tmp_path / "set", cache=str(tmp_path / "cache"))
    (tmp_path / "file").write_text("")
    with pytest.warns(DataWarning, match="no cache"):
        decoded = batches(load_images(data_config(path=tmp_path / "set", cache=str(tmp_path / "file"))), 0)
    half = load_images(config)
    for index in range(0, len(half.train), 2):
        half.train[index]
    assert equal(batches(half, workers), decoded), "the other half is stored on the way"
    assert num_stored(half.train.cache) == len(half.train) + len(half.validation)
    assert equal(batches(load_images(config), workers), decoded)


def test_batches_of_images_of_which_some_could_not_be_stored(tmp_path):
    write_classes(tmp_path / "set")
    config = data_config(path=tmp_path / "set", cache=str(tmp_path / "cache"))
    decoded = batches(load_images(data_config(path=tmp_path / "set", cache=str(tmp_path / "other"))), 0)
    partly = load_images(config)
    partly.train[0]
    partly.train.cache._writable = False  # as after an error
    found = batches(partly, 0)
    assert equal(found, decoded)
    assert num_stored(partly.train.cache) == 1


def test_loader_processes_hand_over_numbers_and_no_pixels(tmp_path):
    images = load_images(data_config(path=write_classes(tmp_path / "set"), cache=str(tmp_path / "cache")))
    data = IndexedData(images.train, None, Loading(0, torch.device("cpu"), seed=0), "training")
    request = BatchRequest(0, 0, (0, 1))
    fetched = data.fetch(request)
    assert set(fetched.batch) == {"stored", "label", "region"}
    assert set(data.usable(fetched, request)) == {"image", "label", "region"}


def test_a_collate_of_ones_own_gets_pixels(tmp_path):
    images = load_images(data_config(path=write_classes(tmp_path / "set"), cache=str(tmp_path / "cache")))
    data = IndexedData(images.train, default_collate, Loading(0, torch.device("cpu"), seed=0), "training")
    assert set(data.fetch(BatchRequest(0, 0, (0, 1))).batch) == {"image", "label", "region"}


def test_what_is_written_into_a_sample_is_in_no_later_one(tmp_path):
    images = load_images(data_config(path=write_classes(tmp_path / "set"), cache=str(tmp_path / "cache")))
    for part in (images.train, images.validation):
        before = part[0]["image"].clone()
        part[0]["image"].zero_()
        assert torch.equal(part[0]["image"], before)


@pytest.mark.parametrize("change", ["content", "time", "name"])
def test_a_file_that_changed_is_decoded_again(tmp_path, change):
    write_classes(tmp_path / "set")
    config = data_config(path=tmp_path / "set", cache=str(tmp_path / "cache"))
    samples(load_images(config))
    file = tmp_path / "set" / "cat" / "0.png"
    if change == "content":
        file.write_bytes(encoded(corners()))
    elif change == "time":
        os.utime(file, ns=(1, 1))
    else:
        file.rename(file.with_name("other.png"))
    assert num_stored(load_images(config).train.cache) == 0


def test_auto_lies_below_the_users_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    images = load_images(data_config(path=write_classes(tmp_path / "set"), cache="auto"))
    samples(images)
    assert [file.suffix for file in (tmp_path / "home" / "fp16-launcher").iterdir()] == [".images"]
