"""A recorded step gives the bits of an ordinary one, whatever changes from one step to the next."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch
from torch import Tensor, nn

from launcher.engine import (
    SGD,
    AdamW,
    HostRead,
    NoMemory,
    Policy,
    RecordingError,
    Scaling,
    StepGraph,
    Stepper,
    TorchOptimizer,
    UnusableError,
)
from tests.models import conv_net, features, loss_sum, mlp
from tests.recording import Again, Tape

BATCH, STEPS = 4, 9
RATES = [0.01 / (step + 1) for step in range(20)]


def stepper_of(policy: Policy | None = None, model: nn.Module | None = None, **settings) -> Stepper:
    policy = policy or Policy.fp16()
    scaling = Scaling(init=2**24, growth_interval=3) if policy.arithmetic == torch.float16 else None
    defaults = {"scaling": scaling, "clip_norm": 1.0, "learning_rates": RATES, "capturable": True}
    return Stepper(model or conv_net(), AdamW(0.01), policy, **(defaults | settings))


def batch_of(step: int, size: int = BATCH) -> tuple[Tensor, Tensor]:
    return features(size, step, (3, 8, 8))


class Learner:
    """A step over static inputs; `train` fills them and replays."""

    def __init__(self, stepper: Stepper, recorder: Tape, k: int = 1) -> None:
        self.stepper, self.k, self.recorder = stepper, k, recorder
        self.x, self.classes = (tensor.clone() for tensor in batch_of(99, k * BATCH))
        self.graph = StepGraph(stepper, recorder)

    def passes(self) -> None:
        for x, classes in zip(self.x.chunk(self.k), self.classes.chunk(self.k), strict=True):
            self.learn(x, classes)

    def learn(self, x: Tensor, classes: Tensor) -> None:
        with self.stepper.forward():
            loss = loss_sum(self.stepper.model(x), classes)
        self.stepper.backward(loss, (classes >= 0).sum())

    def train(self, step: int):
        for static, fresh in zip((self.x, self.classes), batch_of(step, self.k * BATCH), strict=True):
            static.copy_(fresh)
        return self.graph.replay()


def bits(tensors: Iterable[Tensor]) -> list[bytes]:
    return [tensor.detach().reshape(-1).view(torch.uint8).numpy().tobytes() for tensor in tensors]


@pytest.mark.parametrize(
    ("name", "k"),
    [("fp32", 1), ("fp16", 1), ("fp16", 2)]
    + [pytest.param(name, 1, marks=pytest.mark.slow) for name in ("amp_fp16", "pure_fp16", "bf16")],
)
def test_replays_give_the_bits_of_ordinary_steps(name, k) -> None:
    """Skipped steps, a growing scale, rates by applied step, BatchNorm and clipping among them."""
    found = []
    for recorder in (Tape(), Again()):
        stepper = stepper_of(Policy.named(name), micro_batches=k)
        learner = Learner(stepper, recorder, k)
        learner.graph.record(learner.passes)
        waiting, reports = None, []
        for step in range(STEPS):
            result = learner.train(step)
            reports += [] if waiting is None else [waiting.read()]  # one step late, as the launcher
            waiting = result
        reports.append(waiting.read())
        found.append(
            (bits(stepper.tensors()), [(r.loss, r.lr, r.scale, r.skipped, r.grad_norm) for r in reports])
        )
        assert recorder.replays == STEPS
    assert str(found[0]) == str(found[1])
    skipped = [report[3] for report in found[0][1]]
    assert len({report[1] for report in found[0][1]}) == 1 + skipped.count(False) - (not skipped[-1])
    if name in ("amp_fp16", "fp16"):
        assert True in skipped


@pytest.mark.parametrize("optimizer", [SGD(0.1, 0.9, True, 1e-3), AdamW(0.01)], ids=["sgd", "adamw"])
def test_a_capturable_stepper_gives_the_bits_of_another(optimizer) -> None:
    found = []
    for capturable in (False, True):
        stepper = Stepper(
            conv_net(), optimizer, Policy.fp16(), scaling=Scaling(init=2**24), capturable=capturable
        )
        for step in range(12):
            x, classes = batch_of(step)
            with stepper.forward():
                loss = loss_sum(stepper.model(x), classes)
            stepper.backward(loss, (classes >= 0).sum())
            stepper.step()
        counters = stepper.counters()
        assert counters["skipped"]
        # The first is the loss scale, which the host and a device hold in different forms.
        found.append((bits(stepper._parts.replica.tensors()[1:]), counters, stepper.has_trained))
    assert found[0] == found[1]


class Small(Learner):
    """A network without convolutions."""

    def __init__(self, recorder: Tape) -> None:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Flatten(), nn.Linear(192, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
        super().__init__(stepper_of(Policy.fp16(), model, scaling=Scaling(init=1024)), recorder)


def set_rate(learner: Small) -> None:
    learner.stepper.lr = 0.5


def clamp(learner: Small) -> None:
    with torch.no_grad():
        for parameter in learner.stepper.model.parameters():
            parameter.clamp_(-0.1, 0.1)


def average(learner: Small) -> None:
    learner.stepper.model[2].running_mean.fill_(3.0)
    learner.stepper.average_buffers()


def load(learner: Small) -> None:
    state = learner.stepper.state().clone()
    learner.train(50)
    learner.stepper.load(state)


def vote(learner: Small) -> None:
    learner.stepper.vote(2, 7)


def other_size(learner: Small) -> None:
    learner.learn(*batch_of(60, 3))
    learner.stepper.step()


def calibrate(learner: Small) -> None:
    with learner.stepper.forward():
        loss = loss_sum(learner.stepper.model(learner.x), learner.classes)
    learner.stepper.dry_backward(loss)


BETWEEN = (set_rate, clamp, average, load, vote, other_size, calibrate)


@pytest.mark.filterwarnings("ignore:.*half weights were written in place")
@pytest.mark.parametrize("change", BETWEEN, ids=lambda change: change.__name__)
def test_what_happens_between_two_steps_is_seen_by_the_next(change) -> None:
    found = []
    for recorder in (Tape(), Again()):
        learner = Small(recorder)
        learner.graph.record(learner.passes)
        learner.train(0)
        change(learner)
        report = learner.train(1).read()
        found.append((bits(learner.stepper.tensors()), report.votes, report.lr, learner.stepper.has_trained))
    assert found[0] == found[1]


def test_a_number_of_python_is_that_of_the_recording() -> None:
    """So the comparisons above find one: what is recorded differs from what is called again."""

    class Counting(Small):
        calls = 0

        def learn(self, x: Tensor, classes: Tensor) -> None:
            self.calls += 1
            super().learn(x * self.calls, classes)

    found = []
    for recorder in (Tape(), Again()):
        learner = Counting(recorder)
        learner.graph.record(learner.passes)
        for step in range(3):
            learner.train(step)
        found.append(bits(learner.stepper.tensors()))
    assert found[0] != found[1]


def test_recording_changes_nothing_that_a_step_changes() -> None:
    learner = Small(Tape())
    before, generator = bits(learner.stepper.tensors()), torch.get_rng_state()
    learner.graph.record(lambda: (torch.rand(3), learner.passes()))
    assert bits(learner.stepper.tensors()) == before
    assert torch.equal(torch.get_rng_state(), generator)
    assert learner.stepper.counters()["applied"] == 0
    assert not learner.stepper.has_trained


def test_a_read_is_refused_and_the_stepper_can_be_used_as_before() -> None:
    learner, untouched = Small(Tape()), Small(Tape())

    def reading() -> None:
        learner.passes()
        float(learner.x.sum())

    before = bits(learner.stepper.tensors())
    with pytest.raises(HostRead, match="_local_scalar_dense"):
        learner.graph.record(reading)
    assert bits(learner.stepper.tensors()) == before
    for each in (learner, untouched):
        each.passes()
        each.stepper.step()
    assert bits(learner.stepper.tensors()) == bits(untouched.stepper.tensors())


@pytest.mark.parametrize("call", [1, 5])
@pytest.mark.parametrize("place", ["forward", "after backward"])
def test_where_memory_runs_out_the_stepper_can_be_used_as_before(call, place) -> None:
    """In a rehearsal, and while recording: before the loss, and with all gradients there."""
    learner, untouched = Small(Tape()), Small(Tape())
    calls: list[int] = []

    def lacking() -> None:
        calls.append(1)
        if place == "after backward":
            learner.passes()
        if len(calls) == call:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        if place == "forward":
            learner.passes()

    before = bits(learner.stepper.tensors())
    with pytest.raises(NoMemory, match="CUDA out of memory"):
        learner.graph.record(lacking)
    gradients = {id(segment.grad) for segment in learner.stepper.layout.segments}
    kept = [number for number, each in enumerate(learner.stepper.tensors()) if id(each) not in gradients]
    after = bits(learner.stepper.tensors())
    assert [after[number] for number in kept] == [before[number] for number in kept]
    for each in (learner, untouched):
        each.passes()
        each.stepper.step()
    assert bits(learner.stepper.tensors()) == bits(untouched.stepper.tensors())
    learner.graph.record(learner.passes)
    learner.graph.replay()


def test_what_fails_only_while_it_is_recorded_is_an_error_of_the_recording() -> None:
    learner, own = Small(Tape()), torch.Generator()
    with pytest.raises(RecordingError, match="is not registered with the graph"):
        learner.graph.record(lambda: (learner.x.normal_(generator=own), learner.passes()))


def test_a_failing_pass_raises_its_own_error() -> None:
    learner = Small(Tape())
    with pytest.raises(ZeroDivisionError):
        learner.graph.record(lambda: 1 / 0)


def test_a_replay_refuses_what_a_step_refuses() -> None:
    learner = Small(Tape())
    learner.graph.record(learner.passes)
    learner.passes()
    with pytest.raises(UnusableError, match=r"replay\(\) was called within a step, after 1 backward"):
        learner.train(0)
    learner.stepper.abandon()
    learner.stepper.model[1].weight.requires_grad_(False)
    with pytest.raises(UnusableError, match=r"1\.weight was frozen"):
        learner.train(0)


@pytest.mark.parametrize(
    ("optimizer", "settings", "reason"),
    [
        (TorchOptimizer(torch.optim.Adam, 0.1), {"capturable": True}, "of torch.optim waits for the verdict"),
        (SGD(0.1), {}, "build the Stepper with capturable=True"),
    ],
)
def test_steps_that_wait_by_themselves_are_refused(optimizer, settings, reason) -> None:
    with pytest.raises(UnusableError, match=reason):
        StepGraph(Stepper(mlp(), optimizer, Policy.fp32(), **settings), Tape())


def test_a_cpu_records_nothing() -> None:
    with pytest.raises(UnusableError, match="a step on the device cpu cannot be recorded: it needs CUDA"):
        StepGraph(stepper_of())


@pytest.mark.parametrize("kept", ["loss", "output", "detached", "nothing"])
def test_no_step_is_recorded_while_an_earlier_graph_is_alive(kept) -> None:
    """Its nodes are on the stream of ordinary steps. A CPU has no streams: the refusal is what is tested."""
    stepper = stepper_of()
    learner = Learner(stepper, Tape())
    with stepper.forward():
        outputs = stepper.model(learner.x)
        loss = loss_sum(outputs, learner.classes)
    stepper.backward(loss, BATCH)
    stepper.step()
    held = {"loss": loss, "output": outputs, "detached": loss.detach(), "nothing": None}[kept]
    del loss, outputs
    if kept in ("detached", "nothing"):
        learner.graph.record(learner.passes)
    else:
        with pytest.raises(
            UnusableError, match=r"graph of an earlier loss is alive, that parameter .* part of"
        ):
            learner.graph.record(learner.passes)
        del held
        learner.graph.record(learner.passes)
    assert not learner.train(1).read().abandoned_ranks
