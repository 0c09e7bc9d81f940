"""Names are those of the plain model, whatever torch.compile wraps."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from launcher.engine import SGD, AdamW, Policy, Scaling, Stepper, UnusableError
from launcher.engine.names import named_buffers, named_modules, named_parameters, plain_name
from launcher.trainer.diagnostics.nonfinite import diagnose, nonfinite_parameters
from tests.engine.observe import state_digest, train
from tests.models import conv_net, features

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning"),  # by the compiler's first import
    pytest.mark.filterwarnings(
        "ignore:The .grad attribute:UserWarning"
    ),  # at which the compiler looks itself
    pytest.mark.filterwarnings(
        "ignore:Dynamo does not know how to trace:UserWarning"
    ),  # emulation in torch 2.11
]


def whole(model: nn.Module) -> nn.Module:
    return torch.compile(model, backend="eager")


def a_part(model: nn.Module) -> nn.Module:
    model[3] = torch.compile(model[3], backend="eager")
    model[4] = torch.compile(model[4], backend="eager")
    return model


def both(model: nn.Module) -> nn.Module:
    return whole(a_part(model))


def not_at_all(model: nn.Module) -> nn.Module:
    return model


WRAPPINGS = (whole, a_part, both)


@pytest.mark.parametrize("wrap", WRAPPINGS)
def test_names_are_those_of_the_plain_model(wrap) -> None:
    plain, wrapped = conv_net(), wrap(conv_net())
    assert list(named_parameters(wrapped)) == [name for name, _ in plain.named_parameters()]
    assert list(named_buffers(wrapped)) == [name for name, _ in plain.named_buffers()]
    assert {name for name, _ in named_modules(wrapped)} == {name for name, _ in plain.named_modules()}
    assert [plain_name(key) for key in wrapped.state_dict()] == list(plain.state_dict())


@pytest.mark.parametrize("key", ["module", "_fsdp_wrapped_module"])
def test_a_module_that_is_really_called_so_keeps_its_name(key) -> None:
    model = nn.Sequential()
    model.add_module(key, nn.Linear(2, 2))
    assert list(named_parameters(model)) == [f"{key}.weight", f"{key}.bias"]
    assert list(named_parameters(torch.compile(model))) == [f"{key}.weight", f"{key}.bias"]
    assert dict(named_modules(model))[key] is model[0]


@pytest.mark.sampled(every=6)
@pytest.mark.parametrize("wrap", WRAPPINGS)
@pytest.mark.parametrize("back", [False, True])
def test_a_state_goes_from_compiled_to_plain_and_back(wrap, back) -> None:
    steppers = [
        Stepper(f(conv_net()), AdamW(0.01), scaling=Scaling(init=64))
        for f in (wrap, not_at_all)[:: -1 if back else 1]
    ]
    assert not train(steppers[0], *features(4, 0, (3, 8, 8))).skipped
    state = steppers[0].state().clone()
    steppers[1].load(state)
    assert state_digest(steppers[1]) == state_digest(steppers[0])
    names = [*state.weights, *state.optimizer, *state.buffers, *steppers[0].replicas()]
    names += [*steppers[0].named_masters(), *steppers[0].layout.gradients()]
    assert not [name for name in names if "_orig_mod" in name]


def test_reports_and_refusals_have_plain_names() -> None:
    model = both(conv_net())
    stepper = Stepper(model, SGD(0.1), scaling=Scaling("static", 1))
    x, classes = features(4, 0, (3, 8, 8))
    assert set(train(stepper, x * torch.inf, classes).culprit_parameters) == set(stepper.layout.parameters)
    with torch.no_grad():
        named_parameters(model)["3.weight"].fill_(torch.nan)
        with stepper.forward():
            found = diagnose(model, lambda: model(x))
    assert nonfinite_parameters(model) == ["3.weight"]
    assert found is not None
    assert found.name == "3"
    with pytest.raises(UnusableError, match=r"parameter 3\.weight is torch.float64"):
        Stepper(a_part(conv_net().double())[3:5], SGD(0.1), Policy.fp32())
