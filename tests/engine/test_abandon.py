"""A step that is given up, or a loss that is refused, leaves everything as if it had never been."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from launcher.engine import SGD, AdamW, DDPOptions, Policy, Scaling, Stepper, StepReport, UnusableError
from launcher.engine.grads.reference_count import ReferenceCount
from tests.engine.observe import deciding_on_device, state_digest, train
from tests.models import Planted, conv_net, features, loss_sum, mlp


def stepper_of(model: nn.Module, micro_batches: int, overlap: bool = True, **options: Any) -> Stepper:
    """fp16 with many small buckets; SGD with a rate of 1 moves a weight by its gradient."""
    defaults = {"scaling": Scaling("static", 1), "reference_count": 1}
    ddp = DDPOptions(bucket_bytes=1, overlap=overlap)
    return Stepper(model, SGD(1.0), Policy.fp16(), ddp=ddp, micro_batches=micro_batches, **defaults | options)


def clean_step(stepper: Stepper, micro_batches: int) -> StepReport:
    for _ in range(micro_batches):
        stepper.backward(stepper.model(1.0, 1.0), 1)
    return stepper.step().read()


def assert_moved_by(stepper: Stepper, distance: float) -> None:
    for name, master in stepper.named_masters().items():
        assert torch.equal(master, torch.full_like(master, -distance)), name


class Failing(torch.autograd.Function):
    """The identity, whose backward runs out of memory."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        raise torch.OutOfMemoryError("no memory")


def fail_halfway(stepper: Stepper, gradient: float = 50.0) -> None:
    """A backward pass that raises after the vector's gradient has arrived and before the matrix's."""
    model = stepper.model
    loss = (Failing.apply(model.matrix.float()) * gradient).sum() + (model.vector * gradient).sum()
    with pytest.raises(torch.OutOfMemoryError):
        stepper.backward(loss, 8)


REFUSED: dict[str, tuple[Callable[[Planted], Tensor], Any, str]] = {
    "fp16": (lambda model: model(50.0, 50.0).half(), 1, "the loss is torch.float16"),
    "fp64": (lambda model: model(50.0, 50.0).double(), 1, "the loss is torch.float64"),
    "mean": (lambda model: model(50.0, 50.0).reshape(1), 1, "it must be fp32, 0-dim"),
    "detached": (lambda model: model(50.0, 50.0).detach(), 1, "the loss has no graph"),
    "negative": (lambda model: model(50.0, 50.0), -3, "-3 samples"),
    "nan": (lambda model: model(50.0, 50.0), float("nan"), "nan samples"),
    "negative tensor": (lambda model: model(50.0, 50.0), torch.tensor(-3), "-3 samples"),
    "infinite tensor": (lambda model: model(50.0, 50.0), torch.tensor(torch.inf), "inf samples"),
}


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize(("micro_batches", "before"), [(1, 0), (2, 0), (2, 1)])
@pytest.mark.parametrize("name", REFUSED)
def test_a_refused_loss_leaves_no_trace(name, micro_batches, before, overlap) -> None:
    make, count, message = REFUSED[name]
    stepper = stepper_of(Planted(), micro_batches, overlap)
    for _ in range(2):
        for number in range(micro_batches):
            if number == before:
                with pytest.raises(UnusableError, match=message):
                    stepper.backward(make(stepper.model), count)
            stepper.backward(stepper.model(1.0, 1.0), 1)
        report = stepper.step().read()
        assert (report.skipped, report.count, report.abandoned_ranks) == (False, micro_batches, ())
    assert_moved_by(stepper, 2.0)
    assert all(p.grad is None for p in stepper.model.parameters())


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("end", ["abandon", "step"])
@pytest.mark.parametrize(("micro_batches", "before"), [(1, 0), (2, 0), (2, 1)])
def test_a_backward_that_raised_leaves_abandoning_the_step_only(micro_batches, before, end, overlap) -> None:
    stepper = stepper_of(Planted(), micro_batches, overlap)
    clean_step(stepper, micro_batches)
    start = state_digest(stepper, counters=True)
    for p in stepper.model.parameters():
        p.grad = torch.full_like(p, 3.0)
    for _ in range(before):
        stepper.backward(stepper.model(1.0, 1.0), 1)
    fail_halfway(stepper)
    assert all(torch.equal(p.grad, torch.full_like(p, 3.0)) for p in stepper.model.parameters())
    with pytest.raises(RuntimeError, match=r"gradients are incomplete\. Call abandon\(\)"):
        stepper.backward(stepper.model(1.0, 1.0), 1)
    report = getattr(stepper, end)().read()
    assert (report.skipped, report.abandoned_ranks, report.culprit_ranks) == (True, (0,), ())
    assert (report.applied_steps, report.skipped_steps, report.count) == (1, 0, 0)
    assert state_digest(stepper, counters=True) == start
    assert clean_step(stepper, micro_batches).abandoned_ranks == ()
    assert_moved_by(stepper, 2.0)


@pytest.mark.parametrize("calls", [0, 1, 2])
def test_gradients_that_arrived_are_dropped_and_the_rate_is_not_consumed(calls) -> None:
    stepper = stepper_of(Planted(), 2, learning_rates=[1.0, 4.0])
    for _ in range(2):
        for _ in range(calls):
            stepper.backward(stepper.model(50.0, 50.0), 8)
        report = stepper.abandon().read()
        assert (report.skipped, report.abandoned_ranks, report.lr) == (True, (0,), 1.0)
    clean_step(stepper, 2)
    assert_moved_by(stepper, 1.0)
    clean_step(stepper, 2)
    assert_moved_by(stepper, 5.0)


@pytest.mark.parametrize("gradient", [torch.inf, torch.nan])
def test_an_overflow_or_a_bad_loss_of_an_abandoned_step_does_not_count(gradient) -> None:
    stepper = stepper_of(Planted(), 1, scaling=Scaling(init=256, growth_interval=2))
    clean_step(stepper, 1)
    before = stepper.scale.state
    loss = stepper.model(gradient, gradient)
    stepper.backward(loss, 1)
    report = stepper.abandon().read()
    assert (report.bad_losses, report.culprit_ranks, report.culprit_parameters) == (0, (), ())
    assert stepper.scale.state == before
    clean_step(stepper, 1)
    assert stepper.scale.value() == 512  # two clean steps in a row


def test_votes_of_an_abandoned_step_are_dropped() -> None:
    stepper = stepper_of(Planted(), 1)
    stepper.vote(1)
    stepper.backward(stepper.model(1.0, 1.0), 1)
    assert stepper.abandon().read().votes[:4] == (0, 0, 0, 0)
    stepper.vote(2)
    assert clean_step(stepper, 1).votes[:4] == (0, 0, 1, 0)


class Sometimes(nn.Module):
    """BatchNorm before a layer that may raise, or may put another shape in a buffer's place."""

    def __init__(self) -> None:
        super().__init__()
        self.net = conv_net()
        self.register_buffer("seen", torch.zeros(()))
        self.mood = "well"

    def forward(self, x: Tensor) -> Tensor:
        logits = self.net(x)
        if self.mood == "raising":
            raise RuntimeError("a bad batch")
        if self.mood == "reshaping":
            self.seen = torch.zeros(2)
        return logits


@pytest.mark.parametrize("mood", ["raising", "reshaping", "well"])
@pytest.mark.parametrize("policy", [Policy.fp16(), Policy.amp_fp16()], ids=lambda policy: policy.name)
def test_buffers_are_restored_after_a_forward_pass_that_raised(mood, policy) -> None:
    steppers = [
        Stepper(Sometimes(), AdamW(0.01), policy, micro_batches=2, reference_count=4) for _ in range(2)
    ]

    def forward_and_backward(stepper: Stepper, seed: int) -> None:
        x, classes = features(4, seed, (3, 8, 8))
        with stepper.forward():
            logits = stepper.model(x)
        stepper.backward(loss_sum(logits, classes), 4)

    disturbed = steppers[0]
    forward_and_backward(disturbed, 5)
    disturbed.model.mood = mood
    if mood == "raising":
        with pytest.raises(RuntimeError, match="a bad batch"):
            forward_and_backward(disturbed, 6)
    else:
        forward_and_backward(disturbed, 6)
    disturbed.abandon()
    disturbed.model.mood = "well"
    assert state_digest(disturbed, counters=True) == state_digest(steppers[1], counters=True)
    for stepper in steppers:
        forward_and_backward(stepper, 7)
        stepper.step()
    assert state_digest(disturbed, counters=True) == state_digest(steppers[1], counters=True)


@pytest.mark.parametrize("failed", [True, False])
@pytest.mark.parametrize("call", ["state", "load"])
def test_what_belongs_between_steps_is_refused_within_one(call, failed) -> None:
    stepper = stepper_of(Planted(), 2)
    arguments = {"state": [], "load": [stepper.state().clone()]}[call]
    if failed:
        fail_halfway(stepper)
    else:
        stepper.backward(stepper.model(1.0, 1.0), 1)
    with pytest.raises(UnusableError, match=rf"{call}\(\) was called within a step, after 1 backward\(\)"):
        getattr(stepper, call)(*arguments)
    stepper.abandon()
    getattr(stepper, call)(*arguments)
    clean_step(stepper, 2)
    assert_moved_by(stepper, 1.0)


def test_a_count_on_the_device_that_is_no_number_skips_the_step() -> None:
    """It cannot be refused without waiting; a CPU's can, so the totals are filled by hand."""
    stepper = stepper_of(Planted(), 2)
    for count in (torch.nan, torch.inf, -4.0):
        loss = stepper.model(1.0, 1.0)
        stepper.backward(loss, 1)
        stepper._parts.totals.add(loss, torch.tensor(count))
        assert stepper.step().read().skipped
    clean_step(stepper, 2)
    assert_moved_by(stepper, 1.0)


@pytest.mark.parametrize(
    ("dtype", "counts"),
    [(torch.uint8, (200, 200)), (torch.float16, (40_000, 40_000)), (torch.bfloat16, (200, 61))],
    ids=str,
)
def test_counts_of_few_bits_are_added_as_numbers_on_the_device(dtype, counts) -> None:
    """These sums are 144 in uint8, inf in fp16, and 260 in bf16."""
    with deciding_on_device(True):
        stepper = stepper_of(Planted(), 2)
    for count in counts:
        stepper.backward(stepper.model(1.0, 1.0), torch.tensor(count, dtype=dtype))
    assert stepper.step().read().count == sum(counts)


def test_an_unreadable_first_count_is_refused_and_the_step_can_be_dropped() -> None:
    """On a GPU it is read where the ranks agree on the reference count; `agree` must then not fail, too."""
    reference = ReferenceCount(None, 1, torch.device("cpu"), None)
    for count in (torch.nan, torch.inf, -4.0):
        with pytest.raises(UnusableError, match="must be a number of at least 0"):
            reference.expect(torch.tensor(count))
    assert reference.agree() == 1.0


@pytest.mark.parametrize("device", ["cpu", "meta"])  # the latter cannot be read, as a GPU should not be
def test_a_count_of_several_elements_is_refused(device: str) -> None:
    stepper = stepper_of(Planted(), 1)
    with pytest.raises(UnusableError, match=r"a count of shape \(4,\)"):
        stepper.backward(stepper.model(1.0, 1.0), torch.ones(4, device=device))


def test_a_step_that_failed_after_the_exchange_is_neither_repeated_nor_abandoned(monkeypatch) -> None:
    """The other ranks may have applied it."""
    stepper = stepper_of(Planted(), 1)
    stepper.backward(stepper.model(1.0, 1.0), 1)
    monkeypatch.setattr(type(stepper.updater), "step", lambda *_: no_memory())
    with pytest.raises(torch.OutOfMemoryError):
        stepper.step()
    assert not stepper.can_abandon
    for call in (stepper.step, stepper.abandon, lambda: stepper.backward(stepper.model(1.0, 1.0), 1)):
        with pytest.raises(RuntimeError, match="after this rank had agreed to it"):
            call()
    with pytest.raises(UnusableError, match="within a step"):
        stepper.state()


def no_memory() -> None:
    raise torch.OutOfMemoryError("no memory")


def test_an_abandoned_first_step_settles_no_reference_count() -> None:
    """Its batch may have been too large for the memory: the retry is with a smaller one."""
    stepper = Stepper(mlp(), SGD(0.1), Policy.fp16())
    for count in (4096, 8):
        x, classes = features(count, 0)
        with stepper.forward():
            loss = loss_sum(stepper.model(x), classes)
        stepper.backward(loss, count)
        (stepper.abandon if count == 4096 else stepper.step)()
    assert stepper.state().reference_count == 8


def test_the_older_of_two_steppers_cannot_abandon_what_the_newer_one_did() -> None:
    model = conv_net()
    older, newer = Stepper(model, SGD(0.1), Policy.fp32()), Stepper(model, SGD(0.1), Policy.fp32())
    train(newer, *features(4, 0, (3, 8, 8)))
    for call in (older.abandon, older.step, older.named_masters):
        with pytest.raises(UnusableError, match="newer Stepper"):
            call()
    assert int(model[1].num_batches_tracked) == 1


def test_a_count_that_cannot_be_read_leaves_the_first_step_unchanged() -> None:
    """On a GPU a count is read only in the first step, for the reference count; here one has no value."""
    stepper = stepper_of(Planted(), 1, reference_count=None)
    with pytest.raises(RuntimeError, match="meta"):
        stepper.backward(stepper.model(50.0, 50.0), torch.ones((), device="meta"))
    assert not clean_step(stepper, 1).skipped
    assert_moved_by(stepper, 1.0)
