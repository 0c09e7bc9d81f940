import random
import re

import numpy
import pytest
import torch
from torch.utils.data import Dataset

from launcher.data.reader import BatchIndices, Reader, collated, columns
from launcher.data.seeding import EVALUATION
from launcher.errors import DataError


class Drawn(Dataset):
    """Each sample is three numbers, from the generators that stock augmentations draw from."""

    def __len__(self):
        return 10

    def __getitem__(self, index):
        return {"drawn": torch.tensor([random.random(), numpy.random.rand(), torch.rand(()).item()])}


class Listed(Dataset):
    def __init__(self, *samples):
        self.samples = samples

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, index):
        found = self.samples[index]
        if isinstance(found, Exception):
            raise found
        return found


def read(dataset, *indices, epoch=0, position=0, seed=0, collate=None):
    return Reader(dataset, collate, seed)[BatchIndices(epoch, position, indices)]


def test_random_numbers_depend_on_seed_epoch_and_position_alone():
    whole = read(Drawn(), 3, 4, 5, position=7).batch["drawn"]
    torch.rand(5), random.random(), numpy.random.rand()
    assert torch.equal(whole, read(Drawn(), 8, 9, 6, position=7).batch["drawn"]), "not on the samples"
    assert len(whole.unique()) == 9, "each sample of a micro-batch draws others"
    for other in ({"seed": 1}, {"epoch": 1}, {"epoch": EVALUATION}, {"position": 8}):
        moved = read(Drawn(), 3, 4, 5, **{"position": 7, **other}).batch["drawn"]
        assert not torch.isclose(moved, whole).any(), other


DRAWS = {
    "Python": lambda: random.random(),
    "NumPy": lambda: numpy.random.rand(),
    "torch": lambda: torch.rand(()).item(),
}


class RarelyDrawn(Dataset):
    """Draws for one sample only. `read` has the indices in the order in which they were asked for."""

    def __init__(self, drawing, draw=DRAWS["Python"]):
        self.drawing = drawing
        self.draw = draw
        self.read = []

    def __len__(self):
        return 100

    def __getitem__(self, index):
        self.read.append(index)
        drawn = self.draw() if index == self.drawing else 0.0
        return {"drawn": torch.tensor([drawn], dtype=torch.float64)}


class Together(RarelyDrawn):
    """`fails_at` is an index that cannot be read."""

    def __init__(self, drawing=None, draw=DRAWS["Python"], fails_at=None):
        super().__init__(drawing, draw)
        self.fails_at = fails_at
        self.asked = []

    def __getitem__(self, index):
        if index == self.fails_at:
            raise ValueError("broken")
        return super().__getitem__(index)

    def __getitems__(self, indices):
        self.asked.append(indices)
        return [self[index] for index in indices]


def test_a_set_that_gives_several_samples_at_once_is_asked_for_them():
    dataset = Together()
    reader = Reader(dataset, None, 0)
    for position in (0, 3):
        batch = reader[BatchIndices(0, position, (7, 8, 9))].batch["drawn"]
        assert batch.shape == (3, 1)
    assert dataset.asked == [[7, 8, 9], [7, 8, 9]]
    assert len(dataset.read) == 6, "from the first request on, each sample once"


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
def test_samples_that_are_read_together_draw_what_they_draw_one_by_one(draw):
    together = read(Together(6, draw), 5, 6, 7, position=3).batch["drawn"]
    assert torch.equal(together, read(RarelyDrawn(6, draw), 5, 6, 7, position=3).batch["drawn"])
    assert together[1].all()


def test_a_sample_that_fails_among_several_is_named():
    fetched = read(Together(fails_at=4), 3, 4, 5)
    assert fetched.kept == (0, 2)
    assert [str(bad).partition(": ")[2] for bad in fetched.bad] == ["ValueError: broken"]
    assert fetched.bad[0].index == 4


@pytest.mark.parametrize("given", [{"drawn": torch.zeros(2, 1)}, [], None], ids=["a batch", "none", "None"])
def test_other_than_a_list_of_the_samples_is_not_taken_for_them(given):
    class Odd(RarelyDrawn):
        def __getitems__(self, indices):
            return given

    assert read(Odd(None), 1, 2).batch["drawn"].shape == (2, 1)


def test_hugging_face_samples_padded_within_a_batch_are_read_together():
    def padded(rows):
        longest = max(map(len, rows["words"]))
        return {"words": [torch.tensor(each + [0] * (longest - len(each))) for each in rows["words"]]}

    datasets = pytest.importorskip("datasets")
    dataset = datasets.Dataset.from_dict({"words": [[1], [1, 2], [1, 2, 3]]}).with_transform(padded)
    assert read(dataset, 0, 2, 1).batch["words"].tolist() == [[1, 0, 0], [1, 2, 3], [1, 2, 0]]


def test_a_collate_that_draws_gets_numbers_of_its_request():
    def collate(samples):
        drawn = torch.tensor([draw() for draw in DRAWS.values()])
        return {
            "mixed": drawn.expand(len(samples), 3),
            "drawn": samples[-1]["drawn"].expand(len(samples), -1),
        }

    reader = Reader(Drawn(), collate, 0)
    one, two, three = (reader[BatchIndices(0, position, (1, 2))].batch["mixed"] for position in (0, 2, 4))
    again = read(Drawn(), 1, 2, position=4, collate=collate).batch
    assert not torch.isclose(one, two).any()
    assert not torch.isclose(two, three).any()
    assert torch.equal(three, again["mixed"]), "also as the first request of a reader"
    assert not torch.isclose(again["mixed"][0], again["drawn"][0].float()).any(), "nor those of a sample"


def test_neighbouring_positions_draw_unrelated_numbers():
    drawn = read(Drawn(), *range(10)).batch["drawn"].double()
    assert len(drawn.flatten().unique()) == 30
    assert drawn.std(dim=0).min() > 0.15  # of uniform numbers: 0.29


def test_samples_that_cannot_be_read_are_named_and_left_out():
    def of(number):
        return {"x": torch.tensor(number)}

    fetched = read(Listed(of(1), ValueError("torn"), of(3), DataError("no image: b.jpg")), 0, 1, 2, 3)
    assert fetched.batch["x"].tolist() == [1, 3]
    assert fetched.kept == (0, 2)
    assert [bad.index for bad in fetched.bad] == [1, 3]
    first, second = map(str, fetched.bad)
    assert first.startswith("sample 1 at ")
    assert first.endswith("ValueError: torn")
    assert __file__ in first
    assert second.endswith(": no image: b.jpg"), "a DataError says by itself what is wrong"
    assert "Traceback" in fetched.bad[0].traceback


def test_a_batch_of_samples_that_are_none_is_left_out_as_unreadable() -> None:
    """As each of them would be in a batch with others, whatever the number of ranks."""
    fetched = read([None, None], 0, 1)
    assert (fetched.batch, fetched.kept, fetched.failure) == (None, (), "")
    assert [bad.index for bad in fetched.bad] == [0, 1]


def test_a_sample_that_is_none_is_named_and_left_out():
    good = {"x": torch.ones(2)}
    fetched = read(Listed(None, good, good), 0, 1, 2)
    (bad,) = map(str, fetched.bad)
    assert bad.startswith("sample 0")
    assert bad.endswith("the data set returned None")
    assert (fetched.failure, fetched.kept) == ("", (1, 2))


def test_samples_that_cannot_be_collated_are_named():
    good, odd = {"x": torch.ones(2)}, {"x": object()}
    assert read(Listed(good, odd), 0, 1).failure.startswith("samples 0, 1: TypeError")


def test_a_failure_of_the_collate_names_it():
    def collate(samples):
        raise RuntimeError("kaboom")

    failure = read(Listed({"x": 1}, {"x": 2}), 0, 1, collate=collate).failure
    assert failure.startswith("samples 0, 1 in the recipe's collate at ")
    assert failure.endswith(", in collate: RuntimeError: kaboom")


def test_shared_memory_that_is_full_blames_no_sample():
    def full(samples):
        raise RuntimeError(
            "unable to allocate shared memory(shm) for file </torch_1_0>: No space left on device (28)"
        )

    fetched = read(Listed({"x": 1.0}, {"x": 2.0}), 0, 1, collate=full)
    assert fetched.failure.startswith(
        "/dev/shm has no room for a batch of a loader process. Start docker with --shm-size"
    )
    assert fetched.bad == ()


def test_a_request_without_a_readable_sample_has_no_batch():
    fetched = read(Listed(ValueError("torn")), 0)
    assert (fetched.batch, fetched.kept, fetched.failure) == (None, (), "")


def test_columns_names_the_parts_of_a_tuple():
    pairs = Listed((torch.ones(2), 1), (torch.zeros(2), 0))
    batch = read(pairs, 1, 0, collate=columns("image", "label")).batch
    assert batch["image"].tolist() == [[0, 0], [1, 1]]
    assert batch["label"].tolist() == [0, 1]
    single = read(Listed(torch.ones(2)), 0, collate=columns("x")).batch
    assert single["x"].shape == (1, 2)


@pytest.mark.parametrize(
    ("sample", "collate", "text"),
    [
        ((torch.ones(2), 1), None, 'a tuple of 2, whose columns have no names.*columns("image", "label")'),
        (torch.ones(2), None, "a Tensor, whose columns have no names"),
        (
            (torch.ones(2), 1, 2),
            columns("image", "label"),
            "a sample has 3 parts, and columns() was given 2 names: image, label.",
        ),
        (torch.ones(2), columns("image", "label"), "a sample has 1 part, and"),
        ({"text": "words"}, None, "text (list)"),
        ({"x": 1}, lambda samples: [1], "AttributeError: 'list' object"),
        ({"x": 1}, lambda samples: {"x": None}, "x (NoneType)"),
    ],
)
def test_what_cannot_be_collated_is_explained(sample, collate, text):
    failure = read(Listed(sample), 0, collate=collate).failure
    for part in text.split(".*"):
        assert part in failure, failure


@pytest.mark.parametrize(
    ("samples", "collate", "text"),
    [
        ([{"x": torch.ones(2)}, {"x": torch.ones(3)}], None, "got [2] at entry 0 and [3] at entry 1"),
        ([torch.ones(3), torch.ones(2)], columns("x"), "got [3] at entry 0 and [2] at entry 1"),
        ([{"x": 1, "y": 2}, {"x": 1}], None, "KeyError: 'y'"),
    ],
)
def test_samples_that_differ_are_named_with_torchs_reason(samples, collate, text):
    failure = read(Listed(*samples), 0, 1, collate=collate).failure
    assert failure.startswith("samples 0, 1")
    assert text in failure


@pytest.mark.parametrize(
    ("made", "found"),
    [
        ({"x": torch.ones(15, 2), "label": torch.ones(15)}, "x [15, 2], label [15]"),
        ({"x": torch.ones(17, 2)}, "x [17, 2]"),
        ({"x": torch.ones(15, 2), "y": torch.ones(14), "z": torch.tensor(1)}, "x [15, 2], y [14], z []"),
        ({}, "no column"),
    ],
)
def test_a_collate_that_leaves_out_or_repeats_samples_is_refused(made, found):
    """Else nothing shows it, and an evaluation is not over every sample once."""
    samples = Listed(*[{"x": torch.ones(2)}] * 16)
    failure = read(
        samples, *range(16), collate=lambda samples: made if len(samples) == 16 else samples
    ).failure
    assert f"was given 16 samples and returned {found}: no column has a row per sample" in failure
    assert "transpose" not in failure


def test_a_collate_may_pack_columns_of_other_lengths():
    packed = {"tokens": torch.ones(40), "offsets": torch.ones(17), "length": torch.ones(16)}
    samples = Listed(*[{"x": torch.ones(2)}] * 16)
    assert read(samples, *range(16), collate=lambda samples: packed).batch == packed


def test_columns_that_are_no_tensors_are_refused_with_what_to_return():
    text = (
        "columns that are not tensors: name (list). Each column of a batch must be a tensor with a row "
        "per sample. Leave these out, or turn them into tensors, in the data set or in Recipe.collate. "
        "Hugging Face's data sets give tensors after .with_format('torch')."
    )
    with pytest.raises(DataError, match=re.escape(text)):
        collated([{"x": torch.ones(2), "name": "one"}], None)
