"""A model that was cast, moved or frozen after its Stepper was built is refused by name."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

from launcher.engine import SGD, AdamW, Policy, Scaling, Stepper, UnusableError
from tests.engine.observe import state_digest, train
from tests.models import conv_net, features, mlp

IMAGES = features(4, 0, (3, 8, 8))


def conv_stepper(policy: Policy | None = None, **options: object) -> Stepper:
    return Stepper(conv_net(), AdamW(0.01), policy or Policy.fp16(), scaling=Scaling("static", 64), **options)


def backward(stepper: Stepper) -> None:
    stepper.backward(next(stepper.model.parameters()).float().sum(), 1)


MOMENTS: dict[str, Callable[[Stepper], object]] = {
    "backward": backward,
    "step": lambda stepper: stepper.step(),
    "state": lambda stepper: stepper.state(),
    "load": lambda stepper: stepper.load(Stepper(conv_net(), AdamW(0.01)).state()),
}


def set_data(model: nn.Module) -> None:
    model[0].weight.data = model[0].weight.data.clone()


def freeze(model: nn.Module) -> None:
    model[0].weight.requires_grad_(False)


CHANGES: dict[str, tuple[Callable[[nn.Module], object], str]] = {  # with what the error names
    "float": (lambda model: model.float(), r"0\.weight"),
    "half": (lambda model: model.half(), r"1\.weight, 1\.bias"),
    "double": (lambda model: model.double(), r"0\.weight, .* and 3 more"),
    "memory format": (lambda model: model.to(memory_format=torch.channels_last), r"[03]\.weight"),
    "data": (set_data, r"0\.weight"),
    "frozen": (freeze, r"0\.weight"),
}


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_model_is_refused_at_the_next_moment(change, moment) -> None:
    stepper = conv_stepper()
    train(stepper, *IMAGES)
    make, text = CHANGES[change]
    make(stepper.model)
    with pytest.raises(UnusableError, match=rf"began: parameters .*{text}.* were cast") as raised:
        MOMENTS[moment](stepper)
    assert "build another Stepper" in str(raised.value)


@pytest.mark.parametrize("moment", ["backward", "step", "state"])
def test_a_thawed_parameter_is_refused(moment) -> None:
    model = nn.Sequential(nn.Linear(4, 4).requires_grad_(False), nn.Linear(4, 2))
    stepper = Stepper(model, SGD(0.1))
    model.requires_grad_(True)
    with pytest.raises(UnusableError, match=r"0\.weight, 0\.bias were cast"):
        {**MOMENTS, "backward": lambda s: s.backward(model[1].bias.sum(), 1)}[moment](stepper)


def test_a_frozen_parameter_does_not_move_by_decay_and_momentum() -> None:
    model = mlp()
    stepper = Stepper(model, SGD(0.1, momentum=0.9, weight_decay=0.1), Policy.fp32())
    train(stepper, *features(4, 0))
    model[0].weight.requires_grad_(False)
    before = model[0].weight.clone()
    with pytest.raises(UnusableError, match=r"0\.weight were cast, moved, frozen"):
        stepper.step()
    assert torch.equal(model[0].weight, before)
    model[0].weight.requires_grad_(True)
    assert not train(stepper, *features(4, 0)).skipped


def test_a_pass_of_another_network_may_freeze_in_between() -> None:
    """As GANs do: the critic is frozen while the generator learns through it."""
    critic, generator = mlp(), nn.Linear(4, 8)
    steppers = [Stepper(m, SGD(0.1), Policy.fp32(), reference_count=4) for m in (critic, generator)]
    undisturbed = Stepper(mlp(), SGD(0.1), Policy.fp32(), reference_count=4)
    for step in range(3):
        steppers[0].backward(critic(features(4, step)[0]).sum(), 4)
        critic.requires_grad_(False)
        steppers[1].backward(critic(generator(torch.ones(4, 4))).sum(), 4)
        steppers[1].step()
        critic.requires_grad_(True)
        assert not steppers[0].step().read().skipped
        undisturbed.backward(undisturbed.model(features(4, step)[0]).sum(), 4)
        undisturbed.step()
    assert state_digest(steppers[0]) == state_digest(undisturbed)


@pytest.mark.parametrize("moment", MOMENTS)
def test_the_older_of_two_steppers_says_that_a_newer_one_trains_the_model(moment) -> None:
    older = conv_stepper()
    newer = Stepper(older.model, AdamW(0.01), Policy.fp16(), scaling=Scaling("static", 64))
    train(newer, *IMAGES)
    with pytest.raises(UnusableError, match=r"0\.weight, .* or taken by a newer Stepper"):
        MOMENTS[moment](older)
    assert not train(newer, *IMAGES).skipped


def test_steppers_of_disjoint_parts_of_one_model_live_side_by_side() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    steppers = []
    for part in (0, 1):
        model[1 - part].requires_grad_(False)
        steppers.append(Stepper(model, SGD(0.1), Policy.fp32(), reference_count=4))
        model.requires_grad_(True)
    for part, stepper in enumerate(steppers):
        model[1 - part].requires_grad_(False)
        before = model[part].weight.clone()
        stepper.backward(model(torch.ones(4, 4)).sum(), 4)
        stepper.step()
        assert not torch.equal(model[part].weight, before)
        model.requires_grad_(True)


def compile_a_layer(model: nn.Module) -> nn.Module:
    model[3] = torch.compile(model[3], backend="eager")
    return model


def to_where_it_is(model: nn.Module) -> nn.Module:
    return model.to("cpu", non_blocking=True)


def deep_copied(model: nn.Module) -> nn.Module:
    other = copy.deepcopy(model)
    other.float()(IMAGES[0]).sum().backward()
    assert all(p.grad is not None for p in other.parameters())
    other.half()
    return model


def averaged(model: nn.Module) -> nn.Module:
    average = torch.optim.swa_utils.AveragedModel(model)
    average.update_parameters(model)
    average.update_parameters(model)
    return model


HARMLESS = (
    compile_a_layer,
    to_where_it_is,
    deep_copied,
    averaged,
    nn.Module.eval,
    nn.Module.train,
)


@pytest.mark.sampled(every=2)
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")
@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace:UserWarning")  # emulation in torch 2.11
@pytest.mark.parametrize("change", HARMLESS, ids=lambda change: change.__name__)
def test_what_leaves_the_parameters_where_they_are_changes_nothing(change) -> None:
    steppers = [conv_stepper() for _ in range(2)]
    for stepper in steppers:
        train(stepper, *IMAGES)
    change(steppers[0].model)
    for stepper in steppers:
        stepper.model.train()
        for step in range(2):
            train(stepper, *features(4, step, (3, 8, 8)))
    assert state_digest(steppers[0]) == state_digest(steppers[1])


def test_a_cast_that_changes_nothing_is_none() -> None:
    stepper = conv_stepper(Policy.fp32())
    stepper.model.float()
    assert not train(stepper, *IMAGES).skipped
