"""Masters and states of a sharded optimizer, whole: in host memory, a bucket at a time, on one rank."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from launcher.checkpoint.run_state import TrainProgress, identity_of, take_snapshot
from launcher.distributed.env import RANK0, WorkerEnv
from launcher.engine import AdamW, DDPOptions, ExponentialMovingAverage, Policy, Scaling, Stepper
from launcher.trainer.replica_consistency import ema_sha256, weights_sha256
from tests.configs import composed
from tests.engine.observe import state_digest, train
from tests.meta_device import META, MetaDevice, fake_group
from tests.models import conv_net, features
from tests.ranks.harness import run_ranks

WIDTH, LAYERS = 256, 16  # a bucket for each layer


class MetaMemory(TorchDispatchMode):
    """Bytes on `meta` that live at once, of what is made while it is active without stand-ins."""

    def __init__(self) -> None:
        super().__init__()
        self.peak_bytes = 0
        self._live: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and tensor.is_meta and func.namespace != "c10d":
                storage = tensor.untyped_storage()
                if storage._cdata not in before:
                    self._live[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        self._live = {key: (ref, size) for key, (ref, size) in self._live.items() if not ref.expired()}
        self.peak_bytes = max(self.peak_bytes, sum(size for _, size in self._live.values()))
        return result


def large() -> nn.Module:
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))


def from_a_file(state: Any) -> Any:
    """The same names, all on the host."""
    parts = {
        name: getattr(state, name) for name in ("weights", "optimizer", "buffers") if hasattr(state, name)
    }
    zeros = {p: {k: torch.zeros_like(t, device="cpu") for k, t in v.items()} for p, v in parts.items()}
    return replace(state, **zeros)


DONE: dict[str, Callable[[Stepper, ExponentialMovingAverage, Any, Any], object]] = {
    "state, to save it": lambda stepper, average, *_: stepper.state(RANK0),
    "state of all ranks": lambda stepper, average, *_: stepper.state_dict(),
    "state, on another rank": lambda stepper, average, *_: stepper.state(1),
    "averages": lambda stepper, average, *_: average.state(RANK0),
    "masters": lambda stepper, average, *_: stepper.named_masters(RANK0),
    "load": lambda stepper, average, state, _: stepper.load(state),
    "load averages": lambda stepper, average, _, state: average.load(state),
    "in_model": lambda stepper, average, *_: average.in_model().__enter__(),
}


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [8, 64])
def test_no_gpu_ever_holds_more_than_a_bucket_of_what_is_sharded(world_size) -> None:
    """Twelve bytes for each parameter would be more than the 4 + 12 / world_size that a step takes."""
    with fake_group(world_size) as group, MetaDevice():
        with MetaMemory() as building:
            model = large().to(META)
            ddp = DDPOptions(shard_optimizer=True, bucket_bytes=2 * WIDTH * WIDTH)
            stepper = Stepper(
                model, AdamW(0.1), Policy.fp16(), group, ddp=ddp, reference_count=4, emulate=True
            )
        average = ExponentialMovingAverage(stepper, 0.9)
        states = from_a_file(stepper.state()), from_a_file(average.state())
        peaks = {}
        for name, call in DONE.items():
            with MetaMemory() as memory:
                kept = call(stepper, average, *states)
            del kept
            peaks[name] = memory.peak_bytes
    numel = sum(p.numel() for p in model.parameters() if p.ndim > 1)
    assert stepper.state_bytes() < numel * (4.5 + 12 / world_size)
    # Of a model in fp32: each parameter and its master, until the parameter is that in flat memory.
    assert building.peak_bytes < numel * (8.1 + 4 / world_size)
    assert max(peaks.values()) <= 8 * WIDTH * WIDTH + 8 * numel / world_size < 2 * numel, (peaks, numel)


def on_the_leader(env: WorkerEnv, sharded: bool) -> dict[str, Any]:
    """The run's state in each form, by name; what is only on the leader is empty elsewhere."""
    ddp = DDPOptions(shard_optimizer=sharded)
    stepper = Stepper(conv_net(), AdamW(0.01), Policy.fp16(), env.group, ddp=ddp, scaling=Scaling(init=1024))
    average = ExponentialMovingAverage(stepper, 0.9)
    for number in range(3):
        train(stepper, *features(8, 10 * number + env.rank, (3, 8, 8)))
        average.update(number)
    everywhere, there, other = stepper.state(), stepper.state(RANK0), stepper.state(1)
    matrices = {name for name, value in everywhere.weights.items() if value.ndim > 1}
    for state, rank in ((there, RANK0), (other, 1)):
        lacking = matrices if sharded and env.rank != rank else set()
        assert state.weights.keys() == everywhere.weights.keys() - lacking
        for part in ("weights", "optimizer"):
            values = getattr(everywhere, part)
            assert all(torch.equal(value, values[name]) for name, value in getattr(state, part).items())
    assert stepper.named_masters(1).keys() == other.weights.keys()
    identity, progress = identity_of(composed(), stepper.model, 100), TrainProgress(0, 3, 24)
    for _ in range(2):
        present = stepper.state()
        snapshot = take_snapshot(stepper, env, identity, progress, average)
        assert (snapshot is None) == (env.rank != RANK0)
        if snapshot is not None:
            for part in ("weights", "optimizer"):
                values = getattr(present, part)
                saved = getattr(snapshot.engine, part)
                assert all(torch.equal(value, saved[name]) for name, value in values.items())
            averages = snapshot.average.weights
        train(stepper, *features(8, env.rank, (3, 8, 8)))  # what is saved is a copy
    whole = average.state().weights
    if env.rank == RANK0:
        assert all(torch.equal(value, whole[name]) for name, value in averages.items())
        assert averages.keys() == whole.keys()
    digests = weights_sha256(stepper, env), ema_sha256(stepper, average, env)
    before, values = state_digest(stepper), {name: p.clone() for name, p in stepper.model.named_parameters()}
    with average.in_model():
        for name, p in stepper.model.named_parameters():
            assert torch.equal(p, whole[name].to(p.dtype)), name
    assert state_digest(stepper) == before
    assert all(torch.equal(p, values[name]) for name, p in stepper.model.named_parameters())
    again = stepper.state().clone()
    train(stepper, *features(8, env.rank, (3, 8, 8)))  # gradients are those of the step, whatever was there
    after = stepper.state().clone()
    stepper.load(again)
    average.load(replace(average.state(), counters={"applied": 0}))
    train(stepper, *features(8, env.rank, (3, 8, 8)))
    assert all(torch.equal(value, after.weights[name]) for name, value in stepper.state().weights.items())
    return {"digests": digests, "weights": after.weights}


@pytest.mark.slow
def test_a_sharded_run_is_saved_by_one_rank_in_memory_that_it_uses_again() -> None:
    whole, sharded = run_ranks(3, on_the_leader, False), run_ranks(3, on_the_leader, True)
    assert len({each["digests"][1] for each in sharded}) == 1
    for found in sharded:
        for name, value in whole[0]["weights"].items():
            torch.testing.assert_close(found["weights"][name], value, rtol=2e-3, atol=2e-3)
