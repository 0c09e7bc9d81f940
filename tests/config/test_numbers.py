"""One table of numbers for the engine's constructors, and for the config's constraints where a key exists."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from launcher.config.schema import constraints
from launcher.engine import SGD, AdamW, DDPOptions, Policy, Scaling, Stepper, TorchOptimizer, UnusableError
from tests.models import loss_sum, mlp

NAN, INF = math.nan, math.inf
NO_NUMBERS = (NAN, INF, -INF, True, "1", None, [1.0])
POWERS = (1, 2, 1024)
NO_POWERS = (0, -2, 3, 1000, 1024.0, 1.5, *NO_NUMBERS)
COUNTS = (1, 3, 2**53)
NO_COUNTS = (0, -1, 2.0, 2**53 + 1, *NO_NUMBERS)


def stepper(**options: Any) -> Stepper:
    return Stepper(mlp(), SGD(0.1), Policy.fp32(), **options)


def adapted(**options: Any) -> TorchOptimizer:
    return TorchOptimizer(torch.optim.RMSprop, 0.1, **options)


def without_none(values: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(value for value in values if value is not None)


Build = Callable[[Any], object]
# name: how the engine is given it, the config's key, what is accepted, what is refused
NUMBERS: dict[str, tuple[Build, str | None, tuple[Any, ...], tuple[Any, ...]]] = {
    "scale init": (
        lambda x: Scaling(init=x, max=2**127),
        "precision.loss_scale.init_scale",
        (*POWERS, 2**127),
        (*NO_POWERS, 2**128),
    ),
    "scale min": (lambda x: Scaling(min=x), "precision.loss_scale.min_scale", POWERS, (*NO_POWERS, 2**128)),
    "scale max": (
        lambda x: Scaling(init=1, max=x),
        "precision.loss_scale.max_scale",
        (*POWERS, 2**127),
        (*NO_POWERS, 2**128),
    ),
    "growth interval": (
        lambda x: Scaling(growth_interval=x),
        "precision.loss_scale.growth_interval",
        COUNTS,
        NO_COUNTS,
    ),
    "hysteresis": (lambda x: Scaling(hysteresis=x), "precision.loss_scale.hysteresis", COUNTS, NO_COUNTS),
    "SGD lr": (SGD, "optim.lr", (0.1, 1, 1e-30, 1e30), (-0.1, -1, 1.1e30, 1e308, *NO_NUMBERS)),
    "AdamW lr": (AdamW, "optim.lr", (0.1, 1, 1e-30, 1e30), (-0.1, -1, 1.1e30, 1e308, *NO_NUMBERS)),
    "TorchOptimizer lr": (
        lambda x: TorchOptimizer(torch.optim.Adam, x),
        "optim.lr",
        (0.1, 1),
        (-0.1, *NO_NUMBERS),
    ),
    "momentum": (
        lambda x: SGD(0.1, momentum=x),
        "optim.momentum",
        (0, 0.9),
        (1, 1.0, -0.1, *NO_NUMBERS),
    ),
    "nesterov": (lambda x: SGD(0.1, 0.9, nesterov=x), "optim.nesterov", (True, False), (1, "yes", None)),
    "SGD decay": (
        lambda x: SGD(0.1, weight_decay=x),
        "optim.weight_decay",
        (0, 5e-4),
        (-1e-4, *NO_NUMBERS),
    ),
    "AdamW decay": (
        lambda x: AdamW(0.1, weight_decay=x),
        "optim.weight_decay",
        (0, 0.01),
        (-1e-4, *NO_NUMBERS),
    ),
    "betas": (
        lambda x: AdamW(0.1, betas=x),
        "optim.betas",
        ((0.9, 0.999), (0, 0), [0.9, 0.99]),
        (0.9, (0.9,), (0.9, 1.0), (-0.1, 0.9), (0.9, NAN), (True, 0.9), (0.9, 0.9, 0.9), None),
    ),
    "eps": (lambda x: AdamW(0.1, eps=x), "optim.eps", (1e-8, 1), (0, 0.0, -1e-8, *NO_NUMBERS)),
    "alpha": (lambda x: adapted(alpha=x), "optim.alpha", (0.0, 0.99), (-0.1,)),
    "clip_norm": (
        lambda x: stepper(clip_norm=x),
        "optim.clip_norm",
        (None, 1, 0.5),
        (0, 0.0, -1.0, *without_none(NO_NUMBERS)),
    ),
    "learning rates": (
        lambda x: stepper(learning_rates=[0.1, x]),
        None,
        (0, 0.5),
        (-0.1, *NO_NUMBERS),
    ),
    "micro_batches": (lambda x: stepper(micro_batches=x), None, (1, 4), NO_COUNTS),
    "reference_count": (
        lambda x: stepper(reference_count=x),
        None,
        (None, *POWERS, 2**62),
        without_none((*NO_POWERS, 2**63)),
    ),
    "predivide": (
        lambda x: DDPOptions(gradient_predivide_factor=x),
        "ddp.gradient_predivide_factor",
        (1, 2, 2**16),
        (2**17, *without_none(NO_POWERS)),
    ),
    "bucket_bytes": (lambda x: DDPOptions(bucket_bytes=x), None, (None, *COUNTS), without_none(NO_COUNTS)),
}
CASES = [(name, value) for name, row in NUMBERS.items() for value in row[2] + row[3]]


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize(("name", "value"), CASES, ids=str)
def test_the_engine_and_the_config_accept_and_refuse_the_same_numbers(name: str, value: Any) -> None:
    build, key, accepted, _ = NUMBERS[name]
    valid = any(value is each for each in accepted)
    if key is not None:
        assert constraints()[key].is_valid(value) is valid
    if valid:
        build(value)
        return
    with pytest.raises(UnusableError) as caught:
        build(value)
    assert str(value) in str(caught.value)
    assert len(str(caught.value)) < 250


@pytest.mark.parametrize(
    "key", ["launch.hang_timeout_s", "launch.grace_s", "launch.init_timeout_s", "checkpoint.every_s"]
)
def test_a_time_is_one_that_a_timer_can_wait_for(key: str) -> None:
    assert constraints()[key].is_valid(1e9)
    assert not constraints()[key].is_valid(1e10)
    assert threading.TIMEOUT_MAX > 1e9


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Scaling(mode="dynamik"), "mode='dynamik': it must be one of dynamic, static, none"),
        (lambda: Scaling(init=2, min=4), "min <= init <= max"),
        (lambda: SGD(0.1, nesterov=True), "nesterov=True: it needs momentum above 0"),
        (
            lambda: DDPOptions(gradient_dtype=torch.float64),
            "gradient_dtype=torch.float64: it must be one of torch.float16",
        ),
        (lambda: TorchOptimizer(torch.nn.Linear, 0.1), "Linear'> is not a class of torch.optim"),
        (lambda: TorchOptimizer(torch.optim.SGD, 0.1, momentun=0.9), "SGD refuses .*'momentun'"),
        (lambda: TorchOptimizer(torch.optim.Adam, 0.1, betas=(0.9, 1.5)), "Adam refuses .*beta"),
    ],
)
def test_other_settings_are_refused_in_one_sentence(build: Callable[[], object], message: str) -> None:
    with pytest.raises(UnusableError, match=message):
        build()


@pytest.mark.parametrize("count", [-1, NAN, INF, "4", None], ids=str)
def test_a_count_that_is_none_is_refused(count: Any) -> None:
    trained = stepper()
    with pytest.raises(UnusableError, match="backward\\(\\) was given"):
        trained.backward(loss_sum(trained.model(torch.ones(4, 8)), torch.zeros(4, dtype=torch.int64)), count)
