"""What cannot be trained on several ranks is refused on each of them, before the model is touched."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from launcher.distributed.env import WorkerEnv
from launcher.engine import SGD, AdamW, DDPOptions, Policy, Scaling, Stepper, TorchOptimizer, UnusableError
from tests.engine.observe import state_digest
from tests.models import features, loss_sum, mlp
from tests.ranks.harness import run_ranks


def refused(env: WorkerEnv) -> tuple[str, bool]:
    """The error of a sharded build with an optimizer of torch, and whether the model is what it was."""
    model = mlp()
    before = [(p.data_ptr(), p.dtype) for p in model.parameters()]
    try:
        adam = TorchOptimizer(torch.optim.Adam, 0.1)
        Stepper(model, adam, Policy.fp16(), env.group, ddp=DDPOptions(shard_optimizer=True))
    except UnusableError as error:
        return str(error), [(p.data_ptr(), p.dtype) for p in model.parameters()] == before
    return "", False


def test_a_sharded_optimizer_of_torch_is_refused_before_the_model_is_moved() -> None:
    for text, untouched in run_ranks(2, refused):
        assert text.startswith("Adam cannot be sharded")
        assert untouched


DEFAULTS: dict[str, Any] = {
    "optimizer": SGD(0.1, momentum=0.9),
    "policy": Policy.fp16(),
    "reference_count": 8,
}
ODD: dict[str, tuple[dict[str, Any], str]] = {
    "policy": (
        {"policy": Policy.bf16()},
        "policy.arithmetic is torch.bfloat16, not torch.float16; policy.gradient_dtype is ",
    ),
    "clip": ({"clip_norm": 1.0}, "clip_norm is 1.0, not None."),
    "momentum": ({"optimizer": SGD(0.1, momentum=0.5)}, "optimizer.momentum is 0.5, not 0.9."),
    "optimizer": ({"optimizer": AdamW(0.1)}, "optimizer is AdamW, not SGD;"),
    "class": (
        {"optimizer": TorchOptimizer(torch.optim.Adam, 0.1, eps=1e-4)},
        "optimizer is TorchOptimizer, not SGD;",
    ),
    "rate": ({"learning_rates": [0.1, 0.2]}, "learning_rates is [0.1, 0.2], not [0.1]."),
    "rates": ({"learning_rates": [0.1] * 99 + [0.2]}, "learning_rates is [0.1, 0.1, "),
    "scaling": ({"scaling": Scaling(growth_interval=9)}, "scaling.growth_interval is 9, not 2000."),
    "shard": ({"ddp": DDPOptions(shard_optimizer=True)}, "ddp.shard_optimizer is True, not False."),
    "overlap": ({"ddp": DDPOptions(overlap=False)}, "ddp.overlap is False, not True."),
    "bucket": ({"ddp": DDPOptions(bucket_bytes=99)}, "ddp.bucket_bytes is 99, not None."),
    "NumPy's number": ({"clip_norm": np.float32(2.5)}, "clip_norm is np.float32(2.5), not None."),
    "NumPy's rates": (
        {"learning_rates": np.float32([0.5, 0.25])},
        "learning_rates is [np.float32(0.5), np.float32(0.25)], not [0.1].",
    ),
}


def texts_of_other_settings(env: WorkerEnv) -> list[str]:
    """The errors of Steppers for which the middle rank of three was given something else."""
    found = []
    for other, _ in ODD.values():
        with pytest.raises(UnusableError) as raised:
            Stepper(mlp(), group=env.group, **DEFAULTS | (other if env.rank == 1 else {}))
        found.append(str(raised.value))
    with pytest.raises(UnusableError) as raised:
        Stepper(mlp(), SGD(0.1), group=env.group, clip_norm=1.0 if env.rank else None)
    found.append(str(raised.value))
    return found


def test_ranks_with_other_settings_are_refused_with_the_difference() -> None:
    results = run_ranks(3, texts_of_other_settings)
    assert results[0] == results[1] == results[2]
    *texts, last = results[0]
    for (_, expected), text in zip(ODD.values(), texts, strict=True):
        assert f"Rank(s) 1 differ from rank 0: on rank 1 {expected}" in text
    assert "Rank(s) 1, 2 differ from rank 0: on rank 1 clip_norm is 1.0, not None." in last


def trained_apart(env: WorkerEnv) -> tuple[str, list[float]]:
    """With another number of micro-batches, emulation and wish to compile on each rank."""
    stepper = Stepper(mlp(), group=env.group, micro_batches=1 + env.rank, emulate=env.rank == 0, **DEFAULTS)
    losses = []
    for _ in range(3):
        for part in range(1 + env.rank):
            x, classes = features(4, part)
            with stepper.forward():
                loss = loss_sum(stepper.model(x), classes)
            stepper.backward(loss, 4)
        losses.append(stepper.step().read().loss)
    return state_digest(stepper, counters=True), losses


@pytest.mark.slow
def test_micro_batches_and_emulation_may_differ_between_ranks() -> None:
    first, second = run_ranks(2, trained_apart)
    assert first == second


def built_with_max_norm(env: WorkerEnv) -> str:
    model = nn.Sequential(nn.Embedding(4, 2, max_norm=1.5), nn.Linear(2, 2))
    with pytest.raises(UnusableError) as raised:
        Stepper(model, SGD(0.1), Policy.fp32(), env.group)
    return str(raised.value)


def test_embeddings_with_a_max_norm_are_refused_on_several_ranks() -> None:
    for text in run_ranks(2, built_with_max_norm):
        assert "0 of Sequential has max_norm" in text
