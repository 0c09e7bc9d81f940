"""Photographs in a CSV: which columns are meant, how paths are found, and what is refused."""

import pytest

from launcher.data.images.csv_file import list_csv
from launcher.data.images.registry import load_images
from launcher.errors import DataError
from tests.data.images.photographs import ANTS_BEES, data_config, write_classes


def written(tmp_path, header, *rows, separator=","):
    """A CSV of these columns beside cat/ and dog/ of four images each."""
    if not (tmp_path / "cat").exists():
        write_classes(tmp_path)
    rows = rows or [f"{name}/{n}.png{separator}{name}" for name in ("cat", "dog") for n in range(4)]
    (tmp_path / "mine.csv").write_bytes("\n".join([header, *rows, ""]).encode())
    return tmp_path / "mine.csv"


def listed(listing):
    return {
        (listing.identity(n).partition("\0")[0], listing.classes[listing.labels[n]])
        for n in range(len(listing))
    }


ALL = {(f"{name}/{n}.png", name) for name in ("cat", "dog") for n in range(4)}


@pytest.mark.parametrize(
    "header",
    [
        *("images,label", "image,labels", "path,label", "file,class", "filename,target", "image_id,label"),
        *("Image,Class", "Filename,Label", "picture,species", "images,species", "picture,label"),
    ],
)
def test_columns_are_found_by_their_usual_names_or_as_the_only_two(tmp_path, header):
    assert listed(list_csv(written(tmp_path, header), None, 0.25)) == ALL


@pytest.mark.skipif(not ANTS_BEES.is_dir(), reason=f"no photographs in {ANTS_BEES}")
@pytest.mark.parametrize("key", ["csv", "path"])
def test_the_csv_of_a_write_up_is_read_as_it_is_with_a_split_of_80_to_20(tmp_path, key):
    """Paths and numbers below images,label, and no key but that of the file."""
    paths = sorted(ANTS_BEES.rglob("*.jpg"))
    rows = [f"{path},{int(path.parent.name == 'bees')}" for path in paths]
    (tmp_path / "photos.csv").write_text("\n".join(["images,label", *rows]) + "\n")
    file = str(tmp_path / "photos.csv")
    config = data_config(val_fraction=0.2, **{key: file})
    images = load_images(config)
    assert (len(paths), len(images.train), len(images.validation)) == (397, 317, 80)
    assert images.classes == ("0", "1")
    assert images.validation[0]["image"].shape == (3, 16, 16)
    assert {images.validation[n]["label"] for n in range(80)} == {0, 1}


def test_labels_that_are_numbers_are_in_their_order(tmp_path):
    rows = [f"cat/{n % 4}.png,{n}" for n in range(12)]
    listing = list_csv(written(tmp_path, "images,label", *rows), None, 0)
    assert listing.classes == tuple(map(str, range(12)))


@pytest.mark.parametrize("separator", [";", "\t"])
def test_another_separator_is_found_in_the_first_line(tmp_path, separator):
    file = written(tmp_path, f"images{separator}label", separator=separator)
    assert listed(list_csv(file, None, 0.25)) == ALL


def test_an_index_and_other_columns_are_not_read(tmp_path):
    rows = [f'{n},cat/{n}.png,{"ab"[n % 2]},"1,2",x' for n in range(4)]
    listing = list_csv(written(tmp_path, "\ufeff,path,label,box,note", *rows), None, 0.5)
    assert (len(listing), listing.classes, listing.num_train) == (4, ("a", "b"), 2)


def test_files_may_lie_below_data_path_and_have_no_suffix(tmp_path):
    write_classes(tmp_path / "train_images", count=2)
    rows = [f"{name}/{n},{name},x" for name in ("cat", "dog") for n in range(2)]
    file = written(tmp_path, "image_id,breed,note", *rows)
    options = {"csv": str(file), "label_column": "breed"}
    images = load_images(data_config(path=tmp_path / "train_images", val_fraction=0.5, **options))
    assert (images.classes, len(images.train), len(images.validation)) == (("cat", "dog"), 2, 2)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"picture,species,note\na,b,c\n", r"columns picture, species, note\. .*data\.image_column=NAME"),
        (b"picture,label,note\na,b,c\n", r"Which has the paths of the images, which the labels"),
        (b"", r"mine\.csv cannot be read: Empty CSV file"),
        (b"path,label\ncat/0.png\n", r"mine\.csv cannot be read: .*Expected 2 columns, got 1"),
        (
            b"path,label\ncat/0.png,cat,dog\n",
            r"cannot be read: .*Row #2: Expected 2 columns, got 3",
        ),
        (b"path,label\ncat/0.png,\n", r"mine\.csv, row 1: path and label must not be empty"),
        (
            b"path,label\ncat/9.png,cat\ncat/8.png,cat\n",
            r"2 file\(s\) that cannot be found .*: cat/9\.png, cat/8",
        ),
        (
            b"path,label,split\ncat/0.png,cat,held\n",
            r"row 1: split='held' is not one of train, training, val",
        ),
        (b"path,label,split\ncat/0.png,cat,train\n", r"none for validation"),
        (b"path,label\n\xff\xfe,cat\n", r"cannot be read: .*UTF8"),
        (b'path,label\n"cat/0.png,cat\n', r"mine\.csv cannot be read: "),
        (
            b"path,label,split\ncat/0.png,cat,train\ndog/0.png,dog,val\n",
            r"1 label\(s\) .* not in the training set: dog",
        ),
    ],
)
def test_a_csv_that_cannot_be_used(tmp_path, text, message):
    written(tmp_path, "").write_bytes(text)
    with pytest.raises(DataError, match=message):
        list_csv(tmp_path / "mine.csv", None, 0.25)


def test_what_the_config_names_has_to_be_there(tmp_path):
    with pytest.raises(DataError, match=r"no\.csv cannot be read: .*No such file"):
        list_csv(tmp_path / "no.csv", None, 0.25)
    with pytest.raises(DataError, match=r"columns images, label\. Which has .* data\.image_column=NAME"):
        list_csv(written(tmp_path, "images,label"), None, 0.25, "imags")
