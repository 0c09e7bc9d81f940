"""On a GPU: what autocast's lists leave out, with the device's own kernels, cuDNN's among them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from launcher.engine import SGD, Policy, Scaling, Stepper
from launcher.engine.precision.autocast import HalfArithmetic
from tests.engine.precision.test_autocast import FUNCTIONS, HALVES, cast, changed
from tests.engine.precision.test_emulated_functions import IN_HALF, leaves

pytestmark = [
    pytest.mark.gpu,
    # cuDNN's own order of an RNN's weights is not that of the flat memory: it makes a copy per call.
    pytest.mark.filterwarnings("ignore:RNN module weights are not part of single contiguous chunk"),
]
# Signs and order of what these give may differ from one library to the next.
NOT_UNIQUE = ("eig", "eigh", "svd", "eigvals", "ldl_factor", "ldl_factor_ex", "ldl_solve", "lstsq", "stft")


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("name", [name for name in FUNCTIONS if name.rpartition(".")[2] not in NOT_UNIQUE])
def test_functions_compute_in_fp32(device, name, dtype) -> None:
    function, arguments = FUNCTIONS[name]
    arguments = changed(lambda x: x.to(device), cast(dtype, arguments))
    with HalfArithmetic(device.type, dtype):
        found = leaves(function(*arguments))
    expected = leaves(function(*changed(lambda x: x.float() if x.dtype == dtype else x, arguments)))
    in_half = name.rpartition(".")[2] in IN_HALF
    tolerance = torch.finfo(dtype).eps if in_half else 1e-4
    for ours, exact in zip(found, expected, strict=True):
        assert (ours.dtype == dtype) == in_half
        torch.testing.assert_close(ours.to(exact.dtype), exact, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize("name", ["fp16", "amp_fp16", "bf16", "amp_bf16"])
def test_the_gradients_of_rnns_are_those_of_fp32(device, kind, name) -> None:
    """Inputs of 1e5 are beyond fp16: under bf16 nothing may pass through it."""
    policy = Policy.named(name)
    large = 1e5 if policy.arithmetic == torch.bfloat16 else 1.0
    gradients = []
    for each in (Policy.fp32(), policy):
        torch.manual_seed(0)
        module = kind(4, 8, num_layers=2, batch_first=True).to(device)
        with torch.no_grad():
            module.weight_ih_l0.div_(large)
        scaling = Scaling(init=1) if each.scale_mode == "dynamic" else None
        stepper = Stepper(module, SGD(0.1), each, scaling=scaling, emulate=False, reference_count=1)
        with stepper.forward():
            out, _ = module(torch.linspace(-large, large, 120, device=device).view(3, 10, 4))
        gradients.append(stepper.dry_backward(out.float().square().sum()))
    for key, exact in gradients[0].items():
        assert (gradients[1][key].float() - exact).abs().max() <= 0.05 * exact.abs().max(), key
