"""Emulated half arithmetic: classes, dtypes, roundings, gradients; by function and by module."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from launcher.engine import SGD, Policy, Scaling, Stepper
from launcher.engine.precision import op_lists
from launcher.engine.precision.emulation import RoundedArithmetic

HALF = torch.float16
EPSILON = {torch.float16: 2.0**-11, torch.float32: 2.0**-20}  # fp32: the sums have a few terms

Function = Callable[..., Tensor]
Shapes = tuple[tuple[int, ...], ...]

LOWER_PRECISION_FP: dict[str, tuple[Function, Shapes]] = {
    "conv1d": (F.conv1d, ((2, 3, 9), (4, 3, 3), (4,))),
    "conv2d": (F.conv2d, ((2, 3, 6, 6), (4, 3, 3, 3), (4,))),
    "conv3d": (F.conv3d, ((1, 2, 4, 4, 4), (3, 2, 2, 2, 2))),
    "conv_transpose1d": (F.conv_transpose1d, ((2, 3, 5), (3, 4, 3))),
    "conv_transpose2d": (F.conv_transpose2d, ((2, 3, 4, 4), (3, 2, 3, 3))),
    "conv_transpose3d": (F.conv_transpose3d, ((1, 2, 3, 3, 3), (2, 3, 2, 2, 2))),
    "linear": (F.linear, ((4, 8), (5, 8), (5,))),
    "matmul": (torch.matmul, ((2, 4, 8), (8, 3))),
    "method matmul": (Tensor.matmul, ((4, 8), (8, 3))),
    "@": (lambda a, b: a @ b, ((4, 8), (8, 3))),
    "mm": (torch.mm, ((4, 8), (8, 3))),
    "bmm": (torch.bmm, ((2, 4, 8), (2, 8, 3))),
    "mv": (torch.mv, ((4, 8), (8,))),
    "addmm": (torch.addmm, ((4, 3), (4, 8), (8, 3))),
    "baddbmm": (torch.baddbmm, ((2, 4, 3), (2, 4, 8), (2, 8, 3))),
    "einsum": (lambda a, b: torch.einsum("bij,bjk->bik", a, b), ((2, 4, 8), (2, 8, 3))),
    "vecdot": (torch.linalg.vecdot, ((4, 8), (4, 8))),
    "prelu": (F.prelu, ((4, 3), (3,))),
    "attention": (F.scaled_dot_product_attention, ((1, 2, 4, 8), (1, 2, 5, 8), (1, 2, 5, 8))),
    "attention with mask": (
        F.scaled_dot_product_attention,
        ((1, 2, 4, 8), (1, 2, 5, 8), (1, 2, 5, 8), (4, 5)),
    ),
}
FP32: dict[str, tuple[Function, Shapes]] = {
    "layer_norm": (lambda x, w, b: F.layer_norm(x, (8,), w, b), ((4, 8), (8,), (8,))),
    "rms_norm": (lambda x, w: F.rms_norm(x, (8,), w, 1e-5), ((4, 8), (8,))),
    "group_norm": (lambda x: F.group_norm(x, 2), ((2, 4, 6),)),
    "softmax": (lambda x: F.softmax(x, -1), ((4, 8),)),
    "method softmax": (lambda x: x.softmax(-1), ((4, 8),)),
    "log_softmax": (lambda x: F.log_softmax(x, -1), ((4, 8),)),
    "logsumexp": (lambda x: x.logsumexp(-1), ((4, 8),)),
    "sum": (torch.sum, ((4, 8),)),
    "method sum": (lambda x: x.sum(0), ((4, 8),)),
    "cumsum": (lambda x: x.cumsum(0), ((4, 8),)),
    "exp": (torch.exp, ((4, 8),)),
    "** 3": (lambda x: x**3, ((4, 8),)),
    "2 **": (lambda x: 2**x, ((4, 8),)),
    "1 /": (lambda x: 1 / x.abs().clamp(min=0.5), ((4, 8),)),
    "norm": (torch.norm, ((4, 8),)),
    "linalg norm": (torch.linalg.vector_norm, ((4, 8),)),
    "cosine_similarity": (F.cosine_similarity, ((4, 8), (4, 8))),
    "cross_entropy": (lambda x: F.cross_entropy(x, torch.arange(4)), ((4, 8),)),
    "mse_loss": (F.mse_loss, ((4, 8), (4, 8))),
    "interpolate": (lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"), ((1, 2, 3, 3),)),
    "gumbel_softmax": (lambda x: _seeded(F.gumbel_softmax, x), ((4, 8),)),
}
INNER: dict[str, tuple[Function, Shapes]] = {
    "batch_norm": (lambda x, w, b: F.batch_norm(x, None, None, w, b, True), ((6, 3, 4), (3,), (3,))),
    "instance_norm": (F.instance_norm, ((2, 3, 8),)),
    "mean": (torch.mean, ((4, 8),)),
    "method mean": (lambda x: x.mean((0, 1)), ((4, 8, 2),)),
    "var": (lambda x: x.var(0), ((4, 8),)),
    "avg_pool2d": (lambda x: F.avg_pool2d(input=x, kernel_size=2), ((1, 2, 4, 4),)),
    "adaptive_avg_pool2d": (lambda x: F.adaptive_avg_pool2d(x, 1), ((1, 2, 4, 4),)),
    "max_pool2d": (lambda x: F.max_pool2d(x, 2), ((1, 2, 4, 4),)),
    "gelu": (F.gelu, ((4, 8),)),
    "relu": (F.relu, ((4, 8),)),
    "dot": (torch.dot, ((8,), (8,))),
    "bilinear": (F.bilinear, ((4, 3), (4, 5), (2, 3, 5))),
    "tensordot": (lambda a, b: torch.tensordot(a, b, 1), ((4, 8), (8, 3))),
}


def _seeded(function: Function, x: Tensor) -> Tensor:
    """The same noise in each dtype: that of an fp32 run."""
    torch.manual_seed(0)
    if x.dtype != torch.float64:
        return function(x)
    noise = -torch.empty_like(x, dtype=torch.float32).to(HALF).exponential_().double().log()
    return F.softmax(x + noise, -1)


def inputs(shapes: Shapes) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator).to(HALF) for shape in shapes]


def check(function: Function, shapes: Shapes, dtype: torch.dtype, wide_vectors: bool) -> None:
    """Output and gradients equal fp64 within one rounding; gradients have the inputs' dtypes."""
    halves = inputs(shapes)
    ours = [x.float() if wide_vectors and x.ndim < 2 else x.clone() for x in halves]
    exact = [x.double() for x in halves]
    for x in (*ours, *exact):
        x.requires_grad_()
    with RoundedArithmetic(HALF):
        out = function(*ours)
    reference = function(*exact)
    assert out.dtype == dtype
    _close(out, reference)
    direction = (
        torch.linspace(-1, 1, reference.numel(), dtype=torch.float64).reshape(reference.shape).to(HALF)
    )
    out.backward(direction.to(out.dtype))
    reference.backward(direction.double())
    for a, b in zip(ours, exact, strict=True):
        assert a.grad is not None
        assert a.grad.dtype == a.dtype
        _close(a.grad.to(HALF), b.grad)


def _close(value: Tensor, exact: Tensor) -> None:
    """Within one unit of rounding, or of the largest term for sums that cancel."""
    allowed = EPSILON[value.dtype] * (2 * exact.abs() + exact.abs().max() / 4)
    assert ((value.double() - exact).abs() <= allowed).all()


@pytest.mark.parametrize("name", LOWER_PRECISION_FP)
def test_products_take_half_accumulate_fp32_and_round_once(name) -> None:
    function, shapes = LOWER_PRECISION_FP[name]
    check(function, shapes, HALF, wide_vectors=True)
    halves = inputs(shapes)
    with RoundedArithmetic(HALF):
        from_half, from_fp32 = function(*halves), function(*(x.float() + 1e-6 for x in halves))
    assert torch.equal(from_half, function(*(x.float() for x in halves)).to(HALF))
    rounded = [(x.float() + 1e-6).to(HALF).float() for x in halves]
    assert torch.equal(from_fp32, function(*rounded).to(HALF))


@pytest.mark.parametrize("name", LOWER_PRECISION_FP)
def test_products_give_the_dtype_that_autocast_gives(name) -> None:
    function, shapes = LOWER_PRECISION_FP[name]
    mixed = [x.float() for x in inputs(shapes)]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        native = function(*mixed)
    with RoundedArithmetic(torch.bfloat16):
        emulated = function(*mixed)
    if name not in ("prelu", "mv"):  # which CUDA's autocast lowers and the CPU's does not
        assert emulated.dtype == native.dtype
    assert (emulated.float() - native.float()).abs().max() <= 2.0**-6 * native.abs().max()


@pytest.mark.parametrize("name", FP32)
def test_reductions_exponentials_norms_and_losses_are_fp32(name) -> None:
    check(*FP32[name], torch.float32, wide_vectors=True)


@pytest.mark.parametrize("name", INNER)
def test_other_operations_keep_half(name) -> None:
    check(*INNER[name], HALF, wide_vectors=name == "batch_norm")


def test_promoting_operations_are_fp32_when_one_input_is() -> None:
    a, b = torch.ones(3, dtype=HALF), torch.full((3,), 1 + 2.0**-20)
    with RoundedArithmetic(HALF):
        assert torch.dot(a, b) == 3 * (1 + 2.0**-20)
        assert (
            F.bilinear(torch.ones(2, 3), torch.ones(2, 3), torch.ones(1, 3, 3, dtype=HALF)).dtype
            == torch.float32
        )


def test_a_dtype_that_the_caller_asks_for_is_kept() -> None:
    x = torch.full((1000,), 100.0, dtype=HALF)
    with RoundedArithmetic(HALF):
        assert x.mean(dtype=torch.float32).dtype == torch.float32
        assert x.sum(dtype=torch.float64).dtype == torch.float64
        assert F.softmax(x, 0, dtype=HALF).dtype == HALF
        assert x.sum() == 1e5  # out of fp16's range


def test_results_go_where_the_caller_wants_them() -> None:
    a, b, product, total = torch.ones(2, 4), torch.ones(4, 3), torch.zeros(2, 3), torch.zeros(3)
    with RoundedArithmetic(HALF):
        torch.mm(a, b, out=product)
        torch.sum(product, 0, out=total)
    assert product.tolist() == [[4.0] * 3] * 2
    assert total.tolist() == [8.0] * 3


def test_integers_and_fp64_are_left_alone() -> None:
    with RoundedArithmetic(HALF):
        assert (torch.arange(6).reshape(2, 3) @ torch.arange(3)).tolist() == [5, 14]
        assert torch.sum(torch.arange(6)).dtype == torch.int64
        assert torch.exp(torch.zeros(2, dtype=torch.float64)).dtype == torch.float64
        assert (
            torch.ones(2, 2, dtype=torch.float64) @ torch.ones(2, dtype=torch.float64)
        ).dtype == torch.float64


def autocast_list(section: str) -> list[str]:
    """Names in a list of the header in which torch declares what its own autocast does."""
    header = Path(torch.__file__).parent / "include/ATen/autocast_mode.h"
    if not header.exists():
        pytest.skip("this torch comes without its C++ headers")
    body = re.search(rf"#define {section}\(_\)(.*?)\n\n", header.read_text(), re.DOTALL)
    assert body is not None
    return sorted(set(re.findall(r"_\((?:ADD_NS\()?(\w+)", body[1])))


@pytest.mark.parametrize(
    ("section", "ours"),
    [
        ("AT_FORALL_LOWER_PRECISION_FP", op_lists.LOWER_PRECISION_FP),
        ("AT_FORALL_FP32", op_lists.FP32),
        ("AT_FORALL_FP32_SET_OPT_DTYPE", op_lists.FP32),
        ("AT_FORALL_DIFFERENT_REDISPATCH_SIGNATURE", op_lists.FP32),
        ("AT_FORALL_PROMOTE", op_lists.PROMOTE),
    ],
)
def test_every_public_operation_of_autocast_is_in_the_same_class(section, ours) -> None:
    names = [name for name in autocast_list(section) if not name.startswith("_")]
    assert names
    for name in names:
        homes = (torch, F, Tensor) if not name.startswith("linalg_") else (torch.linalg,)
        for home in homes:
            function = getattr(home, name.removeprefix("linalg_"), None)
            assert function is None or function in ours, f"{name} of {home}"


class Recurrent(nn.Module):
    """A recurrent layer whose outputs become logits; it takes and gives [n, time, 8]."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)[0]


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        return self.layer(x, x, x, attn_mask=mask, need_weights=False)[0]


class Tokens(nn.Module):
    """An embedding, of whose rows some are picked again."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.layer = nn.Embedding(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        rows = self.table(x.argmax(-1))
        return self.layer(rows[:, torch.tensor([0, 0, 1])] + rows.index_select(1, torch.tensor([2, 2, 3])))


class Checkpointed(nn.Module):
    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.use_reentrant = use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.layer, x, use_reentrant=self.use_reentrant)


MODULES: dict[str, Callable[[], nn.Module]] = {
    "LSTM": lambda: Recurrent(nn.LSTM(8, 8, num_layers=2, batch_first=True)),
    "GRU": lambda: Recurrent(nn.GRU(8, 8, batch_first=True, bidirectional=False)),
    "RNN": lambda: Recurrent(nn.RNN(8, 8, batch_first=True)),
    "MultiheadAttention": Attention,
    "embedding": Tokens,
    "TransformerEncoderLayer": lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True),
    "checkpoint": lambda: Checkpointed(use_reentrant=False),
    "re-entrant checkpoint": lambda: Checkpointed(use_reentrant=True),
    "norms": lambda: nn.Sequential(
        nn.Linear(8, 8),
        nn.LayerNorm(8),
        nn.Linear(8, 8),
        nn.RMSNorm(8),
        nn.GELU(),
        nn.PReLU(),
        nn.Linear(8, 8),
    ),
}


@pytest.mark.parametrize(
    "policy", [Policy.fp16(), Policy.amp_fp16(), Policy.amp_bf16()], ids=lambda p: p.name
)
@pytest.mark.parametrize("name", MODULES)
def test_modules_train_as_in_fp64_within_half_rounding(name, policy) -> None:
    """Input fp32, as data comes; the gradients of all parameters, by name, and the logits in eval mode."""
    torch.manual_seed(0)
    model = MODULES[name]()
    torch.manual_seed(0)
    exact = MODULES[name]().double()
    for p in exact.parameters():
        rounded = p.data.to(policy.arithmetic).double()
        p.data = rounded if p.ndim >= 2 else p.data
    x = torch.randn(3, 5, 8).to(HALF).float()
    x.requires_grad_(name == "re-entrant checkpoint")  # which sends no gradient where no input asks for one
    # 1 / n0 is small here, so that only rounding, not overflow, is at play.
    stepper = Stepper(model, SGD(0.0), policy, scaling=Scaling(init=64), reference_count=64, emulate=True)
    with stepper.forward():
        out = model(x)
    assert out.dtype in (policy.arithmetic, torch.float32)
    reference = exact(x.double())
    stepper.backward((out.float() ** 2).sum(), 64)
    report = stepper.step().read()
    (reference**2).sum().backward()
    assert not report.skipped
    unit = {torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}[policy.arithmetic]
    assert (out.double() - reference).abs().max() < 8 * unit
    gradients = stepper.layout.gradients()
    largest = max(p.grad.abs().max() for p in exact.parameters())
    for key, p in exact.named_parameters():
        assert (gradients[key].double() - p.grad).abs().max() < 16 * unit * largest, key
    model.eval()
    with torch.no_grad(), stepper.forward():
        assert torch.allclose(model(x).float(), out.float(), atol=8 * unit)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # at which the compiler looks itself
@pytest.mark.parametrize("name", MODULES)
def test_compiled_modules_train_as_the_plain_ones(name) -> None:
    """Their Python parts and their checkpoints, traced by the compiler or left out by it."""
    found = []
    for compiles in (False, True):
        torch.manual_seed(0)
        model = MODULES[name]()
        stepper = Stepper(model, SGD(0.0), Policy.fp16(), scaling=Scaling(init=64), emulate=True)
        forward = torch.compile(model, backend="aot_eager") if compiles else model
        with stepper.forward():
            out = forward(torch.randn(3, 5, 8).requires_grad_(name == "re-entrant checkpoint"))
        stepper.backward((out.float() ** 2).sum(), 64)
        found.append({"out": out, **{key: g.clone() for key, g in stepper.layout.gradients().items()}})
    assert all(torch.equal(value, found[1][key]) for key, value in found[0].items())


def test_the_context_leaves_no_trace_even_after_an_error() -> None:
    with pytest.raises(ZeroDivisionError), RoundedArithmetic(HALF), RoundedArithmetic(HALF):
        raise ZeroDivisionError
    assert not torch._C._is_any_autocast_enabled()
    assert torch.exp(torch.ones(1, dtype=HALF)).dtype == HALF


@pytest.mark.parametrize("policy", [Policy.fp16(), Policy.bf16()], ids=lambda policy: policy.name)
@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_the_gradients_of_equal_tokens_are_summed_in_fp32(policy, kind) -> None:
    """16384 ones: in fp16 the sum would stay at 2048, in bf16 at 256."""
    table = kind(3, 2).to(policy.weights)
    tokens = torch.ones(16384, 1, dtype=torch.int64)
    with policy.forward(torch.device("cpu"), emulate=True):
        out = table(tokens)
    assert out.dtype == policy.weights
    out.sum(dtype=torch.float32).backward()
    assert table.weight.grad is not None
    assert table.weight.grad.dtype == policy.weights
    assert table.weight.grad[1].tolist() == [16384, 16384]
