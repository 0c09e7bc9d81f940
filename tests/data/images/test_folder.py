import os
import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from torch.utils.data import DataLoader

from launcher.data.batch_plan import BatchPlan
from launcher.data.images.folder import list_folder
from launcher.data.images.registry import load_images
from launcher.data.loader import LoaderConfig
from launcher.data.map_loader import MapDataset, MapLoader
from launcher.data.split import stratified
from launcher.errors import ConfigError, DataError, DataWarning
from tests.data.images.photographs import (
    QUARTERS,
    corner_colours,
    corners,
    data_config,
    encoded,
    write_classes,
)
from tests.ranks.harness import run_ranks

REPOSITORY = Path(__file__).resolve().parents[3]
ANTS_BEES = REPOSITORY.parent / "shared" / "data" / "ants_bees"


def listed(folder, val_fraction=0.25):
    return described(list_folder(folder, val_fraction))


def described(index):
    """Path, class, and whether it is held out, of each photograph."""
    return {
        (path_of(index, n), index.classes[index.labels[n]], n >= index.num_train) for n in range(len(index))
    }


def path_of(index, number):
    return index.identity(number).partition("\0")[0]


# -- which files, which labels, which split


def test_class_folders_are_split_by_class(tmp_path):
    listing = list_folder(write_classes(tmp_path), 0.25)
    assert listing.classes == ("cat", "dog")
    assert (listing.num_train, listing.labels[6:]) == (6, (0, 1))
    paths = {f"{name}/{number}.png": name for name in ("cat", "dog") for number in range(4)}
    assert {path: label for path, label, _ in described(listing)} == paths


def test_nothing_is_held_out_where_that_is_asked_for(tmp_path):
    listing = list_folder(write_classes(tmp_path), 0)
    assert (listing.num_train, len(listing)) == (8, 8)
    images = load_images(data_config(path=tmp_path, val_fraction=0))
    assert (len(images.train), len(images.validation)) == (8, 0)


def test_the_split_depends_on_names_and_fraction_alone(tmp_path):
    first = listed(write_classes(tmp_path / "a", count=20))
    torch.manual_seed(7)
    assert listed(write_classes(tmp_path / "b", ("dog", "cat"), count=20)) == first
    assert listed(tmp_path / "a", 0.5) != first


@pytest.mark.parametrize("name", ["val", "valid", "validation", "test"])
def test_the_split_of_the_folders_is_kept(tmp_path, name):
    write_classes(tmp_path / "train", count=3)
    write_classes(tmp_path / name, count=2)
    listing = list_folder(tmp_path, 0.25)
    assert (listing.num_train, len(listing)) == (6, 10)
    assert {path.split("/")[0] for path, _, out in described(listing) if out} == {name}


@pytest.mark.parametrize(
    ("train", "held_out"),
    [
        ("Train", "Test"),
        ("TRAIN", "VAL"),
        ("training", "validation"),
    ],
)
def test_usual_names_of_splits_are_known_in_any_case(tmp_path, train, held_out):
    write_classes(tmp_path / train, count=3)
    write_classes(tmp_path / held_out, count=2)
    write_classes(tmp_path / "seg_pred", ("a",))
    listing = list_folder(tmp_path, 0.25)
    assert (listing.classes, listing.num_train, len(listing)) == (("cat", "dog"), 6, 10)
    assert {path.split("/")[0] for path, _, out in described(listing) if out} == {held_out}


@pytest.mark.parametrize(("train", "held_out"), [("seg_train", "seg_test"), ("train_set", "test-set")])
def test_parts_of_other_names_are_no_classes_and_are_named_by_keys(tmp_path, train, held_out):
    write_classes(tmp_path / train / train, count=3)
    write_classes(tmp_path / held_out / held_out, count=2)
    with pytest.raises(
        DataError, match=r"seem to be the parts of a set, .* data\.train=NAME data\.validation="
    ):
        list_folder(tmp_path, 0.25)
    listing = list_folder(tmp_path, 0.25, f"{train}/{train}", f"{held_out}/{held_out}")
    assert (listing.classes, listing.num_train, len(listing)) == (("cat", "dog"), 6, 10)


def test_the_parts_of_a_set_are_named_by_keys(tmp_path):
    for name in ("part1", "part2"):
        write_classes(tmp_path / name, count=4)
    split = list_folder(tmp_path, 0.25, "part2", "part1")
    assert (split.classes, split.num_train, path_of(split, 0)) == (("cat", "dog"), 8, "part2/cat/0.png")
    assert list_folder(tmp_path, 0.25, ".").classes == ("part1", "part2")
    held_out = list_folder(tmp_path, 0.25, "part1")
    assert (held_out.classes, held_out.num_train, len(held_out)) == (("cat", "dog"), 6, 8)


@pytest.mark.parametrize(
    ("train", "validation", "message"),
    [
        (None, "b", r"data\.validation=b needs data"),
    ],
)
def test_the_keys_of_splits_name_folders(tmp_path, train, validation, message):
    write_classes(tmp_path)
    with pytest.raises(ConfigError, match=message):
        list_folder(tmp_path, 0.25, train, validation)


def test_val_is_preferred_to_test_and_classes_may_be_called_train(tmp_path):
    for name in ("train", "val", "test"):
        write_classes(tmp_path / "split" / name, count=2)
    assert {path.split("/")[0] for path, _, _ in listed(tmp_path / "split")} == {
        "train",
        "val",
    }
    write_classes(tmp_path / "vehicles", ("train", "car"))
    assert list_folder(tmp_path / "vehicles", 0.25).classes == ("car", "train")


@pytest.mark.parametrize("beside", [(), ("extra",)])
def test_class_folders_in_train_without_a_held_out_folder_are_no_class(tmp_path, beside):
    for name in ("train", *beside):
        write_classes(tmp_path / name)
    with pytest.raises(DataError, match=r"train/, which seem to be the parts of a set"):
        list_folder(tmp_path, 0.25)
    assert list_folder(tmp_path, 0.25, "train").classes == ("cat", "dog")


def test_files_at_any_depth_with_any_case_count_and_others_are_counted_in_one_line(tmp_path):
    write_classes(tmp_path)
    (tmp_path / "cat" / "deep" / "er").mkdir(parents=True)
    Image.new("RGB", (4, 4)).save(tmp_path / "cat" / "deep" / "er" / "A.JPG", "JPEG")
    for name in ("notes.txt", "cat/a.txt", "cat/b.json", "cat/none"):
        (tmp_path / name).write_text("no image")
    (tmp_path / "cat" / ".hidden.png").write_text("no image")
    (tmp_path / ".ipynb_checkpoints").mkdir()
    with pytest.warns(DataWarning, match=r"4 file\(s\) below .* 2 \.txt, 1 "):
        found = listed(tmp_path)
    assert len(found) == 9
    assert "cat/deep/er/A.JPG" in {path for path, _, _ in found}


def test_links_to_class_folders_and_images_are_followed_and_loops_are_not(tmp_path):
    write_classes(tmp_path / "set")
    write_classes(tmp_path / "elsewhere", ("owl",))
    (tmp_path / "set" / "owl").symlink_to(tmp_path / "elsewhere" / "owl")
    (tmp_path / "set" / "cat" / "again").symlink_to(tmp_path / "set" / "cat")
    (tmp_path / "set" / "dog" / "all").symlink_to(tmp_path / "set")
    (tmp_path / "set" / "cat" / "gone.png").symlink_to(tmp_path / "nothing")
    with pytest.warns(DataWarning, match=r"1 file\(s\) .* 1 \.png"):
        listing = list_folder(tmp_path / "set", 0.25)
    assert listing.classes == ("cat", "dog", "owl")
    assert Counter(listing.labels) == {0: 4, 1: 4, 2: 4}


def remove(folder):
    for file in folder.iterdir():
        file.unlink()


@pytest.mark.parametrize(
    ("spoil", "error", "message"),
    [
        (lambda d: remove(d / "cat"), DataError, r"class folder .*/cat has no images\. Remove it"),
        (lambda d: shutil.rmtree(d / "cat"), DataError, r"has one class, dog"),
        (
            lambda d: [remove(d / c) or (d / c).rmdir() for c in ("cat", "dog")],
            DataError,
            "has no class fold",
        ),
        (
            lambda d: write_classes(d / "train") and (d / "val").mkdir(),
            DataError,
            r"val has no class folders",
        ),
        (
            lambda d: write_classes(d / "train") and write_classes(d / "val", ("cat", "owl", "emu")),
            DataError,
            r"2 label\(s\) are not in the training set: emu, owl\. .* cat, dog",
        ),
    ],
)
def test_folders_that_cannot_be_trained_on(tmp_path, spoil, error, message):
    write_classes(tmp_path)
    spoil(tmp_path)
    with pytest.raises(error, match=message):
        list_folder(tmp_path, 0.25)


@pytest.mark.parametrize("fraction", [0.01, 0.999])
def test_a_split_that_leaves_nothing_is_refused(tmp_path, fraction):
    write_classes(tmp_path, count=2)
    with pytest.raises(DataError, match=r"of the 4 images of data\.path=.* leaves . for training and . for"):
        list_folder(tmp_path, fraction)


def list_without_permission(env, folder):
    os.setuid(65534)
    with pytest.raises(DataError) as raised:
        list_folder(folder, 0.25)
    return str(raised.value)


NOT_UTF_8 = os.fsdecode(b"caf\xe9")


def test_names_with_other_bytes_or_backslashes_stay_apart(tmp_path):
    names = (NOT_UTF_8, os.fsdecode(b"caf\xe8"), "caf\\xe9", "caf\xe9")
    assert len(list_folder(write_classes(tmp_path, names), 0.25).classes) == 4


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become a user without permission")
def test_a_folder_without_permission_is_named():
    folder = write_classes(Path("/tmp") / f"launcher-{os.getpid()}-unreadable")
    try:
        (folder / "cat").chmod(0o700)
        (said,) = run_ranks(1, list_without_permission, folder)
    finally:
        shutil.rmtree(folder)
    assert f"the folder {folder}/cat cannot be read: Permission denied" in said


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 3), min_size=1, max_size=60), st.floats(0.05, 0.95))
def test_stratified_holds_the_same_share_of_every_class_out(labels, fraction):
    labels = torch.tensor(labels)
    held_out = stratified(labels, fraction)
    for label in labels.unique():
        of_class = labels == label
        assert abs(int(held_out[of_class].sum()) - fraction * int(of_class.sum())) <= 0.5


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (data_config(), r"needs data\.path=DIR"),
        (
            data_config(path="/tmp", size=3),
            r"data\.size is not an option of data=imagefolder\..* It has image_size",
        ),
        (data_config(path="/tmp", image_size=0), r"data\.image_size=0: must be a whole number of 1 to 4096"),
        (data_config(path="/tmp", crop_scale=1.5), r"data\.crop_scale=1\.5: must be a number above 0"),
        (data_config(path="/tmp", cache=False), r"data\.cache=False: must be none, auto"),
        (data_config(path="/tmp", csv=3), r"data\.csv=3: must be null or a text"),
    ],
)
def test_bad_config_is_a_config_error(config, message):
    with pytest.raises(ConfigError, match=message):
        load_images(config)


def test_padding_is_refused_where_regions_are_cut(tmp_path):
    write_classes(tmp_path)
    config = data_config(path=tmp_path)
    config = replace(config, augment=replace(config.augment, random_crop_padding=4))
    message = r"data\.augment\.random_crop_padding=4: must be 0\. .* data\.crop_scale"
    with pytest.raises(ConfigError, match=message):
        load_images(config)


# -- samples


def write_corners(folder, count=4):
    for name in ("a", "b"):
        (folder / name).mkdir(parents=True)
        for index in range(count):
            (folder / name / f"{index}.png").write_bytes(encoded(corners(64 + index, 48)))
    return folder


@pytest.mark.parametrize("cache", ["none", "cache"])
def test_evaluation_sees_the_middle_upright_and_unmirrored(tmp_path, cache):
    where = cache if cache == "none" else str(tmp_path / cache)
    images = load_images(data_config(path=write_corners(tmp_path / "set"), cache=where))
    assert (images.channels, images.height, images.width) == (3, 16, 16)
    for index in range(len(images.validation)):
        sample = images.validation[index]
        assert sample["image"].dtype == torch.uint8
        assert corner_colours(sample["image"].numpy()) == QUARTERS
        assert sample["label"] == index


@pytest.mark.parametrize("cache", ["none", "cache"])
@pytest.mark.parametrize("flip", [False, True])
def test_without_random_crops_training_sees_the_whole_image_mirrored_for_half(tmp_path, cache, flip):
    where = cache if cache == "none" else str(tmp_path / cache)
    write_classes(tmp_path / "set")
    for path in (tmp_path / "set").rglob("*.png"):
        path.write_bytes(encoded(corners(48, 48)))
    config = data_config(path=tmp_path / "set", cache=where, flip=flip, crop_scale=1.0)
    images = load_images(config)
    transform = images.train_transform(config.augment)
    mean, std = torch.tensor([images.mean, images.std]).view(2, 3, 1, 1)
    seen = set()
    for seed in range(20):
        torch.manual_seed(seed)
        sample = images.train[0]
        batch = {name: torch.as_tensor(value)[None] for name, value in sample.items()}
        result = transform(batch)
        assert set(result) == {"image", "label"}
        pixels = ((result["image"] * std + mean) * 255)[0]
        assert pixels.shape == (3, 16, 16)
        seen.add(corner_colours(pixels.round().numpy()) == QUARTERS)
    assert seen == ({True, False} if flip else {True})


def test_a_sample_depends_on_the_seed_alone(tmp_path):
    images = load_images(data_config(path=write_corners(tmp_path / "set")))
    found = []
    for seed in (0, 1, 0):
        torch.manual_seed(seed)
        found.append(images.train[1]["image"])
    assert torch.equal(found[0], found[2])
    assert not torch.equal(found[0], found[1])


@pytest.mark.parametrize("cache", ["none", "cache"])
@pytest.mark.parametrize("max_bad_samples", [0, 1])
def test_a_broken_image_is_named_or_left_out(tmp_path, cache, max_bad_samples):
    write_classes(tmp_path / "set")
    path = Path(list_folder(tmp_path / "set", 0.25).source(0)[1])
    path.write_bytes(b"\xff\xd8\xff\xe0 no image")
    where = cache if cache == "none" else str(tmp_path / cache)
    images = load_images(data_config(path=tmp_path / "set", cache=where))
    how = LoaderConfig(workers=0, device=torch.device("cpu"), seed=0, max_bad_samples=max_bad_samples)
    plan = BatchPlan(6, batch_size=6, micro_batch=None, world_size=1, rank=0, seed=0, drop_last=False)
    data = MapDataset(images.train, None, how, "training")
    batches = MapLoader(data, plan, images.train_transform(data_config().augment), total_steps=2)
    if max_bad_samples == 0:
        with pytest.raises(DataError, match=rf"sample 0.*{path} cannot be read as an image"):
            batches.step(0, 0)
        return
    for epoch in range(2):
        (batch,) = batches.step(epoch, 0)
        assert batch["image"].shape == (5, 3, 16, 16)
        assert batches.latest_bad() == 1


def test_fingerprints_know_names_labels_and_sizes_but_not_times_or_places(tmp_path):
    for name in ("here", "there"):
        write_classes(tmp_path / name)
    sets = [load_images(data_config(path=tmp_path / name)).train.fingerprint() for name in ("here", "there")]
    assert sets[0] == sets[1]
    (tmp_path / "there" / "cat" / "0.png").write_bytes(encoded(corners()))
    (tmp_path / "there" / "cat" / "1.png").write_bytes(encoded(corners()))
    assert load_images(data_config(path=tmp_path / "there")).train.fingerprint() != sets[0]


@pytest.mark.skipif(not ANTS_BEES.is_dir(), reason=f"no photographs in {ANTS_BEES}")
def test_the_real_photographs(tmp_path):
    images = load_images(data_config(path=ANTS_BEES, val_fraction=0.2, cache=str(tmp_path), image_size=32))
    assert (len(images.train), len(images.validation), images.classes) == (317, 80, ("ants", "bees"))
    batch = next(iter(DataLoader(images.validation, batch_size=80)))
    normalised = images.eval_transform()(batch)["image"]
    assert normalised.shape == (80, 3, 32, 32)
    assert float(normalised.mean().abs()) < 0.4
    assert 0.5 < float(normalised.std()) < 1.5
