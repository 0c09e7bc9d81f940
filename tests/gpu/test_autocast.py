"""On a GPU: layers with kernels of their own (cuDNN's RNNs) under torch's autocast over half weights."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from launcher.engine import SGD, Policy, Scaling, Stepper

pytestmark = [
    pytest.mark.gpu,
    # cuDNN's own order of an RNN's weights is not that of the flat memory: it makes a copy per call.
    pytest.mark.filterwarnings("ignore:RNN module weights are not part of single contiguous chunk"),
]


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize("name", ["fp16", "amp_fp16"])
def test_the_gradients_of_rnns_are_those_of_fp32(device, kind, name) -> None:
    gradients = []
    for policy in (Policy.fp32(), Policy.named(name)):
        torch.manual_seed(0)
        module = kind(4, 8, num_layers=2, batch_first=True).to(device)
        scaling = Scaling(init=1) if policy.scale_mode == "dynamic" else None
        stepper = Stepper(module, SGD(0.1), policy, scaling=scaling, emulate=False, reference_count=1)
        with stepper.forward():
            out, _ = module(torch.linspace(-1, 1, 120, device=device).view(3, 10, 4))
        gradients.append(stepper.dry_backward(out.float().square().sum()))
    for key, exact in gradients[0].items():
        assert (gradients[1][key].float() - exact).abs().max() <= 0.05 * exact.abs().max(), key
