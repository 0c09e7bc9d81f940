"""Functions of torch.linalg, torch.special and torch.fft, and the kin of exponentials, in half."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from launcher.engine import SGD, Policy, Scaling, Stepper
from launcher.engine.precision.emulation import RoundedArithmetic
from tests.models import features, loss_sum

HALF = torch.float16
Arguments = tuple[Any, ...]


def matrix(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(HALF)


SQUARE = (matrix(3, 3).float() @ matrix(3, 3).float().T + torch.eye(3)).to(HALF)  # symmetric, positive
OTHER, VECTOR = matrix(3, 3), torch.linspace(0.5, 1.25, 4).to(HALF)
# Of each kind some, with whether the result is half: it is of products, of views, and of curves, which are
# computed in fp32 and rounded once.
FUNCTIONS: dict[str, tuple[Callable[..., Any], Arguments, bool]] = {
    "linalg.cholesky": (torch.linalg.cholesky, (SQUARE,), False),
    "linalg.lstsq": (torch.linalg.lstsq, (SQUARE, OTHER), False),
    "linalg.matrix_norm": (torch.linalg.matrix_norm, (SQUARE,), False),
    "linalg.matrix_power": (torch.linalg.matrix_power, (SQUARE, -2), False),
    "linalg.solve": (torch.linalg.solve, (SQUARE, OTHER), False),
    "linalg.svd": (torch.linalg.svd, (SQUARE,), False),
    "linalg.vander": (torch.linalg.vander, (VECTOR,), False),
    "linalg.diagonal": (torch.linalg.diagonal, (SQUARE,), True),
    "linalg.matmul": (torch.linalg.matmul, (SQUARE, OTHER), True),
    "linalg.multi_dot": (torch.linalg.multi_dot, ([SQUARE, OTHER],), True),
    "special.bessel_j0": (torch.special.bessel_j0, (VECTOR,), False),
    "special.expm1": (torch.special.expm1, (VECTOR,), False),
    "special.logsumexp": (torch.special.logsumexp, (VECTOR, 0), False),
    "special.zeta": (torch.special.zeta, (VECTOR + 1, VECTOR), False),
    "special.erf": (torch.special.erf, (VECTOR,), True),
    "special.gammainc": (torch.special.gammainc, (VECTOR, VECTOR), True),
    "special.polygamma": (torch.special.polygamma, (2, VECTOR), True),
    "fft.fft2": (torch.fft.fft2, (matrix(4, 6),), False),
    "fft.irfft": (torch.fft.irfft, (matrix(4, 6),), False),
    "fft.fftshift": (torch.fft.fftshift, (matrix(4, 6),), True),
}


def widened(value: Any) -> Any:
    if isinstance(value, list):
        return [widened(item) for item in value]
    return value.float() if isinstance(value, Tensor) and value.dtype == HALF else value


def leaves(value: Any) -> list[Tensor]:
    return [value] if isinstance(value, Tensor) else list(value)


def check(function: Callable[..., Any], arguments: Arguments, in_half: bool) -> None:
    """fp32 inside; rounded once where the result is half. Libraries may add in another order at each call."""
    with RoundedArithmetic(HALF):
        found = function(*arguments)
    expected = function(*map(widened, arguments))
    for ours, exact in zip(leaves(found), leaves(expected), strict=True):
        assert ours.dtype == (HALF if in_half else exact.dtype)
        tolerance = 2.0**-10 if in_half else 1e-5
        assert torch.allclose(ours.to(exact.dtype), exact, rtol=tolerance, atol=tolerance * 1e-1)


@pytest.mark.parametrize(("function", "arguments", "in_half"), FUNCTIONS.values(), ids=FUNCTIONS)
def test_functions_compute_in_fp32(function: Callable[..., Any], arguments: Arguments, in_half: bool) -> None:
    check(function, arguments, in_half)


FP32: dict[str, Callable[[Tensor], Any]] = {
    "matrix_exp": torch.matrix_exp,
    "method matrix_exp": Tensor.matrix_exp,
    "matrix_power": lambda x: torch.matrix_power(x, 3),
    "exp2": torch.exp2,
    "logaddexp": lambda x: torch.logaddexp(x, x),
    "logaddexp2": lambda x: torch.logaddexp2(x, x),
    "logcumsumexp": lambda x: torch.logcumsumexp(x, 0),
    "xlogy": lambda x: torch.xlogy(x, x.abs()),
    "cumsum": lambda x: x.cumsum(0),
    "cumprod": lambda x: x.cumprod(0),
    "cdist": lambda x: torch.cdist(x, x.T),
    "trapezoid": torch.trapezoid,
    "cumulative_trapezoid": torch.cumulative_trapezoid,
    "trace": torch.trace,
    "nansum": torch.nansum,
    "quantile": lambda x: torch.quantile(x, 0.3),
    "inverse": torch.inverse,
    "logdet": torch.logdet,
    "det": Tensor.det,
    "svd": torch.svd,
    "stft": lambda x: torch.stft(x.flatten(), 4, window=torch.ones(4, device=x.device), return_complex=True),
}
HALF_OUT: dict[str, Callable[[Tensor], Any]] = {
    "var_mean": torch.var_mean,
    "std_mean": lambda x: torch.std_mean(x, 0),
    "nanmean": torch.nanmean,
    "cov": torch.cov,
    "sigmoid": torch.sigmoid,
    "logit": lambda x: torch.logit(x.abs().clamp(0.25, 0.75)),
    "erf": torch.erf,
    "lgamma": torch.lgamma,
    "tanh": torch.tanh,
    "exp_": lambda x: x.clone().exp_(),
    "pow_": lambda x: x.clone().pow_(2),
    "**=": lambda x: x.clone().__ipow__(2),
    "log_": lambda x: x.clone().abs_().log_(),
    "softmax to half": lambda x: torch.softmax(x, 0, dtype=HALF).to(x.dtype),
}


@pytest.mark.parametrize("name", FP32)
def test_exponentials_reductions_and_decompositions_are_fp32(name: str) -> None:
    check(FP32[name], (SQUARE / 4,), in_half=False)


@pytest.mark.parametrize("name", HALF_OUT)
def test_curves_means_and_changes_in_place_are_rounded_once(name: str) -> None:
    """In place as in autocast: the result has to fit the tensor."""
    x = SQUARE / 4
    with RoundedArithmetic(HALF):
        found = HALF_OUT[name](x)
    for ours, exact in zip(leaves(found), leaves(HALF_OUT[name](x.float())), strict=True):
        assert ours.dtype == HALF
        assert (ours.float() - exact).abs().max() <= 2.0**-11 * exact.abs().max()


GATHERS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "[index]": lambda table, tokens: table[tokens],
    "[:, index]": lambda table, tokens: table.T[:, tokens].T,
    "[list]": lambda table, tokens: table[tokens.tolist()],
    "index_select": lambda table, tokens: table.index_select(0, tokens),
    "gather": lambda table, tokens: torch.gather(table, 0, tokens[:, None].expand(-1, 2)),
}


@pytest.mark.parametrize("name", GATHERS)
def test_the_gradients_of_equal_rows_are_summed_in_fp32(name: str) -> None:
    """4096 ones: in fp16 the sum would stay at 2048."""
    table = torch.zeros(3, 2, dtype=HALF, requires_grad=True)
    with RoundedArithmetic(HALF):
        rows = GATHERS[name](table, torch.ones(4096, dtype=torch.int64))
    assert rows.dtype == HALF
    rows.sum(dtype=torch.float32).backward()
    assert table.grad is not None
    assert table.grad[1].tolist() == [4096, 4096]


def test_slices_stay_views() -> None:
    with torch.no_grad(), RoundedArithmetic(HALF):
        table = torch.zeros(3, 2, dtype=HALF, requires_grad=True)
        table[1] = 1.0
        table[:, 0].add_(1.0)
        table[table > 1] = 5.0
    assert table.tolist() == [[1, 0], [5, 1], [1, 0]]


PARAMETRIZED: dict[str, Callable[[nn.Linear], nn.Module]] = {
    **{
        f"orthogonal {map_}": lambda layer, map_=map_: nn.utils.parametrizations.orthogonal(
            layer, orthogonal_map=map_
        )
        for map_ in ("matrix_exp", "cayley", "householder")
    },
    "spectral_norm": nn.utils.parametrizations.spectral_norm,
    "weight_norm": nn.utils.parametrizations.weight_norm,
}


@pytest.mark.parametrize("name", PARAMETRIZED)
def test_parametrized_layers_train(name: str) -> None:
    """The loss falls as in fp32."""
    last = {}
    for policy in (Policy.fp32(), Policy.fp16()):
        torch.manual_seed(0)
        model = nn.Sequential(PARAMETRIZED[name](nn.Linear(8, 8)), nn.Tanh(), nn.Linear(8, 3))
        stepper = Stepper(model, SGD(0.1), policy, scaling=Scaling(init=64), emulate=True)
        x, classes = features(32, 0)
        losses = []
        for _ in range(15):
            with stepper.forward():
                loss = loss_sum(model(x), classes)
            stepper.backward(loss, 32)
            report = stepper.step().read()
            assert not report.skipped
            losses.append(report.loss)
        assert losses[-1] < losses[0] - 0.05
        last[policy.name] = losses[-1]
    assert abs(last["fp16"] - last["fp32"]) < 0.02
