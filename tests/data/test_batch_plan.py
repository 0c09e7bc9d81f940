import os
from collections import UserDict

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from launcher.data.batch_plan import BatchPlan, cut, epoch_order, rank_slice
from launcher.data.tensors import DeviceBatches, TensorData
from launcher.errors import DataError
from tests.ranks.harness import run_ranks

WORLDS = (1, 2, 3, 4, 7)


def plan(num_samples, batch_size, *, world_size=1, rank=0, micro_batch=None, seed=0, drop_last=False):
    return BatchPlan(num_samples, batch_size, micro_batch, world_size, rank, seed, drop_last)


def numbered(num_samples):
    return TensorData({"number": torch.arange(num_samples)})


def epoch_of(num_samples, batch_size, world_size, micro_batch, drop_last, epoch=0):
    """Numbers per step: what all ranks together train on, in rank order."""
    loaders = [
        DeviceBatches(
            numbered(num_samples),
            plan(
                num_samples,
                batch_size,
                world_size=world_size,
                rank=rank,
                micro_batch=micro_batch,
                drop_last=drop_last,
            ),
            None,
        )
        for rank in range(world_size)
    ]
    steps = []
    for step in range(loaders[0].plan.steps_per_epoch):
        batches = [batch for loader in loaders for batch in loader.step(epoch, step)]
        steps.append(torch.cat([batch["number"] for batch in batches]))
    return steps


sizes = st.fixed_dictionaries(
    {
        "num_samples": st.integers(1, 150),
        "batch_size": st.integers(1, 60),
        "micro_batch": st.none() | st.integers(1, 20),
        "drop_last": st.booleans(),
    }
)


@settings(max_examples=60, deadline=None)
@given(sizes)
def test_every_world_size_gives_the_same_global_batches(size):
    alone = epoch_of(world_size=1, **size)
    for world_size in WORLDS[1:]:
        together = epoch_of(world_size=world_size, **size)
        assert len(together) == len(alone)
        assert all(map(torch.equal, together, alone))


@settings(max_examples=60, deadline=None)
@given(sizes, st.sampled_from(WORLDS))
def test_an_epoch_visits_every_sample_once(size, world_size):
    numbers = torch.cat(epoch_of(world_size=world_size, **size))
    num_samples, batch_size = size["num_samples"], size["batch_size"]
    left_out = num_samples % batch_size if size["drop_last"] and num_samples >= batch_size else 0
    assert len(numbers) == num_samples - left_out
    assert len(set(numbers.tolist())) == len(numbers)


@settings(max_examples=100, deadline=None)
@given(sizes, st.sampled_from(WORLDS))
def test_micro_batches_keep_to_their_size_and_number(size, world_size):
    largest = 0
    for rank in range(world_size):
        rank_plan = plan(world_size=world_size, rank=rank, **size)
        for step in range(rank_plan.steps_per_epoch):
            pieces = rank_plan.micro_positions(step)
            assert all(0 < len(piece) <= (size["micro_batch"] or size["batch_size"]) for piece in pieces)
            largest = max(largest, len(pieces))
    assert largest == plan(world_size=world_size, **size).micro_batches


@pytest.mark.parametrize(
    ("num_samples", "batch_size", "drop_last", "steps"),
    [
        (10, 5, False, 2),
        (10, 5, True, 2),
        (11, 5, False, 3),
        (11, 5, True, 2),
        (4, 5, False, 1),
        (4, 5, True, 1),  # one step of all samples rather than none
        (1438, 128, False, 12),
        (1438, 128, True, 11),
    ],
)
def test_steps_per_epoch(num_samples, batch_size, drop_last, steps):
    assert plan(num_samples, batch_size, drop_last=drop_last).steps_per_epoch == steps


def test_a_rank_without_samples_gets_no_batches():
    loaders = [DeviceBatches(numbered(2), plan(2, 8, world_size=3, rank=rank), None) for rank in range(3)]
    assert [len(loader.step(0, 0)) for loader in loaders] == [0, 1, 1]


def test_a_step_beyond_the_epoch_is_refused():
    with pytest.raises(IndexError, match="step 2 of an epoch of 2"):
        plan(10, 5).micro_positions(2)


def test_an_empty_training_set_is_refused():
    with pytest.raises(DataError, match="empty"):
        plan(0, 5)


def test_columns_of_unequal_length_are_refused():
    with pytest.raises(DataError, match="'b': 3"):
        TensorData({"a": torch.zeros(2), "b": torch.zeros(3)})


@pytest.mark.parametrize(
    ("columns", "said"),
    [
        ({"x": np.zeros(3)}, r"the column x of TensorData is a ndarray: .*torch\.as_tensor"),
        ({"x": torch.zeros(3), "y": [1, 2, 3]}, "the column y of TensorData is a list"),
        ({"x": torch.zeros(())}, "the column x of TensorData is one number"),
    ],
)
def test_columns_that_are_no_plain_tensors_are_refused(columns, said):
    with pytest.raises(DataError, match=said):
        TensorData(columns)


def test_any_mapping_has_columns():
    assert len(TensorData(UserDict(x=torch.zeros(3)))) == 3


def test_steps_can_be_taken_in_any_order():
    loader = DeviceBatches(numbered(50), plan(50, 8), None)
    for epoch, step in [(0, 0), (0, 6), (1, 3), (0, 2), (7, 0), (1, 3)]:
        (batch,) = loader.step(epoch, step)
        assert torch.equal(batch["number"], epoch_order(50, 0, epoch)[step * 8 : (step + 1) * 8])


def test_seed_and_epoch_change_the_order():
    keys = [(seed, epoch) for seed in (0, 1, 2**40, -1) for epoch in range(4)]
    assert len({tuple(epoch_order(50, *key).tolist()) for key in keys}) == len(keys)


def test_the_stream_of_random_numbers_stays_what_it_was():
    # Written out: a change of the stream would silently change the order of every continued run.
    assert epoch_order(12, 3, 5).tolist() == [6, 0, 11, 1, 10, 2, 8, 4, 9, 3, 5, 7]


def order_after_other_draws(env):
    torch.manual_seed(7)
    torch.rand(3)
    return os.getpid(), epoch_order(12, 3, 5).tolist()


def test_the_order_is_the_same_in_every_process_whatever_was_drawn_before():
    ((process, order),) = run_ranks(1, order_after_other_draws)
    assert process != os.getpid()
    assert order == epoch_order(12, 3, 5).tolist()


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 80), st.sampled_from(WORLDS), st.integers(1, 30))
def test_evaluation_batches_cover_every_sample_once(num_samples, world_size, batch_size):
    data = numbered(num_samples)
    seen = []
    for rank in range(world_size):
        for count, batch in data.evaluation_batches(rank, world_size, batch_size):
            assert 0 < count == len(batch["number"]) <= batch_size
            seen += batch["number"].tolist()
    assert seen == list(range(num_samples))


def test_what_an_evaluation_writes_into_a_batch_is_in_no_later_one():
    data = numbered(3)
    for _ in range(2):
        ((_, batch),) = data.evaluation_batches(0, 1, 3)
        assert batch["number"].tolist() == [0, 1, 2]
        batch["number"] += 1


@given(st.integers(0, 1000), st.integers(1, 70))
def test_shares_differ_by_at_most_one(length, world_size):
    shares = [len(rank_slice(range(length), rank, world_size)) for rank in range(world_size)]
    assert sum(shares) == length
    assert max(shares) - min(shares) <= 1


def test_cut():
    assert cut(range(5, 12), 3) == [range(5, 7), range(7, 9), range(9, 12)]
    assert cut(range(65), 64) == [range(32), range(32, 65)]  # not 64 and 1
    assert cut(range(0), 3) == []


def test_select_and_move():
    data = TensorData({"image": torch.arange(12, dtype=torch.uint8).view(4, 3), "label": torch.arange(4)})
    picked = data.to(torch.device("cpu")).select(torch.tensor([3, 0]))
    assert picked["image"].tolist() == [[9, 10, 11], [0, 1, 2]]
    assert picked["label"].tolist() == [3, 0]
    assert len(data) == 4


def in_place(batch):
    batch["number"] = batch["number"][:3]
    return batch


@pytest.mark.parametrize(
    "transform",
    [in_place, lambda batch: {"number": batch["number"][:3]}],
)
def test_a_transform_that_leaves_out_samples_is_refused_with_both_numbers(transform):
    loader = DeviceBatches(numbered(20), plan(20, 4), transform)
    text = r"train_transform was given 4 samples and returned the column number in the shape \[3\]"
    with pytest.raises(DataError, match=text):
        loader.step(0, 0)


def test_a_transform_may_add_columns_of_any_shape():
    loader = DeviceBatches(numbered(20), plan(20, 4), lambda batch: {**batch, "mix": torch.tensor(0.5)})
    assert loader.step(0, 0)[0]["mix"].shape == ()
