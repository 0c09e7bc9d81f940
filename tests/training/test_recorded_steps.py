"""train.cuda_graph: recorded steps give the bits of ordinary ones, and what cannot be recorded is refused."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import numpy
import pytest
import torch
from torch import Tensor, nn

import launcher.engine.recorder as recorder
from launcher.data.batch_plan import BatchPlan
from launcher.data.loader import Loading
from launcher.data.sources import readable, training_batches
from launcher.data.tensors import Batch, TensorData
from launcher.distributed.env import WorkerEnv
from launcher.distributed.heartbeat import Heartbeat
from launcher.engine import SGD, Policy, Scaling, Stepper, TorchOptimizer
from launcher.errors import ConfigError
from launcher.recipe import Loss, cross_entropy
from launcher.telemetry import Telemetry
from launcher.training.answers import Answers, SinceEvaluation
from launcher.training.parts.relief import Relief
from launcher.training.progress import Course, Position
from launcher.training.recorded_steps import recorded
from launcher.training.requests import Requests
from launcher.training.run import Run
from launcher.training.setup.compilation import compiled
from launcher.training.task import Learner, Task
from launcher.training.votes import Question
from tests.configs import composed
from tests.models import features
from tests.recording import Again, Tape

SAMPLES, BATCH = 40, 16  # the last step of an epoch has 8
CPU = torch.device("cpu")


def data_of() -> TensorData:
    x, classes = features(SAMPLES, 0)
    return TensorData({"x": x, "label": classes})


def noisy(batch: Batch, noise: Tensor) -> Batch:
    """Random numbers of the sample, and those of the device."""
    return batch | {"x": batch["x"] * (0.5 + noise[:, :1]) + 0.1 * torch.randn_like(batch["x"])}


def loss_of_x(network: nn.Module, batch: Batch) -> Loss:
    return cross_entropy(network, batch, inputs="x")


class Told(Telemetry):
    """Keeps the decisions."""

    def __init__(self) -> None:
        super().__init__()
        self.decisions: list[tuple[str, str]] = []

    def decision(self, topic: str, text: str) -> None:
        self.decisions.append((topic, text))


def normalised() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.3), nn.Linear(16, 3))


class Parts:
    """A small run in this process: dropout, batch norm, noise, a scale that overflows at first."""

    def __init__(
        self,
        cuda_graph: bool | str = True,
        loss: Callable[..., Loss] = loss_of_x,
        transform: Callable[[Batch, Tensor], Batch] = noisy,
        data: object = None,
        micro_batch: int | None = None,
        optimizer: object = None,
        build: Callable[[], nn.Module] = normalised,
        compiles: bool | str = False,
    ) -> None:
        torch.manual_seed(0)
        self.env = WorkerEnv(0, 1, 0, 1, CPU, None)
        set_ = readable(data or data_of(), None, Loading(0, CPU, 0), "training")
        self.plan = BatchPlan(SAMPLES, BATCH, micro_batch, 1, 0, 0, drop_last=False)
        model = build()
        self.stepper = Stepper(
            model,
            optimizer or SGD(0.1, 0.9),
            Policy.fp16(),
            scaling=Scaling(init=2**24, growth_interval=4),
            learning_rates=[0.1 / (step + 1) for step in range(12)],
            micro_batches=self.plan.micro_batches,
            capturable=True,
        )
        config = composed()
        config = replace(config, train=replace(config.train, cuda_graph=cuda_graph))
        self.telemetry = Told()
        self.run = Run(config, self.env, self.stepper, self.telemetry, Heartbeat(), Requests())
        self.answers = Answers(self.env, "label")
        self.course = Course(self.plan.steps_per_epoch, 12, 1)
        batches = training_batches(set_, self.plan, transform, 12)
        model.eval()  # as a trial of the evaluation may leave it
        of_job = SimpleNamespace(run=self.run, batches=batches, answers=self.answers, course=self.course)
        relief = Relief(cast(Any, of_job))
        network = compiled(compiles, model, self.stepper)
        self.task = Task(self.stepper, network, loss, batches, self.answers, relief)

    def train(self, learner: Learner, positions: list[Position]) -> list[tuple]:
        found = []
        learner.network.train()
        for position in positions:
            if position.step == 5:
                self.stepper.vote(Question.SAVE)
            report = learner.train_on(position).read()
            found.append((report.loss, report.lr, report.scale, report.skipped, report.votes, report.count))
            if position.step == 7:  # an evaluation: without gradient, with the weights of now
                learner.network.eval()
                with torch.no_grad(), self.stepper.forward():
                    found.append(learner.network(torch.ones(2, 8)).tolist())
                learner.network.train()
        since = SinceEvaluation()
        self.answers.add_to(since)
        return [*found, since, torch.rand(1).item()]

    @property
    def positions(self) -> list[Position]:
        return [self.course.position_of(step + 1) for step in range(self.course.total_steps)]


@pytest.fixture
def tape(monkeypatch: pytest.MonkeyPatch) -> Tape:
    """Records on a CPU."""
    tape = Tape()
    monkeypatch.setitem(recorder.RECORDERS, "cpu", lambda device: tape)
    return tape


def whole_run(parts: Parts) -> tuple[list[tuple], list[list[float]]]:
    with recorded(parts.task, parts.run) as learner:
        found = parts.train(learner, parts.positions)
    return found, [tensor.double().flatten().tolist() for tensor in parts.stepper.tensors()]


@pytest.mark.parametrize("micro_batch", [None, 8])
def test_recorded_steps_are_the_ordinary_ones(tape, monkeypatch, micro_batch) -> None:
    """Twelve steps of four epochs: votes, skips, an evaluation between, smaller last batches, dropout."""
    replayed = whole_run(Parts(micro_batch=micro_batch))
    assert tape.recordings == 2  # the last step of an epoch is smaller
    assert tape.replays == 12
    ordinary = whole_run(Parts(cuda_graph=False, micro_batch=micro_batch))
    assert tape.recordings == 2
    assert str(replayed) == str(ordinary)
    assert any(report[3] for report in replayed[0][:-2] if isinstance(report, tuple)), "no step was skipped"
    monkeypatch.setitem(recorder.RECORDERS, "cpu", lambda device: Again())
    assert str(whole_run(Parts(micro_batch=micro_batch))) == str(replayed)


def test_a_run_that_resumes_records_again_and_ends_with_the_same_bits(tape) -> None:
    first, second = Parts(), Parts()
    with recorded(first.task, first.run) as learner:
        first.train(learner, first.positions[:7])
        state, generator = first.stepper.state().clone(), torch.get_rng_state()
        expected = first.train(learner, first.positions[7:])
    second.stepper.load(state)
    torch.set_rng_state(generator)
    with recorded(second.task, second.run) as learner:
        found = second.train(learner, second.positions[7:])
    assert tape.recordings == 4
    assert str(found) == str(expected)
    for ours, theirs in zip(second.stepper.tensors(), first.stepper.tensors(), strict=True):
        if ours is not second.stepper.layout.segments[0].grad:
            assert ours.tolist() == theirs.tolist() or ours.dtype == torch.uint8  # bits at the start


def test_recording_changes_nothing(tape) -> None:
    parts = Parts()
    before = [tensor.clone() for tensor in parts.stepper.tensors()]
    generators = torch.get_rng_state(), random.getstate(), numpy.random.get_state()[1].tolist()
    with recorded(parts.task, parts.run):
        pass
    assert all(map(torch.equal, before, parts.stepper.tensors()))
    assert torch.equal(generators[0], torch.get_rng_state())
    assert generators[1:] == (random.getstate(), numpy.random.get_state()[1].tolist())
    assert not parts.stepper.has_trained
    assert parts.telemetry.decisions == [
        ("cuda graph", "each step of 16 samples, and the last of an epoch, of 8, in the same memory")
    ]


def reads(network: nn.Module, batch: Batch) -> Loss:
    loss = loss_of_x(network, batch)
    assert loss.sum.item() > 0
    return loss


def chooses_rows(network: nn.Module, batch: Batch) -> Loss:
    return loss_of_x(network, {name: column[batch["label"] > 0] for name, column in batch.items()})


def mixes(batch: Batch, noise: Tensor) -> Batch:
    return batch | {"x": batch["x"] * numpy.random.beta(1, 1)}


def flips(batch: Batch, noise: Tensor) -> Batch:
    return batch if random.random() < 0.5 else batch | {"x": -batch["x"]}


class Indexed(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": torch.zeros(8), "label": torch.tensor(0)}


REFUSED = {
    "a read": ({"loss": reads}, r"waits for the device at .*test_recorded_steps\.py:\d+, in reads \(\.item"),
    "a mask": ({"loss": chooses_rows}, r"waits for the device at .*, in (<dictcomp>|chooses_rows) \(\.item"),
    "numpy": ({"transform": mixes}, r"draws from numpy\.random, and a recording would repeat"),
    "random": ({"transform": flips}, r"draws from random, and a recording"),
    "a loader": ({"data": Indexed(), "transform": None}, r"its batches come from loader processes"),
    "an optimizer": (
        {"optimizer": TorchOptimizer(torch.optim.Adam, 0.01)},
        r"an optimizer of torch\.optim waits .* use SGD or AdamW",
    ),
}


@pytest.mark.parametrize(("options", "reason"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_recorded_is_refused_before_the_first_step(tape, options, reason) -> None:
    parts = Parts(**options)
    before = [tensor.clone() for tensor in parts.stepper.tensors()]
    with pytest.raises(ConfigError, match=reason) as refused, recorded(parts.task, parts.run):
        pass
    assert refused.value.exit_code == 2
    assert all(map(torch.equal, before, parts.stepper.tensors()))


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"loss": reads}, "none: its loss or transform waits for the device at "),
        ({"transform": mixes}, "none: its loss, model or transform draws from numpy.random"),
    ],
)
def test_auto_trains_as_without_where_a_run_cannot_be_recorded(tape, options, reason) -> None:
    numpy.random.seed(0)
    chosen = Parts(cuda_graph="auto", **options)
    found = whole_run(chosen)
    numpy.random.seed(0)
    assert str(found) == str(whole_run(Parts(cuda_graph=False, **options)))
    assert tape.replays == 0
    ((topic, text),) = chosen.telemetry.decisions
    assert topic == "cuda graph"
    assert text.startswith(reason)


def test_a_rescue_would_change_what_is_recorded(tape) -> None:
    parts = Parts()
    precision = replace(parts.run.config.precision, rescue=True)
    run = replace(parts.run, config=replace(parts.run.config, precision=precision))
    with pytest.raises(ConfigError, match=r"precision\.rescue=true may change"), recorded(parts.task, run):
        pass


def test_a_cpu_has_no_recorder() -> None:
    parts = Parts()
    with (
        pytest.raises(ConfigError, match=r"=true: .*the device cpu, and only CUDA"),
        recorded(parts.task, parts.run),
    ):
        pass


def test_no_step_is_replayed_once_the_micro_batch_has_been_halved(tape, tmp_path, monkeypatch) -> None:
    """The recording has larger micro-batches: the run continues as one that never recorded."""
    monkeypatch.chdir(tmp_path)  # where config.yaml is written
    found = []
    for cuda_graph in (True, False):
        parts = Parts(cuda_graph=cuda_graph)
        with recorded(parts.task, parts.run) as learner:
            first = parts.train(learner, parts.positions[:2])
            parts.task.relief.retake(parts.positions[1])  # as if the second had been dropped
            replays = tape.replays
            found.append([first, parts.train(learner, parts.positions[2:])])
            assert tape.replays == replays
            if cuda_graph:
                assert learner.graph._replays == []
                assert learner._inputs == learner._learned == learner.graph._packed == {}, (
                    "its memory is kept"
                )
    assert str(found[0]) == str(found[1])


class Lacking:
    """A loss that runs out of memory in this call: the first four rehearse, the fifth is recorded."""

    def __init__(self, call: int) -> None:
        self.call, self.calls = call, 0

    def __call__(self, network: nn.Module, batch: Batch) -> Loss:
        self.calls += 1
        loss = loss_of_x(network, batch)
        if self.calls == self.call:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return loss


@pytest.mark.parametrize("call", [1, 4, 9, 10])
def test_where_memory_runs_out_while_recording_auto_trains_as_without(tape, call) -> None:
    """In a rehearsal of either size, and in either recording."""
    chosen = Parts(cuda_graph="auto", loss=Lacking(call))
    found = whole_run(chosen)
    assert str(found) == str(whole_run(Parts(cuda_graph=False)))
    assert tape.replays == 0
    ((topic, text),) = chosen.telemetry.decisions
    assert topic == "cuda graph"
    assert text.startswith("none: it ran out of GPU memory: ")


def test_where_memory_runs_out_while_recording_true_is_refused(tape) -> None:
    parts = Parts(loss=Lacking(9))
    with (
        pytest.raises(ConfigError, match=r"=true: this run cannot be recorded: it ran out of GPU memory"),
        recorded(parts.task, parts.run),
    ):
        pass
