import json
import random
from itertools import chain

import numpy
import pytest
import torch
from torch.utils.data import IterableDataset, get_worker_info

from launcher.data.batch_plan import BatchPlan
from launcher.data.iterable_loader import IterableData, IterableLoader
from launcher.data.loader import LoaderConfig, loader_processes
from launcher.errors import ConfigError, DataError

datasets = pytest.importorskip("datasets", reason="the datasets library is not installed")
STEPS = 12  # of the run: two passes over 30 samples, in batches of 8, and more


class Numbers(IterableDataset):
    """The numbers below `size`, with random numbers of all three generators."""

    def __init__(self, size=30, bad=None):
        self.size = size
        self.bad = bad

    def __iter__(self):
        for index in range(self.size):
            if index == self.bad:
                raise ValueError("torn")
            drawn = [random.random(), numpy.random.rand(), torch.rand(()).item()]
            yield {"index": index, "drawn": torch.tensor(drawn, dtype=torch.float64)}


class Remembering(Numbers):
    """Knows where it stands, and counts what is read."""

    def __init__(self, size=30):
        super().__init__(size)
        self.at = 0
        self.read = 0

    def __iter__(self):
        while self.at < self.size:
            self.at += 1
            self.read += 1
            drawn = torch.tensor([random.random(), numpy.random.rand(), torch.rand(()).item()])
            yield {"index": torch.tensor(self.at - 1), "drawn": drawn}
        self.at = 0

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


class DividedAmongWorkers(IterableDataset):
    """As torch's documentation divides a stream among the processes of a DataLoader."""

    def __iter__(self):
        info = get_worker_info()
        first, step = (info.id, info.num_workers) if info else (0, 1)
        return iter([{"index": index} for index in range(first, 30, step)])


class Shuffled(IterableDataset):
    """Draws its order before its first sample."""

    def __iter__(self):
        return iter([{"index": index} for index in numpy.random.permutation(30)])


class ShuffledByEpoch(IterableDataset):
    """Draws its order where it is given the epoch."""

    def set_epoch(self, epoch):
        self.order = numpy.random.permutation(30)

    def __iter__(self):
        return iter([{"index": index} for index in self.order])


def of_hugging_face(size=30, num_shards=4, columns=("index",)):
    rows = datasets.Dataset.from_dict({name: list(range(size)) for name in columns})
    return rows.to_iterable_dataset(num_shards=num_shards)


def batches(stream, world_size=1, rank=0, workers=0, micro_batch=None, saved=(), transform=None):
    plan = BatchPlan(STEPS * 8, 8, micro_batch, world_size, rank, 5, False)
    data = IterableData(stream, None, LoaderConfig(workers, torch.device("cpu"), seed=5), "training")
    return IterableLoader(data, plan, transform, saved)


def run_steps(ranks, steps):
    """Per step the batches of all ranks in order. A pass ends as the ranks of a run agree on it."""
    found = []
    for step in steps:
        found.append([batch for each in ranks for batch in each.step(0, step)])
        if sum(each.exhausted() for each in ranks) == len(ranks):
            for each in ranks:
                each.restart_epoch()
    return found


def joined(step, name="index"):
    return torch.cat([batch[name] for batch in step]).tolist()


def numbers(make, world_size, workers, micro_batch=None, name="index"):
    with loader_processes():
        ranks = [batches(make(), world_size, rank, workers, micro_batch) for rank in range(world_size)]
        return [joined(step, name) for step in run_steps(ranks, range(STEPS))]


@pytest.mark.sampled(every=2, first=1)
@pytest.mark.parametrize("name", ["index", "drawn"])
def test_the_batches_are_the_same_on_any_number_of_ranks_and_loader_processes(name):
    expected = numbers(Numbers, 1, 0, name=name)
    if name == "index":
        assert expected[3] == list(range(24, 30)), "the smaller rest is trained on too"
        assert expected[4] == list(range(8)), "then the stream starts again"
    for world_size, workers, micro_batch in ((1, 1, None), (2, 0, 3), (1, 3, 2), (3, 2, 1)):
        assert numbers(Numbers, world_size, workers, micro_batch, name) == expected, (world_size, workers)


@pytest.mark.parametrize("stream", [Shuffled, ShuffledByEpoch])
def test_an_order_that_is_drawn_is_the_same_on_any_number_of_ranks_and_loader_processes(stream):
    expected = numbers(stream, 1, 0)
    assert expected[0] != expected[4], "another in each pass"
    for world_size, workers in ((1, 2), (2, 0), (3, 1)):
        assert numbers(stream, world_size, workers) == expected, (world_size, workers)


def test_each_pass_draws_other_random_numbers():
    drawn = numbers(Numbers, 1, 0, name="drawn")
    assert drawn[0] != drawn[4]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_stream_that_divides_itself_among_workers_is_read_whole(workers):
    found = numbers(DividedAmongWorkers, 2, workers)
    assert sorted(chain.from_iterable(found[:4])) == list(range(30))


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize(("world_size", "workers"), [(1, 0), (2, 0), (2, 2), (3, 1)])
def test_a_stream_of_hugging_face_is_visited_once_in_each_pass(world_size, workers):
    found = numbers(lambda: of_hugging_face(29), world_size, workers)
    seen = []
    while len(seen) < 29:
        seen += found.pop(0)
    assert sorted(seen) == list(range(29))
    seen = []
    while len(seen) < 29:
        seen += found.pop(0)
    assert sorted(seen) == list(range(29)), "ranks whose part is used up wait for the others"


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize(
    ("make", "world_size", "workers"),
    [(Numbers, 2, 0), (Numbers, 2, 3), (Remembering, 2, 2), (of_hugging_face, 2, 0), (of_hugging_face, 2, 2)],
)
@pytest.mark.parametrize("at", [2, 6])
def test_a_resume_continues_with_the_same_samples(make, world_size, workers, at):
    name = "index" if make is of_hugging_face else "drawn"
    with loader_processes():
        ranks = [batches(make(), world_size, rank, workers, 2) for rank in range(world_size)]
        run_steps(ranks, range(at))
        saved = json.loads(json.dumps([each.position() for each in ranks]))
        expected = [joined(step, name) for step in run_steps(ranks, range(at, STEPS))]
    with loader_processes():
        ranks = [batches(make(), world_size, rank, workers, 2, saved) for rank in range(world_size)]
        assert [joined(step, name) for step in run_steps(ranks, range(at, STEPS))] == expected


@pytest.mark.parametrize("make", [Remembering, of_hugging_face])
@pytest.mark.parametrize("state", [None, lambda stream: {"at": b"no JSON"}])
@pytest.mark.parametrize(("workers", "at"), [(0, 2), (2, 2), (2, 6)])
def test_a_stream_whose_state_cannot_be_saved_is_skipped_forward(make, state, workers, at, monkeypatch):
    kind = Remembering if make is Remembering else datasets.IterableDataset
    if state is None:
        monkeypatch.delattr(kind, "state_dict")
    else:
        monkeypatch.setattr(kind, "state_dict", state)
    with loader_processes():
        ranks = [batches(make(), 2, rank, workers, 2) for rank in range(2)]
        run_steps(ranks, range(at))
        saved = [each.position() for each in ranks]
        expected = [joined(step) for step in run_steps(ranks, range(at, STEPS))]
    with loader_processes():
        ranks = [batches(make(), 2, rank, workers, 2, saved) for rank in range(2)]
        assert [joined(step) for step in run_steps(ranks, range(at, STEPS))] == expected


def test_a_resume_on_other_ranks_skips_forward():
    ranks = [batches(Numbers(), 2, rank) for rank in range(2)]
    run_steps(ranks, range(6))
    saved = [each.position() for each in ranks]
    expected = [joined(step) for step in run_steps(ranks, range(6, STEPS))]
    others = [batches(Numbers(), 3, rank, saved=saved) for rank in range(3)]
    assert [joined(step) for step in run_steps(others, range(6, STEPS))] == expected


def test_a_stream_that_knows_its_position_is_not_skipped_forward():
    before = batches(Remembering())
    run_steps([before], range(3))
    stream = Remembering()
    assert joined(batches(stream, saved=[before.position()]).step(0, 3)) == list(range(24, 30))
    assert stream.read == 6


def test_a_divided_stream_cannot_be_resumed_on_other_ranks():
    ranks = [batches(of_hugging_face(), 2, rank) for rank in range(2)]
    run_steps(ranks, range(2))
    with pytest.raises(ConfigError, match=r"is of 2 ranks with data.num_workers=0, .* on 3 with"):
        batches(of_hugging_face(), 3, 0, saved=[each.position() for each in ranks])


def test_a_long_skip_is_logged(monkeypatch, caplog):
    monkeypatch.setattr("launcher.data.iterable_loader.REPORTED_S", 0.0)
    before = batches(Numbers())
    run_steps([before], range(2))
    with caplog.at_level("INFO"):
        batches(Numbers(), saved=[before.position()]).step(0, 2)
    assert "finding step 2 of the stream again took 0 s" in caplog.text


@pytest.mark.parametrize("workers", [0, 2])
def test_a_stream_that_raises_is_named_with_its_position(workers):
    with pytest.raises(
        DataError, match=r"training stream: sample 11 at .*iterable_loader\.py:\d+, in __iter__"
    ):
        numbers(lambda: Numbers(bad=11), 1, workers)


def test_a_step_may_be_asked_for_again():
    stream = batches(Numbers())
    first = stream.step(0, 0)
    again = stream.step(0, 0)
    assert torch.equal(first[0]["drawn"], again[0]["drawn"])
    assert joined(stream.step(0, 1)) == list(range(8, 16))
    again = stream.step(0, 0)  # as on a GPU, whose step is read once the next one has been launched
    assert torch.equal(first[0]["drawn"], again[0]["drawn"])
    assert joined(stream.step(0, 2)) == list(range(16, 24))


@pytest.mark.parametrize("make", [Numbers, of_hugging_face])
def test_what_a_rank_lacks_of_a_step_is_known(make):
    ranks = [batches(make(), 3, rank, micro_batch=2) for rank in range(3)]
    found = []
    for step in range(STEPS):
        trained = len(joined(run_steps(ranks, [step])[0]))
        assert trained + sum(each.missing() for each in ranks) == 8
        found.append(trained)
    assert min(found) < 8


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("make", [Numbers, of_hugging_face])
@pytest.mark.parametrize("workers", [0, 2])
def test_an_evaluation_visits_every_sample_once(make, workers):
    with loader_processes():
        sets = [
            IterableData(make(), None, LoaderConfig(workers, torch.device("cpu"), 5), "validation")
            for _ in range(3)
        ]
        for _ in range(2):
            found = [
                number
                for rank, data in enumerate(sets)
                for _, batch in data.evaluation_batches(rank, 3, 4)
                for number in batch["index"].tolist()
            ]
            assert sorted(found) == list(range(30))
