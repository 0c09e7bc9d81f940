"""The mismatch of sampler and trainer: there in bf16, smaller in fp16, none in fp32."""

from __future__ import annotations

import pytest

import scripts.bench.rl_mismatch as rl_mismatch


@pytest.mark.slow
def test_fp16_has_a_smaller_mismatch_than_bf16(monkeypatch) -> None:
    monkeypatch.setattr(rl_mismatch, "SEQUENCES", 4)
    monkeypatch.setattr(rl_mismatch, "LENGTH", 16)
    mean = {
        name: float(rl_mismatch.log_ratios("4 x 128", name, 0).mean()) for name in ("fp32", "fp16", "bf16")
    }
    assert mean["fp32"] < 1e-5
    assert mean["fp32"] < mean["fp16"] < mean["bf16"] / 3
