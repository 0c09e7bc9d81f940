"""The moving average of the weights: against its formula, through skipped steps, in the model and back."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from launcher.engine import (
    SGD,
    AdamW,
    ExponentialMovingAverage,
    Policy,
    Scaling,
    Stepper,
    TorchOptimizer,
    UnusableError,
)
from tests.engine.observe import deciding_on_device, state_digest, train
from tests.models import Odd, conv_net, features, loss_sum

SKIPPED = (0, 3, 4, 8)  # steps, by their losses
STEPS = 12
DECAY = 0.75


def stepper_of(model: nn.Module, optimizer: Any = SGD(0.1, momentum=0.9), **options: Any) -> Stepper:  # noqa: B008
    policy = options.pop("policy", Policy.fp16())
    scaling = Scaling.of(policy) if policy.arithmetic != torch.float16 else Scaling(init=1024)
    if not policy.masters and policy.weights == torch.float16:
        scaling = Scaling(mode="static", init=1024)
    with deciding_on_device(options.pop("on_device", False)):
        return Stepper(model, optimizer, policy, scaling=scaling, reference_count=8, **options)


def step(stepper: Stepper, number: int, shape: tuple[int, ...] = (3, 8, 8)) -> bool:
    """Whether it was applied."""
    x, classes = features(8, number, shape)
    if number in SKIPPED:
        x = x * float("inf")
    return not train(stepper, x, classes).skipped


def masters(stepper: Stepper) -> dict[str, Tensor]:
    return {name: master.clone() for name, master in stepper.named_masters().items()}


def bits(average: ExponentialMovingAverage) -> list[Tensor]:
    return [tensor.clone() for tensor in average.tensors()]


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(map(torch.equal, one, other))


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("every_steps", [1, 3])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"on_device": True},
        {"policy": Policy.fp32(), "optimizer": AdamW(0.01)},
        {"policy": Policy.pure_fp16()},
        {"optimizer": TorchOptimizer(torch.optim.Adam, 0.01)},
    ],
    ids=["fp16", "on a device", "fp32", "pure fp16", "torch"],
)
def test_it_is_that_of_the_formula_over_applied_steps(options, every_steps) -> None:
    stepper = stepper_of(conv_net(), **options)
    average = ExponentialMovingAverage(stepper, DECAY, every_steps)
    expected = {name: master.double() for name, master in masters(stepper).items()}
    applied = at_pass = 0
    for number in range(STEPS):
        before = bits(average)
        was_applied = step(stepper, number)
        average.update(number + 1)
        assert was_applied == (number not in SKIPPED)
        applied += was_applied
        if applied == at_pass or (number + 1) % every_steps:
            assert same(bits(average), before), number
            continue
        decay = min(DECAY, (1 + applied) / (10 + applied)) ** (applied - at_pass)
        at_pass = applied
        for name, master in masters(stepper).items():
            expected[name] = decay * expected[name] + (1 - decay) * master.double()
    assert at_pass
    found = average.state().weights
    for name, value in expected.items():
        torch.testing.assert_close(found[name].double(), value, rtol=1e-6, atol=1e-7)


def test_the_statistics_of_batch_norms_are_averaged_too() -> None:
    stepper = stepper_of(conv_net())
    average = ExponentialMovingAverage(stepper, DECAY)
    expected = {name: buffer.double() for name, buffer in stepper.model.named_buffers()}
    for number in (1, 2):
        step(stepper, number)
        average.update(number)
        decay = (1 + number) / (10 + number)
        for name, buffer in stepper.model.named_buffers():
            expected[name] = decay * expected[name] + (1 - decay) * buffer.double()
    found = average.state().buffers
    assert set(found) == {name for name in expected if "num_batches" not in name}
    for name, buffer in found.items():
        torch.testing.assert_close(buffer.double(), expected[name], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("policy", [Policy.fp16(), Policy.fp32(), Policy.pure_fp16()], ids=lambda p: p.name)
def test_the_model_has_the_averages_within_the_context_and_its_own_bits_after_it(policy) -> None:
    stepper, alone = stepper_of(conv_net(), policy=policy), stepper_of(conv_net(), policy=policy)
    average = ExponentialMovingAverage(stepper, DECAY)
    for number in (1, 2, 5):
        step(stepper, number)
        average.update(number)
        step(alone, number)
    before, averages = state_digest(stepper), bits(average)
    with average.in_model():
        for name, value in average.state().weights.items():
            assert torch.equal(
                stepper.layout.parameters[name], value.to(stepper.layout.parameters[name].dtype)
            )
        for name, value in average.state().buffers.items():
            assert torch.equal(dict(stepper.model.named_buffers())[name], value)
        assert state_digest(stepper) != before
    assert state_digest(stepper) == before == state_digest(alone)
    with pytest.raises(ZeroDivisionError), average.in_model():
        raise ZeroDivisionError
    assert state_digest(stepper) == before
    assert same(bits(average), averages)
    for each in (stepper, alone):
        step(each, 3)  # skipped: back to the statistics from before it
        step(each, 6)
    assert state_digest(stepper) == state_digest(alone)


@pytest.mark.filterwarnings("ignore:.* parameters received no gradient")
@pytest.mark.parametrize("build", [conv_net, Odd])
def test_a_state_continues_bit_for_bit_from_any_step(build) -> None:
    shape = (8,) if build is Odd else (3, 8, 8)
    stepper = stepper_of(build())
    average = ExponentialMovingAverage(stepper, DECAY, 3)
    states = []
    for number in range(STEPS):
        own = average.state()
        copies = {f: {n: t.clone() for n, t in getattr(own, f).items()} for f in ("weights", "buffers")}
        states.append((stepper.state().clone(), replace(own, **copies)))
        step(stepper, number, shape)
        average.update(number + 1)
    for start in (0, 4, 7, 11):  # after an applied step, a skipped one, and between two passes
        other = stepper_of(build(seed=1))
        again = ExponentialMovingAverage(other, DECAY, 3)
        other.load(states[start][0])
        again.load(states[start][1])
        for number in range(start, STEPS):
            step(other, number, shape)
            again.update(number + 1)
        assert same(bits(again), bits(average)), start
        assert again.state().counters == average.state().counters


@pytest.mark.parametrize("on_device", [False, True], ids=["on the host", "on a device"])
def test_a_step_that_was_dropped_changes_no_average(on_device) -> None:
    stepper = stepper_of(conv_net(), on_device=on_device)
    average = ExponentialMovingAverage(stepper, DECAY, 2)
    step(stepper, 1)
    average.update(2)
    before = bits(average)
    stepper.abandon()
    average.update(4)
    assert same(bits(average), before)
    step(stepper, 2)
    average.update(4)
    assert not same(bits(average), before)


def test_it_starts_anew_from_the_present_weights() -> None:
    stepper = stepper_of(conv_net())
    average = ExponentialMovingAverage(stepper, DECAY, 2)
    step(stepper, 1)
    average.update(2)
    average.restart()
    fresh = ExponentialMovingAverage(stepper, DECAY, 2)
    assert same(bits(average), bits(fresh))
    assert average.state().counters == fresh.state().counters == {"applied": 1}


def test_wrong_values_and_states_are_refused() -> None:
    stepper = stepper_of(conv_net())
    for decay in (1.0, -0.1, float("nan"), "0.9"):
        with pytest.raises(
            UnusableError, match=r"ExponentialMovingAverage decay=.*: it must be a finite number from 0"
        ):
            ExponentialMovingAverage(stepper, decay)  # type: ignore[arg-type]
    with pytest.raises(UnusableError, match="every_steps=0: it must be an int from 1"):
        ExponentialMovingAverage(stepper, 0.9, 0)
    average = ExponentialMovingAverage(stepper, 0.9)
    state, before = average.state(), bits(average)
    for wrong in (
        replace(state, weights={}),
        replace(state, buffers={}),
        replace(state, counters={}),
        replace(state, weights={name: value.half() for name, value in state.weights.items()}),
        replace(state, buffers={name: value.long() for name, value in state.buffers.items()}),
        replace(state, buffers={**state.buffers, "4.running_var": torch.ones(8, device="meta")}),
        replace(state, counters={"applied": 1}),
    ):
        with pytest.raises(ValueError, match="the state does not fit"):
            average.load(wrong)
    assert same(bits(average), before)
    average.load(replace(state, weights={name: nn.Parameter(value) for name, value in state.weights.items()}))
    assert not [tensor for tensor in average.tensors() if tensor.requires_grad]


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("on_device", [False, True], ids=["on the host", "on a device"])
@pytest.mark.parametrize("every_steps", [1, 3])
def test_a_roll_back_of_the_stepper_leaves_averages_of_weights(every_steps, on_device) -> None:
    """The steps since the latest pass are rolled back too, and each one after the load counts once."""
    stepper = stepper_of(conv_net(), on_device=on_device)
    average = ExponentialMovingAverage(stepper, DECAY, every_steps)
    older = stepper.state().clone()
    for number in range(1, 12):
        step(stepper, number)
        average.update(number)
    newer = stepper.state().clone()
    for state in (older, newer, older):  # back, forwards, back
        stepper.load(state)
        loaded, expected = int(stepper.scale.state.applied_steps), masters(stepper)
        expected = {name: value.clone() for name, value in average.state().weights.items()}
        applied = 0
        for number in range(every_steps):
            applied += step(stepper, 100 + number)
            average.update(every_steps * 100 + number + 1)
        assert applied == every_steps
        done = loaded + applied
        weight = 1 - min(DECAY, (1 + done) / (10 + done)) ** applied
        for name, master in masters(stepper).items():
            torch.testing.assert_close(average.state().weights[name], expected[name].lerp(master, weight))
        assert average.state().counters == {"applied": done}
        average.flush()
        average.load(average.state())


def test_a_skipped_step_after_a_roll_back_changes_no_average() -> None:
    stepper = stepper_of(conv_net())
    average = ExponentialMovingAverage(stepper, DECAY)
    older = stepper.state().clone()
    for number in (1, 2):
        step(stepper, number)
        average.update(number)
    stepper.load(older)
    before = bits(average)
    assert not step(stepper, SKIPPED[0])
    average.update(3)
    average.flush()
    assert same(bits(average), before)
    stepper.load(older)
    average.restart()
    assert same(bits(average), bits(ExponentialMovingAverage(stepper, DECAY)))


def test_averages_are_put_into_a_model_between_steps_of_its_newest_stepper_only() -> None:
    stepper = stepper_of(conv_net())
    average = ExponentialMovingAverage(stepper, DECAY)
    x, classes = features(8, 6, (3, 8, 8))
    with stepper.forward():
        stepper.backward(loss_sum(stepper.model(x), classes), 8)
    for call in (average.in_model().__enter__, stepper.average_buffers):  # a skip would miss what they change
        with pytest.raises(UnusableError, match="within a step"):
            call()
    stepper.step()
    Stepper(stepper.model, SGD(0.1))
    with pytest.raises(UnusableError, match="a newer Stepper"), average.in_model():
        pass


@pytest.mark.parametrize("on_device", [False, True], ids=["on the host", "on a device"])
def test_settling_takes_the_steps_since_the_last_pass_and_no_step_twice(on_device) -> None:
    stepper = stepper_of(conv_net(), on_device=on_device)
    first = masters(stepper)
    average = ExponentialMovingAverage(stepper, DECAY, every_steps=10)
    for number in (1, 2, 5):
        assert step(stepper, number)
        average.update(number)
    average.flush()
    applied, now = 3, masters(stepper)
    weight = 1 - min(DECAY, (1 + applied) / (10 + applied)) ** applied
    for name, values in average.state().weights.items():
        assert torch.allclose(values, first[name].lerp(now[name], weight), atol=1e-7), name
    before = bits(average)
    average.flush()
    assert not step(stepper, SKIPPED[0])
    average.update(10)
    average.flush()
    assert same(bits(average), before), "nothing has been applied since"


def test_weights_that_were_loaded_after_the_stepper_was_built_are_averaged() -> None:
    """Half weights are loaded; their masters take them over before the average reads those."""
    stepper = stepper_of(nn.Linear(4, 4))
    stepper.model.load_state_dict({"weight": torch.full((4, 4), 5.0), "bias": torch.zeros(4)})
    average = ExponentialMovingAverage(stepper, DECAY)
    assert average.state().weights["weight"].eq(5.0).all()
    stepper.model.load_state_dict({"weight": torch.full((4, 4), 7.0), "bias": torch.zeros(4)})
    average.restart()
    assert average.state().weights["weight"].eq(7.0).all()


FORBIDDEN: dict[str, Any] = {
    "backward": lambda stepper: stepper.backward(torch.zeros((), requires_grad=True), 1),
    "step": lambda stepper: stepper.step(),
    "state_dict": lambda stepper: stepper.state_dict(),
    "load": lambda stepper: stepper.load(stepper.state()),
}


@pytest.mark.parametrize("name", FORBIDDEN)
def test_what_trains_or_saves_is_refused_while_the_model_has_the_averages(name: str) -> None:
    stepper = stepper_of(conv_net(), policy=Policy.fp32())  # whose weights are the masters
    average = ExponentialMovingAverage(stepper, DECAY)
    step(stepper, 1)
    average.update(1)
    before = state_digest(stepper, counters=True)
    refused = pytest.raises(UnusableError, match=r"within ExponentialMovingAverage\.in_model\(\)")
    with average.in_model(), refused:
        FORBIDDEN[name](stepper)
    assert state_digest(stepper, counters=True) == before
