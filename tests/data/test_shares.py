"""The shares of a batch: what `data.share` means; whatever they are, every sample is trained on once."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from launcher.data.batch_plan import BatchPlan
from launcher.data.loader import LoaderConfig, loader_processes
from launcher.data.map_loader import MapLoader
from launcher.data.shares import fixed_shares, proportional_shares
from launcher.data.sources import wrap_dataset
from launcher.errors import ConfigError
from tests.configs import composed

speeds = st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=6)


@settings(max_examples=200, deadline=None)
@given(speeds, st.integers(0, 300), st.integers(1, 2))
def test_shares_are_proportional_to_speeds_within_a_sample_and_none_is_empty(speeds, more, least):
    batch_size = least * len(speeds) + more
    shares = proportional_shares(speeds, batch_size, least)
    assert sum(shares) == batch_size
    assert min(shares) >= least
    exact = [batch_size * speed / sum(speeds) for speed in speeds]
    if min(exact) >= least:
        assert all(abs(share - each) < 1 for share, each in zip(shares, exact, strict=True))


def test_equal_speeds_have_equal_shares():
    assert proportional_shares([2.0] * 4, 64) == (16, 16, 16, 16)
    assert proportional_shares([3, 1], 64) == (48, 16)


plans = st.builds(
    BatchPlan,
    num_samples=st.integers(1, 150),
    batch_size=st.integers(6, 60),
    micro_batch=st.none() | st.integers(1, 20),
    world_size=st.just(1),
    rank=st.just(0),
    seed=st.just(0),
    drop_last=st.booleans(),
)


@settings(max_examples=100, deadline=None)
@given(plans, speeds)
def test_the_ranks_train_on_the_batch_of_one_rank_in_its_order(alone, speeds):
    ranks = [
        replace(
            alone,
            world_size=len(speeds),
            rank=rank,
            shares=proportional_shares(speeds, alone.batch_size),
        )
        for rank in range(len(speeds))
    ]
    for step in range(alone.steps_per_epoch):
        pieces = [plan.micro_positions(step) for plan in ranks]
        assert [each for own in pieces for piece in own for each in piece] == list(alone.global_batch(step))
        for plan, own in zip(ranks, pieces, strict=True):
            # No pass is larger than that of an equal share: a larger share takes no more memory.
            assert all(0 < len(piece) <= plan.most_per_pass for piece in own)
            assert len(own) <= plan.own_micro_batches <= plan.micro_batches
    equal = math.ceil(min(alone.batch_size, alone.num_samples) / len(speeds))
    assert ranks[0].most_per_pass == (alone.micro_batch or equal)


def test_a_whole_batch_has_exactly_the_given_shares():
    plan = BatchPlan(1000, 64, None, 3, 0, 0, drop_last=False, shares=(40, 17, 7))
    parts = [replace(plan, rank=rank).micro_positions(0) for rank in range(3)]
    assert [sum(map(len, part)) for part in parts] == [40, 17, 7]


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.floats(0.1, 10), st.integers(8, 30)), min_size=2, max_size=5))
def test_no_rank_has_more_than_its_limit(ranks):
    speeds, most = zip(*ranks, strict=True)
    batch_size = 8 * len(ranks)
    shares = proportional_shares(speeds, batch_size, 1, most)
    assert sum(shares) == batch_size
    assert all(1 <= share <= limit for share, limit in zip(shares, most, strict=True))


@pytest.mark.parametrize(
    ("share", "shares"),
    [("equal", ()), ("auto", ()), ([48, 16], (48, 16)), ([0.75, 0.25], (48, 16)), ([0.999, 0.001], (63, 1))],
)
def test_shares_of_the_config(share, shares):
    assert fixed_shares(share, 64, 2) == shares


def test_shares_of_another_number_of_ranks_are_refused():
    with pytest.raises(ConfigError, match=r"1 share and the run 2 ranks: .* data\.share=auto"):
        fixed_shares([1.0], 64, 2)


@pytest.mark.parametrize("share", ["[0.7,0.2]", "[48,17]", "[47.5,16.5]"])
def test_shares_that_do_not_sum_to_the_batch_or_to_1_are_refused(share):
    with pytest.raises(ConfigError, match=r"data\.share=.*data\.batch_size=64"):
        composed("data.batch_size=64", f"data.share={share}")


class Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return 60

    def __getitem__(self, index):
        return {"number": torch.tensor(index)}


@pytest.mark.parametrize("workers", [0, 2])
def test_steps_after_a_change_are_of_the_new_shares_also_where_samples_are_read_ahead(workers):
    how = LoaderConfig(workers=workers, device=torch.device("cpu"), seed=0)
    plan = BatchPlan(60, 12, 4, 2, 0, 0, drop_last=False)
    data = wrap_dataset(Numbers(), None, how, "training")
    loader = MapLoader(data, plan, None, total_steps=5)
    changed = replace(plan, shares=(9, 3))

    def numbers(step):
        return [batch["number"].tolist() for batch in loader.step(0, step)]

    with loader_processes():
        assert [numbers(step) for step in (0, 1)] == [plan.sample_indices(0, step) for step in (0, 1)]
        loader.divide(changed)
        found = [numbers(step) for step in (2, 3, 4)]
    assert found == [changed.sample_indices(0, step) for step in (2, 3, 4)]
    assert [list(map(len, step)) for step in found] == [[3, 3, 3]] * 3
