"""Modules that compute in fp32 within a half forward pass: values, dtypes, gradients, nesting, names."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from launcher.engine import SGD, Policy, Scaling, Stepper, UnusableError
from launcher.engine.precision.emulation import MARK
from launcher.engine.precision.fp32_modules import compute_in_fp32
from launcher.trainer.callbacks.fp32_fallback import kind_of

WAYS = pytest.mark.parametrize("emulate", [True, False], ids=["emulated", "native"])
HUGE = 300.0  # its square is beyond fp16


class Wide(nn.Module):
    """[n, 4] to [n, 4]; the product of `gate` and `up` leaves fp16, what `down` makes of it does not."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = (nn.Linear(4, 4, bias=False) for _ in range(3))
        with torch.no_grad():
            self.gate.weight.copy_(HUGE * torch.eye(4))
            self.up.weight.copy_(HUGE * torch.eye(4))
            self.down.weight.copy_(torch.eye(4) / HUGE)

    def forward(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
        product: Tensor = self.gate(x) * self.up(x)
        return scale * self.down(product)


class Net(nn.Module):
    def __init__(self, repeated: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Wide(), Wide()])
        self.head = nn.Linear(4, 2)
        self.repeated = repeated
        self.seen: list[torch.dtype] = []

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            y = checkpoint(block, x, use_reentrant=False) if self.repeated else block(x, scale=1.0)
            self.seen.append(y.dtype)
            x = torch.tanh(y)
        out: Tensor = self.head(x)
        self.seen.append(out.dtype)
        return out.float()


def stepper_of(model: nn.Module, emulate: bool, policy: Policy | None = None) -> Stepper:
    scaling = Scaling("none" if policy else "static", init=1)
    return Stepper(model, SGD(0.1), policy or Policy.fp16(), emulate=emulate, scaling=scaling)


def net(**options: bool) -> Net:
    torch.manual_seed(0)
    return Net(**options)


@WAYS
def test_what_overflows_in_fp16_is_finite_and_equal_to_fp32(emulate: bool) -> None:
    x = torch.ones(3, 4)
    stepper = stepper_of(net(), emulate)
    with stepper.forward():
        assert not stepper.model(x).isfinite().all()
    assert stepper.compute_in_fp32(["blocks.*"]) == [
        f"blocks.{block}{layer}" for block in (0, 1) for layer in ("", ".gate", ".up", ".down")
    ]
    wide = Wide()
    wide.load_state_dict({key: value.half().float() for key, value in wide.state_dict().items()})
    with stepper.forward(), torch.no_grad():
        first = stepper.model.blocks[0](x.half())
        assert stepper.model(x).isfinite().all()
    assert torch.equal(first, wide(x))
    assert stepper.model.seen[-3:] == [torch.float32, torch.float32, torch.float16]


@WAYS
@pytest.mark.parametrize("repeated", [False, True], ids=["kept", "checkpointed"])
def test_gradients_are_those_of_fp32_arithmetic(emulate: bool, repeated: bool) -> None:
    ours, theirs = stepper_of(net(repeated=repeated), emulate), net()
    theirs.load_state_dict({name: p.float() for name, p in ours.model.state_dict().items()})
    ours.compute_in_fp32(["*"])
    x = torch.randn(5, 4, generator=torch.Generator().manual_seed(1))
    with ours.forward():
        loss = ours.model(x).square().sum()
    ours.backward(loss, 5)
    ours.step()
    theirs(x).square().sum().backward()
    for name, p in theirs.named_parameters():
        moved = ours.named_masters()[name] - p.detach()
        assert torch.allclose(moved, -0.1 * p.grad / 5, rtol=4e-3, atol=1e-5), name  # type: ignore[operator]


@WAYS
def test_outside_of_them_arithmetic_stays_half(emulate: bool) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    seen: list[torch.dtype] = []
    for layer in model:
        layer.register_forward_hook(lambda module, args, output: seen.append(output.dtype))
    stepper = stepper_of(model, emulate)
    stepper.compute_in_fp32(["1"])
    with stepper.forward():
        model(torch.ones(2, 4))
    assert seen == [torch.float16, torch.float32, torch.float16]


@WAYS
def test_a_forward_pass_that_raises_leaves_nothing_behind(emulate: bool) -> None:
    stepper = stepper_of(net(), emulate)
    stepper.compute_in_fp32(["blocks.*"])
    for _ in range(2):
        with stepper.forward(), pytest.raises(RuntimeError):
            stepper.model(torch.ones(3, 5))
        with stepper.forward():
            assert stepper.model.head(torch.ones(2, 4)).dtype == torch.float16
    assert not torch.is_autocast_enabled(MARK)


def test_nothing_changes_in_fp32_and_outside_of_a_forward_pass() -> None:
    stepper = stepper_of(net(), emulate=False, policy=Policy.fp32())
    x = torch.ones(3, 4)
    before = stepper.model(x)
    stepper.compute_in_fp32(["*"])
    with stepper.forward():
        assert torch.equal(stepper.model(x), before)
    assert torch.equal(stepper.model(x), before)


@WAYS
def test_layers_with_kernels_of_their_own(emulate: bool) -> None:
    model = nn.ModuleDict(
        {
            "attention": nn.MultiheadAttention(8, 2, batch_first=True),
            "recurrent": nn.LSTM(8, 8, batch_first=True),
            "tokens": nn.Embedding(5, 8),
            "norm": nn.LayerNorm(8),
            "image": nn.Conv1d(8, 8, 3),
        }
    )
    stepper = stepper_of(model, emulate)
    stepper.compute_in_fp32(["*"])
    x = torch.randn(2, 4, 8).half()
    with stepper.forward():
        outputs = [
            model["attention"](x, x, x)[0],
            model["recurrent"](x)[0],
            model["tokens"](torch.tensor([1, 2])),
            model["norm"](x),
            model["image"](x.transpose(1, 2)),
        ]
    assert [output.dtype for output in outputs] == [torch.float32] * 5
    sum(output.sum() for output in outputs).backward()  # type: ignore[union-attr]


def through_file(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded: nn.Module = torch.load(file, weights_only=False)
    return loaded


@WAYS
@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model)), through_file]
)
def test_copies_of_the_model_compute_in_fp32_where_it_does(copied, emulate: bool) -> None:
    model, x = net(), torch.randn(3, 4)
    stepper = stepper_of(model, emulate)
    stepper.compute_in_fp32(["blocks.*"])
    with stepper.forward():
        expected = model(x)
    twin = copied(model)
    with stepper.forward():
        assert torch.equal(twin(x), expected)
    assert expected.isfinite().all()
    assert {p.data_ptr() for p in twin.parameters()}.isdisjoint(p.data_ptr() for p in model.parameters())
    other = stepper_of(twin, emulate)  # of a copy that has the hooks already
    assert other.fp32_modules == stepper.fp32_modules
    assert other.compute_in_fp32(["blocks.0"]) == []


def test_a_module_is_added_once() -> None:
    stepper = stepper_of(net(), emulate=True)
    assert stepper.compute_in_fp32(["head"]) == ["head"]
    assert stepper.compute_in_fp32(["head", "blocks.0.up"]) == ["blocks.0.up"]
    assert stepper.fp32_modules == ("blocks.0.up", "head")
    assert len(stepper.model.head._forward_pre_hooks) == 1


def test_a_pattern_without_a_module_is_refused_before_anything_changes() -> None:
    model = net()
    with pytest.raises(
        UnusableError, match=r"'blocks.\*.upp' matches none of the 10 modules. Nearest: blocks"
    ):
        compute_in_fp32(model, ["head", "blocks.*.upp"])
    assert not model.head._forward_pre_hooks


def test_within_a_step_it_is_refused() -> None:
    stepper = stepper_of(nn.Linear(4, 2), emulate=True)
    with stepper.forward():
        loss = stepper.model(torch.ones(1, 4)).float().sum()
    stepper.backward(loss, 1)
    with pytest.raises(UnusableError, match="compute_in_fp32"):
        stepper.compute_in_fp32(["*"])


def twins() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2)))


@pytest.mark.parametrize(
    ("build", "name", "patterns"),
    [
        (net, "blocks.1.down", ["blocks.*.down"]),
        (net, "head", ["head"]),
        (net, "blocks.0", ["blocks.0", "blocks.1"]),  # blocks.* would match what is within them, too
        (twins, "2", ["0", "2"]),  # the same number of another type is not like it
        (twins, "3.0", ["*.*"]),
        (lambda: nn.ModuleDict({"a[0]": nn.Linear(1, 1), "b": nn.ReLU()}), "a[0]", ["a[[]*]"]),
    ],
)
def test_modules_of_the_same_kind(build: Callable[[], nn.Module], name: str, patterns: list[str]) -> None:
    assert kind_of(build(), name) == patterns
