"""Learning-rate schedules as tables: one rate per applied step, computed before training.

A table on the device: a skipped step does not consume a rate, and no step waits for the host. Also the table
of a schedule of the recipe's own, with the checks of what it returns.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from numbers import Real

from launcher.errors import ConfigError

# Each maps the share of the run after warm-up, 0 <= x < 1, to the share of the peak rate.
_SHAPES: dict[str, Callable[[float], float]] = {
    "constant": lambda x: 1.0,
    "linear": lambda x: 1.0 - x,
    "cosine": lambda x: 0.5 * (1.0 + math.cos(math.pi * x)),
}


def learning_rates(name: str, peak: float, steps: int, warmup_fraction: float) -> list[float]:
    """`steps` learning rates: a linear warm-up to `peak`, then the named shape.

    constant, linear to 0, cosine to 0 (Loshchilov and Hutter 2017, without restarts), and onecycle (Smith
    and Topin 2018 as in `torch.optim.lr_scheduler.OneCycleLR`: cosine up from peak/25, cosine down to
    peak/250000). The warm-up takes `warmup_fraction` of the steps.
    """
    warmup = round(steps * warmup_fraction)
    if name == "onecycle":
        return [peak * _onecycle(step, steps, warmup_fraction) for step in range(steps)]
    shape = _SHAPES[name]
    rising = [peak * (step + 1) / warmup for step in range(warmup)]
    return rising + [peak * shape(step / (steps - warmup)) for step in range(steps - warmup)]


def custom_lr_table(schedule: Callable[[int, int], float], name: str, peak: float, steps: int) -> list[float]:
    """`steps` learning rates: `peak` times `schedule(step, steps)` for each step from 0.

    ConfigError, with `name`, for a factor that is no finite number of at least 0, and where all are 0.
    """
    rates: list[float] = []
    for step in range(steps):
        factor = schedule(step, steps)
        if not isinstance(factor, Real) or not 0 <= peak * factor < math.inf:
            raise ConfigError(
                f"{name} gives {factor!r} for step {step} of {steps}: it must return the factor on the rate "
                f"{peak:g}, a finite number (no tensor) of at least 0."
            )
        rates.append(peak * float(factor))
    if rates and peak and not any(rates):
        raise ConfigError(
            f"{name} gives 0 for each of {steps} steps, so nothing would be trained: it must return the "
            f"factor on the rate {peak:g}, above 0 for at least one step. An integer division (//) rounds a "
            "factor below 1 to 0."
        )
    return rates


def _onecycle(step: int, steps: int, warmup_fraction: float) -> float:
    start, end = 1 / 25, 1 / 250_000
    top = steps * warmup_fraction - 1  # as in torch, not rounded to a step; below 0 without a rise
    if step < top:
        return start + (1 - start) * 0.5 * (1 - math.cos(math.pi * step / top))
    down = (step - top) / (steps - 1 - top) if step > top else 0.0
    return end + (1 - end) * 0.5 * (1 + math.cos(math.pi * down))
