"""The formulas of the page on scale fit the engine."""

from __future__ import annotations

import pytest
from torch import nn

from launcher.engine import SGD, AdamW, DDPOptions, Policy, Stepper
from scripts import scale
from tests.meta_device import fake_group


@pytest.mark.parametrize("shards", [1, 8])
@pytest.mark.parametrize(("optimizer", "states"), [(SGD(0.1, momentum=0.9), 1), (AdamW(1e-3), 2)])
@pytest.mark.parametrize("name", ["fp16", "amp_fp16", "fp32"])
def test_the_bytes_of_each_kind_are_those_that_a_stepper_allocates(name, optimizer, states, shards) -> None:
    model = nn.Sequential(nn.Linear(256, 512), nn.LayerNorm(512), nn.Linear(512, 256))
    vectors = sum(p.numel() for p in model.parameters() if p.ndim < 2)
    matrices = sum(p.numel() for p in model.parameters()) - vectors
    with fake_group(8) as group:
        stepper = Stepper(
            model, optimizer, Policy.named(name), ddp=DDPOptions(shard_optimizer=shards > 1), group=group
        )
        found = stepper.bytes_by_kind()
    computed = vars(scale.held(Policy.named(name), states, matrices, vectors, shards))
    assert {kind: found[kind] for kind in computed} == pytest.approx(computed, rel=0.01)


def test_the_gpt_has_the_parameters_that_its_name_says() -> None:
    assert scale.num_parameters(scale.GPT_1_3B) == pytest.approx(1.3e9, rel=0.02)
    assert scale.num_parameters(scale.gpt_shapes(12, 768)) - 1024 * 768 == 124_439_808  # GPT-2
