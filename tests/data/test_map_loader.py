import ctypes
import hashlib
import multiprocessing
import os
import random
import signal
import tempfile
import time
from itertools import chain
from multiprocessing import resource_sharer
from pathlib import Path

import numpy
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from launcher.data import loader
from launcher.data.batch_plan import BatchPlan, group_by_length
from launcher.data.iterable_loader import IterableData
from launcher.data.labels import Labels
from launcher.data.loader import LoaderConfig, loader_processes
from launcher.data.map_loader import MapDataset, MapLoader
from launcher.data.sources import training_batches, wrap_dataset
from launcher.data.tensors import TensorData
from launcher.errors import DataError, Interrupted, LoaderKilledError, StalledError
from tests.meta_device import META, MetaDevice

CPU = torch.device("cpu")


class Noisy(Dataset):
    """Samples with random numbers of all three generators; `at` acts on some of them."""

    def __init__(self, size, at=None):
        self.size = size
        self.at = at or {}

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        if index in self.at:
            self.at[index]()
        drawn = [random.random(), numpy.random.rand(), torch.rand(()).item()]
        return {"index": index, "drawn": torch.tensor(drawn, dtype=torch.float64)}


class Rows(IterableDataset):
    def __iter__(self):
        return (Noisy(50)[index] for index in range(50))


def torn():
    raise ValueError("torn")


def loading(workers=0, **more):
    return LoaderConfig(workers, CPU, seed=5, **more)


def batches(
    dataset, world_size=1, rank=0, workers=0, micro_batch=None, total_steps=14, transform=None, **more
):
    plan = BatchPlan(len(dataset), 8, micro_batch, world_size, rank, seed=5, drop_last=False)
    return MapLoader(
        MapDataset(dataset, None, loading(workers, **more), "training"), plan, transform, total_steps
    )


def flat(lists):
    return list(chain.from_iterable(lists))


def epoch(loaded):
    """Reads one epoch, within the care of the job."""
    with loader_processes():
        for step in range(7):
            loaded.step(0, step)


def digests_of(world_size, workers, start=0, steps=14, micro_batch=None):
    """Per step the digest of what all ranks train on, in rank order."""
    with loader_processes():
        ranks = [batches(Noisy(50), world_size, rank, workers, micro_batch) for rank in range(world_size)]
        found = []
        for number in range(start, steps):
            samples = [batch for each in ranks for batch in each.step(*divmod(number, 7))]
            columns = [torch.cat([batch[name] for batch in samples]) for name in ("index", "drawn")]
            found.append(hashlib.sha256(b"".join(c.numpy().tobytes() for c in columns)).hexdigest())
        return found


def test_the_batches_are_the_same_on_any_number_of_loader_processes():
    for split in ({"world_size": 1}, {"world_size": 2, "micro_batch": 3}):
        expected = digests_of(workers=0, **split)
        assert len(set(expected)) == 14
        for workers in (1, 3):
            assert digests_of(workers=workers, **split) == expected, (split, workers)


def test_the_samples_of_a_step_are_the_same_on_any_number_of_ranks():
    def indices(world_size, micro_batch):
        ranks = [batches(Noisy(50), world_size, rank, 0, micro_batch) for rank in range(world_size)]
        return [flat(each["index"].tolist() for b in ranks for each in b.step(0, step)) for step in range(7)]

    assert sorted(flat(indices(1, None))) == list(range(50))
    for world_size, micro_batch in ((1, 3), (2, None), (3, 2)):
        assert indices(world_size, micro_batch) == indices(1, None)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_resume_within_an_epoch_reads_the_same_batches(workers):
    assert digests_of(2, workers, start=10) == digests_of(2, 0)[10:]


def test_a_resume_reads_nothing_of_what_was_trained_on():
    read = []
    dataset = Noisy(50, {index: lambda index=index: read.append(index) for index in range(50)})
    found = batches(dataset).step(0, 4)
    assert sorted(read) == sorted(found[0]["index"].tolist())


def test_the_end_of_loader_processes_does_not_wait_for_a_lock_that_a_process_died_with():
    with loader_processes():
        loaded = batches(Noisy(50), workers=2)
        loaded.step(0, 0)
        pool = next(each for each in loader._pools if each._iterator is not None)
        # A loader process takes this lock to ask whether it shall end; ended by a signal then, it keeps it.
        pool._iterator._workers_done_event._cond.acquire()


@pytest.mark.parametrize("workers", [0, 2])
def test_a_step_may_be_asked_for_again(workers):
    with loader_processes():
        loaded = batches(Noisy(50), workers=workers)
        first = [loaded.step(0, step) for step in range(3)]
        again = loaded.step(0, 1)
        assert loaded.latest_indices() == [again[0]["index"].tolist()]
        assert torch.equal(again[0]["drawn"], first[1][0]["drawn"])
        assert loaded.step(0, 3)[0]["index"].tolist() == batches(Noisy(50)).step(0, 3)[0]["index"].tolist()


@pytest.mark.parametrize("kind", ["indexed", "in memory", "streamed"])
def test_a_transform_that_draws_draws_the_same_in_every_process_and_after_any_draws(kind):
    def draws(batch):
        drawn = torch.tensor([random.random(), numpy.random.rand(), torch.rand(()).item()])
        return {**batch, "own": drawn.expand(len(batch["index"]), 3)}

    def drawn(workers, steps):
        sets = {"indexed": Noisy(50), "in memory": TensorData({"index": torch.arange(50)})}
        data = wrap_dataset(sets.get(kind) or Rows(), None, loading(workers), "training")
        loaded = training_batches(data, BatchPlan(50, 8, 4, 1, 0, 5, False), draws, 14)
        with loader_processes():
            return [batch["own"][0].tolist() for step in steps for batch in loaded.step(0, step)]

    expected = drawn(0, range(5))
    assert len(set(flat(expected))) == len(flat(expected)) == 30
    torch.rand(3), random.random(), numpy.random.rand()
    for workers in (0, 2):
        assert drawn(workers, range(5)) == expected, workers
    if kind != "streamed":  # which is read from its start on
        assert drawn(2, range(2, 5)) == expected[12 // 3 :]


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("workers", [0, 2])
def test_an_evaluation_visits_every_sample_once_in_order(workers):
    with loader_processes():
        for _ in range(2):
            found = []
            for rank in range(3):
                data = MapDataset(Noisy(11), None, loading(workers), "validation")
                for count, batch in data.evaluation_batches(rank, 3, 2):
                    assert count == len(batch["index"])
                    found += batch["index"].tolist()
            assert found == list(range(11))


def test_an_evaluation_that_was_broken_off_can_be_repeated():
    with loader_processes():
        data = MapDataset(Noisy(11), None, loading(2), "validation")
        next(iter(data.evaluation_batches(0, 1, 2)))
        again = [i for _, batch in data.evaluation_batches(0, 1, 2) for i in batch["index"].tolist()]
        assert again == list(range(11))


@pytest.mark.parametrize("workers", [0, 2])
def test_a_sample_that_raises_is_named_with_its_line(workers):
    with pytest.raises(DataError, match=r"sample 7 at .*test_map_loader\.py:\d+, in torn") as raised:
        epoch(batches(Noisy(50, {7: torn}), workers=workers))
    assert "ValueError: torn. Correct or remove it, or set data.max_bad_samples=N" in str(raised.value)


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("workers", [0, 2])
def test_bad_samples_are_left_out_the_same_on_any_number_of_ranks(workers):
    def left(world_size):
        ranks = [
            batches(Noisy(50, {7: torn, 11: torn}), world_size, r, workers, max_bad_samples=2)
            for r in range(world_size)
        ]
        found, bad = [], 0
        for step in range(7):
            for _ in range(2):  # the second time it is read again, as before the first step and for a rerun
                found[step:] = [[batch["index"].tolist() for each in ranks for batch in each.step(0, step)]]
            bad += sum(each.latest_bad() for each in ranks)
        named = [flat(each.latest_indices()) for each in ranks]
        assert flat(named) == flat(found[-1])
        return [sorted(flat(step)) for step in found], bad

    with loader_processes():
        found, bad = left(1)
        assert bad == 2
        assert sorted(flat(found)) == [index for index in range(50) if index not in (7, 11)]
        assert left(3) == (found, 2)


def test_an_evaluation_accounts_for_bad_samples():
    data = MapDataset(Noisy(6, {1: torn, 4: torn, 5: torn}), None, loading(max_bad_samples=3), "validation")
    found = [
        (count, None if batch is None else batch["index"].tolist())
        for count, batch in data.evaluation_batches(0, 1, 2)
    ]
    assert found == [(1, [0]), (1, None), (2, [2, 3]), (2, None)]


def test_an_evaluation_never_waits_for_the_device():
    """What is copied goes the way of a batch, which on a GPU is from pinned memory on a stream of its own."""
    how = LoaderConfig(0, META, seed=5, max_bad_samples=1)
    data = MapDataset(Noisy(6, {1: torn}), None, how, "validation")
    with MetaDevice() as device:
        found = list(data.evaluation_batches(0, 1, 2))
    assert [count for count, _ in found] == [1, 1, 2, 2]
    assert device.reads == []
    assert {upload.partition(":")[0] for upload in device.uploads} == {"data/tensors.py to_device"}


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("seen_by", ["torch's handler of SIGCHLD", "its wait for a batch"])
def test_a_loader_process_that_is_killed_ends_the_run_with_its_cause(seen_by, monkeypatch):
    def die():
        os.kill(os.getpid(), signal.SIGKILL)

    if seen_by == "its wait for a batch":  # torch's error then has no signal in it
        monkeypatch.setattr("torch.utils.data._utils.signal_handling._error_if_any_worker_fails", int)
        monkeypatch.setattr("torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL", 0.2)
    words = r"a loader process of the training set ended: exit code -9, .* If it was killed for memory"
    with pytest.raises(LoaderKilledError, match=words):
        epoch(batches(Noisy(50, {7: die}), workers=2))


def test_a_long_tmpdir_is_no_obstacle(tmp_path, monkeypatch):
    """Batches come through sockets, whose paths may have 107 bytes."""
    long = tmp_path / ("long" * 25)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    epoch(batches(Noisy(50), workers=2, timeout_s=5.0))
    assert list(long.iterdir()) == []


def test_nothing_is_left_of_the_sockets_of_loader_processes():
    with loader_processes():
        batches(Noisy(50), workers=2).step(0, 0)
        folder = Path(multiprocessing.current_process()._config["tempdir"])
        assert list(folder.iterdir())
    assert not folder.exists()


def test_a_batch_that_a_loader_process_cannot_send_ends_the_run_at_once(capfd):
    def collate(samples):
        return {"index": torch.ones(len(samples), requires_grad=True) * 2}  # as a model makes it

    began = time.monotonic()
    plan = BatchPlan(50, 8, None, 1, 0, seed=5, drop_last=False)
    data = MapDataset(Noisy(50), collate, loading(2, timeout_s=20.0), "training")
    with pytest.raises(DataError, match="a loader process of the training set ended: exit code 1"):
        epoch(MapLoader(data, plan, None, 14))
    assert "serialize non-leaf tensor" in capfd.readouterr().err
    assert time.monotonic() - began < 10  # and not with its timeout


def test_a_loader_process_that_ends_while_its_batch_is_fetched_ends_the_run_with_its_cause():
    closed = multiprocessing.Event()

    def close_and_end():  # as the kernel does: a process counts as ended after its sockets are closed
        resource_sharer.stop()
        closed.set()
        time.sleep(0.5)
        os._exit(9)

    def read():
        with loader_processes():
            loaded = batches(Noisy(50, {20: close_and_end}), workers=1)
            step = loaded.plan.order(0).tolist().index(20) // 8
            for earlier in range(step - 1):
                loaded.step(0, earlier)
            assert closed.wait(10)
            for rest in (step - 1, step):  # the one before it may have come whole
                loaded.step(0, rest)

    with pytest.raises(DataError, match=r"a loader process of the training set ended: exit code 9"):
        read()


def test_a_held_out_sample_that_hangs_is_not_taken_for_one_of_the_training_set():
    with loader_processes():
        trained = batches(Noisy(50), workers=1, timeout_s=1.0)
        trained.step(0, 0)
        hangs = Noisy(11, {7: lambda: time.sleep(600)})
        held_out = MapDataset(hangs, None, loading(workers=1, timeout_s=1.0), "validation")
        with pytest.raises(StalledError, match="no batch of the validation set came"):
            list(held_out.evaluation_batches(0, 1, 2))


def hold_the_interpreter():
    library, mutex = ctypes.PyDLL(None), ctypes.create_string_buffer(64)  # keeps the interpreter's lock
    library.pthread_mutex_lock(mutex)
    library.pthread_mutex_lock(mutex)


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize(
    "hang",
    [lambda: time.sleep(600), lambda: os.kill(os.getpid(), signal.SIGSTOP), hold_the_interpreter],
    ids=["sleeps", "is stopped", "holds the interpreter"],
)
def test_a_sample_that_hangs_ends_the_run_and_its_process(hang):
    before = set(multiprocessing.active_children())
    with pytest.raises(StalledError, match=r"no batch of the training set came .* for 1 s"):
        epoch(batches(Noisy(50, {7: hang}), workers=2, timeout_s=1.0))
    assert set(multiprocessing.active_children()) == before


@pytest.mark.parametrize("raised", [KeyboardInterrupt, GeneratorExit, SystemExit])
@pytest.mark.parametrize("workers", [0, 2])
def test_a_sample_that_raises_what_ends_a_process_is_a_bad_sample(raised, workers):
    def fail():
        raise raised("by the data set")

    with pytest.raises(DataError, match=rf"sample 7 .*{raised.__name__}: by the data set"):
        epoch(batches(Noisy(50, {7: fail}), workers=workers, timeout_s=20.0))


def test_an_interrupt_of_the_user_is_no_bad_sample():
    def interrupt():
        raise Interrupted

    with pytest.raises(Interrupted):
        epoch(batches(Noisy(50, {7: interrupt})))


def test_loader_processes_ignore_the_signals_that_stop_a_run():
    with loader_processes():
        loaded = batches(Noisy(50), workers=2)
        loaded.step(0, 0)
        children = multiprocessing.active_children()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
            for child in children:
                os.kill(child.pid, number)
        time.sleep(0.2)
        for step in range(1, 7):
            loaded.step(0, step)
        assert all(child.is_alive() for child in children)
    assert not [child for child in children if child.is_alive()]


def test_no_batch_is_read_ahead_beyond_the_end_of_the_run():
    read = []
    dataset = Noisy(50, {index: lambda index=index: read.append(index) for index in range(50)})
    loaded = batches(dataset, total_steps=2)
    loaded.step(0, 0), loaded.step(0, 1)
    assert len(read) == 16


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (DataLoader(Noisy(3)), r"is a DataLoader. Give the data set itself \(loader.dataset\)"),
        (iter([]), "a list_iterator, which can be read only once"),
        (3, "is a int. Give TensorData, a map-style data set"),
        (type("Unsized", (), {"__getitem__": lambda self, index: index})(), "is a Unsized. Give TensorData"),
    ],
)
def test_what_is_no_set_of_samples_is_refused(data, text):
    with pytest.raises(DataError, match=text):
        wrap_dataset(data, None, loading(), "training")


def test_samples_of_similar_length_share_batches():
    lengths = torch.randint(1, 500, (1003,), generator=torch.Generator().manual_seed(0))
    order = torch.randperm(1003, generator=torch.Generator().manual_seed(1))
    grouped = group_by_length(order, lengths, 8, seed=0, epoch=0)
    assert sorted(grouped.tolist()) == list(range(1003))

    def padded(order):
        return sum(int(lengths[batch].max()) * len(batch) for batch in order.split(8))

    assert padded(grouped) < 1.05 * int(lengths.sum()) < 1.6 * int(lengths.sum()) < padded(order)
    assert torch.equal(grouped, group_by_length(order, lengths, 8, seed=0, epoch=0))
    assert not torch.equal(grouped, group_by_length(order, lengths, 8, seed=0, epoch=1))
    firsts = lengths[grouped[:1000].view(-1, 8)].float()
    assert abs(firsts[:, :4].mean() - firsts[:, 4:].mean()) < 10, "no rank gets the long ones"


@pytest.mark.parametrize("kind", ["training", "validation"])
def test_a_label_of_a_class_that_is_not_there_is_named_with_its_sample(kind):
    samples = [{"label": torch.tensor([0, 1, 0, 2, -100, 0][index])} for index in range(6)]
    data = MapDataset(samples, None, loading(labels=Labels("label", 2)), kind)
    with pytest.raises(
        DataError, match=f"the {kind} set: the label of sample 3 is 2, but .* names 2 classes"
    ):
        list(data.evaluation_batches(0, 1, 3))
    stream = IterableData(samples, None, loading(labels=Labels("label", 2)), kind)
    with pytest.raises(DataError, match=f"the {kind} stream: the label is 2"):
        list(stream.evaluation_batches(0, 1, 3))


def test_the_marker_of_unlabelled_samples_is_explained():
    datasets = pytest.importorskip("datasets")
    labels = datasets.Features(
        {"x": datasets.Value("float32"), "label": datasets.ClassLabel(names=["a", "b"])}
    )
    rows = datasets.Dataset.from_dict({"x": [0.0] * 4, "label": [0, 1, -1, -1]}, features=labels)
    data = MapDataset(rows.with_format("torch"), None, loading(labels=Labels("label", 2)), "validation")
    with pytest.raises(
        DataError, match=r"label of sample 2 is -1, but .* -1 marks samples without a label, as"
    ):
        list(data.evaluation_batches(0, 1, 4))
    kept = rows.filter(lambda row: row["label"] != -1).with_format("torch")
    data = MapDataset(kept, None, loading(labels=Labels("label", 2)), "validation")
    assert sum(count for count, _ in data.evaluation_batches(0, 1, 4)) == 2, "the advice"


class Curriculum(Dataset):
    """Its samples depend on the epoch, and on what set_epoch draws."""

    def __init__(self):
        self.calls = []

    def __len__(self):
        return 50

    def set_epoch(self, epoch):
        self.calls.append(epoch)
        self.epoch, self.drawn = epoch, random.random() + numpy.random.rand()

    def __getitem__(self, index):
        return {"index": index, "epoch": self.epoch, "drawn": self.drawn}


def epochs_of(world_size, workers, start=0, dataset=Curriculum):
    """By step, what all ranks train on in the seven steps of each of two epochs."""
    with loader_processes():
        ranks = [batches(dataset(), world_size, rank, workers) for rank in range(world_size)]
        found = []
        for number in range(start, 14):
            made = [batch for each in ranks for batch in each.step(*divmod(number, 7))]
            found.append(
                [torch.cat([b[name] for b in made]).tolist() for name in ("index", "epoch", "drawn")]
            )
        return found


def test_set_epoch_is_called_in_every_process_and_after_a_resume():
    expected = epochs_of(1, 0)
    assert [set(epochs) for _, epochs, _ in expected] == [{0}] * 7 + [{1}] * 7
    assert len({drawn for _, _, of_step in expected for drawn in of_step}) == 2
    for world_size, workers, start in ((2, 0, 0), (2, 2, 0), (1, 3, 10), (2, 1, 6)):
        assert epochs_of(world_size, workers, start) == expected[start:], (world_size, workers, start)


def test_a_set_epoch_that_fails_is_named():
    class Failing(Curriculum):
        def set_epoch(self, epoch):
            raise LookupError("no such epoch")

    with pytest.raises(
        DataError, match=r"training set: set_epoch failed at .*, in set_epoch: LookupError: no"
    ):
        epoch(batches(Failing()))
