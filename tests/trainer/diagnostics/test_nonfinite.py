"""The first module whose output is not finite, named on models of every shape; nothing is left behind."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from launcher.engine import SGD, Policy, Scaling, Stepper
from launcher.evaluation.evaluate import unchanged
from launcher.trainer.diagnostics.nonfinite import (
    diagnose,
    diagnose_backward,
    nonfinite_parameters,
)
from tests.engine.observe import state_digest
from tests.models import conv_net, features, mlp


class Faulty(nn.Module):
    """Passes its input on, with one value replaced."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.value = value

    def forward(self, x: Tensor) -> Tensor:
        x = x.clone()
        x[1, 0] = self.value
        return x


class InPlace(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mul_(float("inf"))


class Nested(nn.Module):
    """Takes and gives containers, and calls a layer twice; the fault is in its own arithmetic."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, inputs: dict[str, Tensor], *, factor: float) -> dict[str, list[Tensor]]:
        x = self.layer(inputs["x"])
        return {"parts": [x, self.layer(x) * factor, torch.zeros(3, dtype=torch.int64)]}


class Checkpointed(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, x, use_reentrant=False)


def on(model: nn.Module, x: Tensor) -> Callable[[], object]:
    return lambda: model(x)


@pytest.mark.parametrize(("value", "kind"), [(float("nan"), "nan"), (float("inf"), "inf")])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_the_module_that_made_it_is_named(value: float, kind: str, place: int) -> None:
    layers = [nn.Linear(8, 8) for _ in range(3)]
    model = nn.Sequential(*layers[:place], nn.Sequential(Faulty(value)), *layers[place:])
    finding = diagnose(model, on(model, torch.ones(5, 8)))
    assert finding is not None
    assert (finding.name, finding.type, finding.kind) == (f"{place}.0", "Faulty", kind)
    assert (finding.position, finding.inputs_finite) == (place, True)
    if place == 0:
        assert finding.largest_input == 1.0


def test_a_finite_pass_has_no_culprit() -> None:
    model = nn.Sequential(nn.Identity(), nn.Hardtanh(-3, 3))
    assert diagnose(model, on(model, torch.tensor([[-7.0, 2.0]]))) is None


def test_an_input_that_is_not_finite_is_no_modules_fault() -> None:
    model = mlp()
    x = torch.ones(4, 8)
    x[3, 5] = float("nan")
    finding = diagnose(model, on(model, x))
    assert finding is not None
    assert (finding.name, finding.inputs_finite) == ("0", False)


def test_a_module_that_makes_it_is_named_before_one_that_was_given_it() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.given, self.made = nn.Identity(), Faulty(float("inf"))

        def forward(self, x: Tensor) -> Tensor:
            self.given(x - float("inf"))
            return self.made(x)

    model = Masked()
    finding = diagnose(model, on(model, torch.ones(2, 2)))
    assert finding is not None
    assert (finding.name, finding.inputs_finite) == ("made", True)


def test_a_weight_that_is_not_finite_is_named_with_its_module() -> None:
    model = mlp()
    with torch.no_grad():
        model[2].weight[1, 1] = float("inf")
    finding = diagnose(model, on(model, torch.ones(4, 8)))
    assert nonfinite_parameters(model) == ["2.weight"]
    assert finding is not None
    assert finding.name == "2"


def test_the_inputs_are_read_before_the_module_overwrites_them() -> None:
    model = nn.Sequential(nn.Identity(), InPlace(), nn.ReLU(inplace=True))
    finding = diagnose(model, on(model, torch.ones(2, 3)))
    assert finding is not None
    assert (finding.name, finding.largest_input) == ("1", 1.0)


def test_integers_have_no_largest_value() -> None:
    model = nn.Embedding(4, 2)
    with torch.no_grad():
        model.weight[3] = float("nan")
    finding = diagnose(model, on(model, torch.tensor([0, 3, 1])))
    assert finding is not None
    assert (finding.inputs_finite, finding.largest_input) == (True, 0.0)


def test_a_module_whose_own_arithmetic_fails_is_named_not_its_parts() -> None:
    model = Nested()
    finding = diagnose(model, lambda: model({"x": torch.ones(2, 4)}, factor=float("inf")))
    assert finding is not None
    assert (finding.name, finding.type) == ("", "Nested")


@pytest.mark.parametrize("policy", [Policy.fp16(), Policy.amp_fp16(), Policy.bf16()], ids=lambda p: p.name)
def test_overflow_of_fp16_is_found_under_the_precision_context(policy: Policy) -> None:
    model = Checkpointed(nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)))
    with torch.no_grad():
        for layer in model.inner:
            layer.weight.fill_(100.0)  # 800, then 640000: more than fp16 holds
    stepper = Stepper(model, SGD(0.1), policy, emulate=True)

    def run() -> None:
        with stepper.forward():
            model(torch.ones(2, 8))

    finding = diagnose(model, run)
    if policy.arithmetic == torch.float16:
        assert finding is not None
        assert (finding.name, finding.kind, finding.largest_input) == ("inner.1", "inf", 800.0)
    else:
        assert finding is None


def hooks_of(model: nn.Module) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


class Steep(nn.Module):
    """A gradient beyond fp16 within a module whose output has a small one."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        inner: Tensor = self.inner(x * 1e-4)
        return x + inner * 1e4


class Towers(nn.Module):
    """What `first` makes is read by two modules, of which `steep` overflows on the way back."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.fine, self.steep = nn.Linear(4, 4), nn.Linear(4, 4), Steep()

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        out: Tensor = torch.relu_(self.fine(x)) + self.steep(x)
        return out.float()


@pytest.mark.parametrize(("scale", "found"), [(1.0, None), (1000.0, "steep")])
def test_the_module_whose_gradient_leaves_fp16_is_named_and_what_made_its_input(scale, found) -> None:
    torch.manual_seed(0)
    stepper = Stepper(Towers(), SGD(0.1), Policy.fp16(), scaling=Scaling("none"), reference_count=1)

    def run() -> None:
        with stepper.forward():
            loss = scale * stepper.model(torch.ones(2, 4)).sum()
        stepper.dry_backward(loss)

    def hooks() -> list[int]:
        return [hook for m in stepper.model.modules() for hook in (*m._forward_hooks, *m._forward_pre_hooks)]

    before = hooks()
    diagnosis = diagnose_backward(stepper.model, run)
    assert hooks() == before
    if found is None:
        assert (diagnosis.origin, diagnosis.source) == (None, None)
        return
    assert diagnosis.origin is not None
    assert diagnosis.source is not None
    assert (diagnosis.origin.name, diagnosis.source.name) == ("steep", "first")


def test_hooks_are_gone_and_buffers_back_also_after_an_error() -> None:
    model = conv_net()
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}

    def run() -> None:
        model(torch.ones(2, 3, 8, 8))
        assert hooks_of(model) > 0
        assert not torch.equal(model[1].running_mean, before["1.running_mean"])
        raise KeyError("on purpose")

    with pytest.raises(KeyError):
        diagnose(model, run)
    assert hooks_of(model) == 0
    assert all(torch.equal(buffer, before[name]) for name, buffer in model.named_buffers())


def test_no_gradient_and_no_grad_mode_is_left() -> None:
    model = mlp()
    diagnose(model, on(model, torch.ones(2, 8)))
    assert torch.is_grad_enabled()
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("policy", [Policy.fp16(), Policy.fp32()], ids=lambda policy: policy.name)
def test_a_dry_backward_gives_the_gradients_of_the_step_and_leaves_no_trace(policy: Policy) -> None:
    model = conv_net()
    images, labels = features(8, 0, (3, 8, 8))
    stepper = Stepper(model, SGD(0.1), policy, reference_count=8)

    def loss_sum() -> Tensor:
        with stepper.forward():
            return F.cross_entropy(model(images).float(), labels, reduction="sum")

    before = state_digest(stepper)
    with unchanged(model):
        dry = stepper.dry_backward(loss_sum())
    assert state_digest(stepper) == before
    assert all(p.grad is None for p in model.parameters())
    stepper.backward(loss_sum(), 8)
    stepper.step()
    for name, gradient in stepper.layout.gradients().items():
        assert torch.equal(dry[name].to(gradient.dtype), gradient), name
