"""On a GPU: synchronised batch norms by torch's kernels, in every shape, layout and dtype."""

from __future__ import annotations

import pytest
import torch

from launcher.engine.sync_batchnorm import synchronised
from tests.engine.test_sync_batchnorm_kernels import SHAPES, norm, passes
from tests.gpu.test_step import no_synchronisation

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_they_give_the_values_of_batch_norm(
    group_of_one, device, shape, channels_last, dtype, affine
) -> None:
    last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(len(shape), torch.contiguous_format)
    x, weight = ((3 + torch.randn(shape, device=device)).to(dtype) for _ in range(2))
    if channels_last:
        x = x.contiguous(memory_format=last)
    exact = passes(norm(len(shape), affine).to(device).double(), x.double(), weight.double())
    module = synchronised(norm(len(shape), affine).to(device), group_of_one)
    found = passes(module, x, weight)
    tolerance = {torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 4e-2}[dtype]
    for name, expected in exact.items():
        torch.testing.assert_close(found[name].double(), expected.double(), rtol=tolerance, atol=tolerance)
    assert found["output"].stride() == x.stride()
    with no_synchronisation(device):
        passes(module, x, weight)
