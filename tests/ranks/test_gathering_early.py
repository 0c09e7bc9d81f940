"""fp32 sums gather a bucket as soon as it has been summed, at another moment on each rank: the same bits."""

from __future__ import annotations

import time
import warnings

import torch
import torch.distributed as dist
from torch import nn

from launcher.distributed.env import WorkerEnv
from launcher.engine import SGD, Policy, Stepper, Wire
from launcher.engine.wire import transports
from tests.ranks.harness import run_ranks

LAYERS, WIDTH, STEPS = 6, 64, 3
BUCKET = WIDTH * WIDTH * 2


def trained(env: WorkerEnv, overlap: bool) -> tuple[list[torch.Tensor], list[int]]:
    """Masters after some steps, and by step the gathers that this rank has started within backward."""
    gathers = 0
    original = transports.start_gather

    def counted(*args: object) -> dist.Work:
        nonlocal gathers
        gathers += 1
        return original(*args)  # type: ignore[arg-type]

    transports.start_gather = counted  # type: ignore[assignment]
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
    wire = Wire(sum="fp32", bucket_bytes=BUCKET, overlap=overlap)
    stepper = Stepper(model, SGD(0.1), Policy.fp16(), env.group, wire=wire, reference_count=4)
    lags = env.rank == env.world_size - 1
    if lags:  # so that its exchanges have completed when it looks at them
        warnings.filterwarnings("ignore", ".*: hooks on these parameters")
        for layer in model:
            layer.weight.register_hook(lambda gradient: time.sleep(0.02))
    store = dist.distributed_c10d._get_default_store()
    generator = torch.Generator().manual_seed(env.rank)
    found = []
    for step in range(STEPS):
        gathers = 0
        if lags:
            store.wait([f"{overlap} {step}"])
        with stepper.forward():
            loss = model(torch.randn(4, WIDTH, generator=generator)).float().square().sum()
        stepper.backward(loss, 4)
        found.append(gathers)
        if env.rank == 0:
            store.set(f"{overlap} {step}", "its backward has ended")
        assert not stepper.step().read().skipped
        assert gathers == LAYERS
    transports.start_gather = original
    return [master.clone() for master in stepper.named_masters().values()], found


def both(env: WorkerEnv) -> list[tuple[list[torch.Tensor], list[int]]]:
    return [trained(env, overlap) for overlap in (True, False)]


def test_gathers_start_within_backward_on_each_rank_in_its_own_time() -> None:
    ranks = run_ranks(3, both)  # two exchange whole messages
    for (early, _), (late, late_gathers) in ranks:
        assert all(torch.equal(one, other) for one, other in zip(early, late, strict=True))
        assert all(torch.equal(one, other) for one, other in zip(early, ranks[0][0][0], strict=True))
        assert late_gathers == [0] * STEPS
    assert sum(ranks[-1][0][1]) > 0, "the rank that lags has found exchanges completed"
    assert sum(ranks[0][0][1]) == 0, "which the first rank had not"
