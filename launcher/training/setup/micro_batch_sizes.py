"""The sizes of micro-batches among which a run may choose for itself.

Owns the rule that the choice obeys as a size given by hand does: data.augment.mixup needs whole pairs.
"""

from __future__ import annotations

import sys
from dataclasses import replace

from launcher.data.batch_plan import BatchPlan
from launcher.errors import ConfigError
from launcher.recipe.training_aids import refuse_split_pairs


def sizes_to_try(plan: BatchPlan, mixup: float = 0.0, total_steps: int = sys.maxsize) -> list[int]:
    """The sizes that differ in the number of micro-batches per step, largest first.

    They are about twice the square root of a rank's share: 8 trials by halves decide for a share of up to
    16,000. The last is 1, or larger where `mixup`, the alpha of the config, is not 0. `total_steps` are those
    of the run.
    """
    share = plan.largest_share
    sizes = sorted({-(-share // number) for number in range(1, share + 1)}, reverse=True)
    return [
        size
        for size in sizes
        if not mixup or _keeps_pairs(replace(plan, micro_batch=size), mixup, total_steps)
    ]


def half_of(plan: BatchPlan, mixup: float = 0.0, total_steps: int = sys.maxsize) -> int | None:
    """The largest size of at most half of the present one, rounded up; None where there is none."""
    present = plan.largest_micro_batch
    half = -(-present // 2)
    sizes = sizes_to_try(plan, mixup, total_steps)
    return next((size for size in sizes if size <= half and size < present), None)


def _keeps_pairs(plan: BatchPlan, mixup: float, total_steps: int) -> bool:
    try:
        refuse_split_pairs(plan, mixup, total_steps)
    except ConfigError:
        return False
    return True
