"""Reports of steps, and the limits on bad ones, for tests of what records and judges them."""

from __future__ import annotations

from dataclasses import replace

from launcher.config.schema import LossScaleConfig
from launcher.engine import StepReport
from launcher.engine.limits import VOTES
from launcher.trainer.callback import StepMetrics

LIMITS = LossScaleConfig(
    mode="dynamic",
    init_scale=65536,
    growth_interval=2000,
    hysteresis=1,
    min_scale=1,
    max_scale=2**24,
    max_bad_losses=3,
    max_skips_at_min_scale=4,
)
CLEAN = StepReport(
    loss=2.0,
    grad_norm=1.0,
    scale=1024.0,
    lr=0.1,
    count=8,
    skipped=False,
    bad_losses=0,
    applied_steps=1,
    skipped_steps=0,
    skips_at_min_scale=0,
    bad_loss_steps=0,
    sent_bytes=100,
    culprit_ranks=(),
    culprit_parameters=(),
    votes=(0,) * VOTES,
    spans_ms={"compute": 3.0, "communication": 1.0},
)
OVERFLOW = replace(
    CLEAN, skipped=True, skipped_steps=1, culprit_ranks=(1,), culprit_parameters=("fc.weight",)
)


def metrics_of(report: StepReport, samples: int = 8, seconds: float = 0.5) -> StepMetrics:
    return StepMetrics(report, samples, seconds)
