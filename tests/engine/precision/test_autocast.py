"""Native half arithmetic keeps the classes of the emulated one, function by function.

On the CPU with values; for CUDA with tensors of FakeTensorMode, which have the dispatch keys and dtypes of
real ones and no values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DynamicOutputShapeException, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from launcher.engine import SGD, Policy, Stepper
from launcher.engine.precision.autocast import HalfArithmetic
from tests.engine.precision.test_emulated_functions import (
    ARGUMENTS,
    IN_HALF,
    PARAMETRIZED,
    PICKS,
    SQUARE,
    WIDE,
    Arguments,
    leaves,
    public,
)
from tests.models import features, loss_sum

HALVES = (torch.float16, torch.bfloat16)
FUNCTIONS: dict[str, tuple[Callable[..., Any], Arguments]] = {
    f"{module}.{name}": (
        partial(getattr(getattr(torch, module), name), **({"upper": False} if "triangular" in name else {})),
        ARGUMENTS[module][name],
    )
    for module in ARGUMENTS
    for name in public(getattr(torch, module))
} | {name: (function, (SQUARE / 4,)) for name, function in WIDE.items()}


def changed(change: Callable[[Tensor], Tensor], value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return type(value)(changed(change, item) for item in value)
    return change(value) if isinstance(value, Tensor) else value


def cast(dtype: torch.dtype, value: Any) -> Any:
    return changed(lambda x: x.to(dtype) if x.dtype == torch.float16 else x, value)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_compute_in_fp32_on_a_cpu(name: str, dtype: torch.dtype) -> None:
    function, arguments = FUNCTIONS[name]
    arguments = cast(dtype, arguments)
    with HalfArithmetic("cpu", dtype):
        found = leaves(function(*arguments))
    expected = leaves(function(*changed(lambda x: x.float() if x.dtype == dtype else x, arguments)))
    in_half = name.rpartition(".")[2] in IN_HALF
    tolerance = torch.finfo(dtype).eps if in_half else 1e-5
    for ours, exact in zip(found, expected, strict=True):
        assert ours.dtype == (dtype if in_half else exact.dtype)
        assert torch.allclose(ours.to(exact.dtype), exact, rtol=tolerance, atol=tolerance * 1e-1)


# What moves elements or changes their signs, which is exact in any dtype.
BEFORE = {f"aten::{name}" for name in ("_to_copy", "t", "abs", "view", "permute", "reflection_pad1d")}


class Seen(TorchDispatchMode):
    """The operators below autocast that give half results."""

    def __init__(self) -> None:
        super().__init__()
        self.half: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        several = found if isinstance(found, (tuple, list)) else [found]
        if any(isinstance(x, Tensor) and x.dtype in HALVES for x in several):
            self.half |= {func.name().partition(".")[0]} - BEFORE
        return found


@pytest.fixture
def fake_cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeTensorMode]:
    """Tensors of a GPU that is not there; torch.autocast believes in it."""
    monkeypatch.setattr(torch.cuda.amp.common, "amp_definitely_not_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda *emulated: True)
    with torch.backends.cudnn.flags(enabled=False), FakeTensorMode(allow_non_fake_inputs=True) as mode:
        yield mode


def to_cuda(dtype: torch.dtype, value: Any) -> Any:
    return changed(lambda x: torch.empty(x.shape, dtype=x.dtype, device="cuda"), cast(dtype, value))


@pytest.mark.usefixtures("fake_cuda")
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_compute_in_fp32_on_cuda(name: str, dtype: torch.dtype) -> None:
    function, arguments = FUNCTIONS[name]
    arguments = to_cuda(dtype, arguments)
    with HalfArithmetic("cuda", dtype), Seen() as seen:
        try:
            found = leaves(function(*arguments))
        except DynamicOutputShapeException:  # lstsq; what came before has been seen
            found = []
    in_half = name.rpartition(".")[2] in IN_HALF
    assert in_half or not seen.half
    for ours in found:
        assert (ours.dtype == dtype) == in_half


RNNS: dict[str, Callable[[], nn.Module]] = {
    "LSTM": partial(nn.LSTM, 4, 8, batch_first=True, num_layers=2),
    "GRU": partial(nn.GRU, 4, 8, bidirectional=True),
    "RNN": partial(nn.RNN, 4, 8, bias=False),
}


@pytest.mark.parametrize("name", RNNS)
@pytest.mark.parametrize("policy", [Policy.bf16(), Policy.amp_bf16()], ids=lambda policy: policy.name)
def test_rnns_under_bf16_compute_in_fp32(name: str, policy: Policy) -> None:
    """As emulated, to the last bit: inputs and weights are rounded to bf16, the rest is fp32."""
    gradients = []
    for emulate in (True, False):
        torch.manual_seed(0)
        module = RNNS[name]()
        stepper = Stepper(module, SGD(0.1), policy, emulate=emulate, reference_count=1)
        x = torch.linspace(-2, 2, 24).view(2, 3, 4)  # fp32: autocast makes fp16 of such a one for cuDNN
        with stepper.forward():
            out, _ = module(x)
        assert out.dtype == torch.bfloat16
        gradients.append({"": out.detach()} | stepper.dry_backward(out.float().square().sum()))
    for key, gradient in gradients[0].items():
        assert torch.equal(gradient, gradients[1][key]), key


@pytest.mark.usefixtures("fake_cuda")
@pytest.mark.parametrize("name", ["rnn_tanh", "rnn_relu"])  # the others have no fake kernels
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_rnns_on_cuda_have_one_dtype(name: str, dtype: torch.dtype) -> None:
    """cuDNN demands it of the weights."""
    x, hidden = torch.empty(2, 3, 4, device="cuda"), torch.empty(1, 3, 8, device="cuda")
    weights = [torch.empty(8, n, device="cuda", dtype=dtype) for n in (4, 8)]
    weights[1] = weights[1].float()
    with HalfArithmetic("cuda", dtype), Seen() as seen:
        out, _ = getattr(torch, name)(x, hidden, weights, False, 1, 0.0, True, False, False)
    assert out.dtype == dtype
    assert bool(seen.half) == (dtype == torch.float16)


@pytest.mark.parametrize("name", ["orthogonal matrix_exp", "spectral_norm"])
def test_parametrized_layers_train_natively(name: str) -> None:
    losses = []
    for policy in (Policy.fp32(), Policy.bf16()):
        torch.manual_seed(0)
        model = nn.Sequential(PARAMETRIZED[name](nn.Linear(8, 8)), nn.Tanh(), nn.Linear(8, 3))
        stepper = Stepper(model, SGD(0.1), policy, emulate=False)
        x, classes = features(32, 0)
        for _ in range(4):
            with stepper.forward():
                loss = loss_sum(model(x), classes)
            stepper.backward(loss, 32)
            last = stepper.step().read().loss
        losses.append(last)
    assert abs(losses[1] - losses[0]) < 0.05


@pytest.mark.parametrize("name", [*PICKS, "embedding"])
def test_the_gradients_of_equal_rows_are_summed_in_fp32_on_a_cpu(name: str) -> None:
    """4096 ones: in bf16 the sum would stay at 256."""
    table = torch.zeros(3, 2, dtype=torch.bfloat16, requires_grad=True)
    pick = PICKS.get(name, lambda table, tokens: nn.functional.embedding(tokens, table))
    with HalfArithmetic("cpu", torch.bfloat16):
        rows = pick(table, torch.ones(4096, dtype=torch.int64))
    assert rows.dtype == torch.bfloat16
    rows.sum(dtype=torch.float32).backward()
    assert table.grad is not None
    assert table.grad[1].tolist() == [4096, 4096]


def test_autocast_of_others_is_as_ever() -> None:
    """What is registered for the process acts in the contexts of this engine only."""
    functions = [torch.exp2, torch.matrix_exp, lambda x: x.logcumsumexp(0), lambda x: x @ x]

    def under_autocast() -> list[Tensor]:
        with torch.autocast("cpu", torch.bfloat16):
            return [function(torch.eye(3)) for function in functions]

    def under_half() -> list[Tensor]:
        with torch.autocast("cpu", torch.bfloat16):
            return [function(torch.eye(3, dtype=torch.bfloat16)) for function in functions]

    before = {path: path() for path in (under_autocast, under_half)}
    with HalfArithmetic("cpu", torch.bfloat16):
        assert torch.exp2(torch.eye(3, dtype=torch.bfloat16)).dtype == torch.float32
        with torch.autocast("cpu", enabled=False):
            assert torch.exp2(torch.eye(3, dtype=torch.bfloat16)).dtype == torch.bfloat16
    for path, outputs in before.items():
        for old, new in zip(outputs, path(), strict=True):
            assert old.dtype == new.dtype
            assert torch.equal(old, new)


class Repeated(nn.Module):
    """A block whose forward pass is repeated in the backward pass."""

    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.seen: list[torch.dtype] = []
        self.use_reentrant = use_reentrant

    def block(self, x: Tensor) -> Tensor:
        result = torch.matrix_exp(self.linear(x))
        self.seen.append(result.dtype)
        return result * result

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = checkpoint(self.block, x, use_reentrant=self.use_reentrant)
        return found


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_activation_checkpointing_repeats_in_the_same_arithmetic(use_reentrant: bool) -> None:
    model = Repeated(use_reentrant)
    stepper = Stepper(model, SGD(0.1), Policy.amp_bf16(), emulate=False, reference_count=1)
    with stepper.forward():
        loss = model(torch.eye(4, requires_grad=True)).sum()
    stepper.backward(loss, 1)
    assert model.seen == [torch.float32, torch.float32]
    assert stepper.step().read().applied_steps == 1


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # the compiler's own, at import
def test_the_compiler_traces_them() -> None:
    """With the context around the compiled code, and within it."""
    torch.manual_seed(0)
    layer = nn.Linear(4, 4)

    def compute(x: Tensor) -> Tensor:
        return torch.matrix_exp(layer(x)) @ torch.linalg.inv(layer(x) + 3 * torch.eye(4))

    def within(x: Tensor) -> Tensor:
        with HalfArithmetic("cpu", torch.bfloat16):
            return compute(x)

    x = torch.randn(4, 4)
    expected = within(x)
    with HalfArithmetic("cpu", torch.bfloat16):
        around = torch.compile(compute, backend="aot_eager", fullgraph=True)
        assert torch.equal(around(x), expected)
    assert torch.equal(torch.compile(within, backend="aot_eager")(x), expected)
    with torch.autocast(
        "cpu", torch.bfloat16
    ):  # another arithmetic: compiled again; torch's own makes nan of it
        assert torch.allclose(around(x), compute(x), rtol=0, atol=0, equal_nan=True)
