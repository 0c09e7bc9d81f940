"""The native and the sharded wire compared: the same step and bytes, their own roundings.

Sharded masters and states belong here; sums and bytes of the native wire alone are in test_native_wire.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import pytest
import torch
import torch.distributed as dist

from launcher.distributed.env import WorkerEnv
from launcher.engine import SGD, AdamW, DDPOptions, Policy, Scaling, Stepper
from tests.engine.observe import train
from tests.models import Planted, mlp
from tests.ranks.harness import run_ranks

T = TypeVar("T")
FOUR = pytest.param(4, marks=pytest.mark.slow)  # ranks
WIRES = {"native": DDPOptions(), "sharded": DDPOptions(shard_optimizer=True)}
SMALL = {
    name: DDPOptions(bucket_bytes=256, shard_optimizer=ddp.shard_optimizer) for name, ddp in WIRES.items()
}


def trained(env: WorkerEnv, ddp: DDPOptions, policy: Policy, steps: int, optimizer=None) -> dict:
    """What a rank holds after some steps of an MLP on data of its own."""
    torch.manual_seed(0)
    model = mlp()
    stepper = Stepper(
        model, optimizer or AdamW(0.01), policy, env.group, ddp=ddp, clip_norm=1.0, reference_count=8
    )
    generator = torch.Generator().manual_seed(env.rank)
    reports = []
    for _ in range(steps):
        x = torch.randn(8, model[0].in_features, generator=generator)
        classes = torch.randint(model[2].out_features, (8,), generator=generator)
        reports.append(train(stepper, x, classes))
    masters = {name: value.clone() for name, value in stepper.named_masters().items()}
    return {
        "masters": masters,
        "weights": {name: p.detach().clone() for name, p in model.named_parameters()},
        "norms": [report.grad_norm for report in reports],
        "bytes": reports[-1].sent_bytes,
        "state_bytes": stepper.state_bytes(),
        "parameters": sum(p.numel() for p in model.parameters()),
    }


def on_every_wire(env: WorkerEnv, work: Callable[..., T], *args: object) -> dict[str, T]:
    """One start of the ranks for all wires."""
    return {name: work(env, ddp, *args) for name, ddp in WIRES.items()}


def all_wires(env: WorkerEnv, policy: Policy, steps: int) -> dict[str, dict]:
    return {name: trained(env, ddp, policy, steps) for name, ddp in SMALL.items()}


@pytest.mark.parametrize("world_size", [1, 2, 3, FOUR])
def test_all_wires_train_alike_in_fp32(world_size) -> None:
    """With nothing to round, they differ by the order of fp32 sums only."""
    ranks = run_ranks(world_size, all_wires, Policy.fp32(), 20)
    native = ranks[0]["native"]["masters"]
    for rank in ranks:
        for name in WIRES:
            for key, value in rank[name]["masters"].items():
                assert torch.allclose(value, native[key], rtol=0, atol=3e-6), (name, key)
                assert torch.equal(rank[name]["weights"][key], ranks[0][name]["weights"][key]), (name, key)


@pytest.mark.parametrize("world_size", [2, 3, FOUR])
def test_fp16_weights_are_the_rounded_masters_on_all_ranks_for_every_wire(world_size) -> None:
    ranks = run_ranks(world_size, all_wires, Policy.fp16(), 20)
    for name in WIRES:
        for key, master in ranks[0][name]["masters"].items():
            for rank in ranks:
                weight = rank[name]["weights"][key]
                assert torch.equal(rank[name]["masters"][key], master), (name, key)
                assert torch.equal(weight, master.to(weight.dtype)), (name, key)
        assert ranks[0][name]["norms"] == pytest.approx(ranks[0]["native"]["norms"], rel=2e-3)


def test_all_wires_send_the_same_bytes_and_shards_divide_the_memory() -> None:
    ranks = run_ranks(2, large_states)
    native, sharded = ranks[0]["native"], ranks[0]["sharded"]
    assert native["bytes"] == sharded["bytes"]
    assert native["state_bytes"] / native["parameters"] <= 16.5
    assert sharded["state_bytes"] / sharded["parameters"] <= 4 + 12 / 2 + 0.5


def large_states(env: WorkerEnv) -> dict[str, dict]:
    """One step of a model whose vectors are small beside its matrices."""
    results = {}
    for name, ddp in WIRES.items():
        torch.manual_seed(0)
        model = torch.nn.Linear(500, 500)
        stepper = Stepper(model, AdamW(0.01), Policy.fp16(), env.group, ddp=ddp, reference_count=8)
        report = train(stepper, torch.randn(8, 500), torch.zeros(8, dtype=torch.int64))
        results[name] = {
            "bytes": report.sent_bytes,
            "state_bytes": stepper.state_bytes(),
            "parameters": sum(p.numel() for p in model.parameters()),
        }
    return results


def plant(env: WorkerEnv, ddp: DDPOptions, matrix: float, scale: int = 1) -> dict:
    """One step in which every rank's fp16 gradient is `matrix` times the scale throughout."""
    model = Planted(5, 7, 11)
    scaling = Scaling("static", init=scale)
    stepper = Stepper(model, SGD(1.0), Policy.fp16(), env.group, ddp=ddp, scaling=scaling, reference_count=1)
    before = model.matrix.detach().clone()
    with stepper.forward():
        loss = model(torch.full((5, 7), matrix), 0.0)
    stepper.backward(loss, 1)
    report = stepper.step().read()
    moved = (before.float() - model.matrix.detach().float()).abs().max().item()
    return {"skipped": report.skipped, "norm": report.grad_norm, "moved": moved, "report": report}


@pytest.mark.parametrize("world_size", [2, 3, FOUR])
def test_60000_on_every_rank_overflows_native_and_gives_the_mean_sharded(world_size) -> None:
    mean_norm = 60000 * 35**0.5
    for rank in run_ranks(world_size, on_every_wire, plant, 60000.0):
        assert rank["native"]["skipped"]
        assert not rank["sharded"]["skipped"]
        assert rank["sharded"]["norm"] == pytest.approx(mean_norm, rel=1e-3)


def plant_inf_on_last_rank(env: WorkerEnv, ddp: DDPOptions) -> tuple:
    value = float("inf") if env.rank == env.world_size - 1 else 1.0
    result = plant(env, ddp, value)
    report = result["report"]
    return result["skipped"], result["moved"], report.culprit_ranks, report.culprit_parameters


@pytest.mark.parametrize("world_size", [2, 3])
def test_an_overflow_is_skipped_and_named_on_every_wire(world_size) -> None:
    expected = dict.fromkeys(WIRES, (True, 0.0, (world_size - 1,), ("matrix",)))
    assert run_ranks(world_size, on_every_wire, plant_inf_on_last_rank) == [expected] * world_size


def small_gradients(env: WorkerEnv) -> tuple[dict[str, float], dict[str, float]]:
    """By wire, the norm, and the sum of all masters and states after a second step, padding included.

    The vectors, which all ranks hold, have most of the norm, and each rank another part of it.
    """
    norms, sums = {}, {}
    for name, ddp in WIRES.items():
        model = Planted(5, 7, 11)
        scaling = Scaling("static", 1)
        stepper = Stepper(
            model, SGD(1.0, 0.5), Policy.fp16(), env.group, ddp=ddp, scaling=scaling, reference_count=1
        )
        for _ in range(2):
            with stepper.forward():
                loss = model(2.0**-8, 2.0**-5 * (env.rank + 1))
            stepper.backward(loss, 1)
            norms[name] = stepper.step().read().grad_norm
        flats = [*stepper.updater.tensors(), *stepper.zero1.masters()]
        sums[name] = sum(flat.abs().sum().item() for flat in flats)
    return norms, sums


def test_each_gradient_is_in_the_norm_once_on_every_wire_and_padding_has_none() -> None:
    norm = (35 * 2.0**-16 + 11 * (2.0**-5 * 2) ** 2) ** 0.5
    ranks = run_ranks(3, small_gradients)
    for norms, _ in ranks:
        assert norms == pytest.approx(dict.fromkeys(WIRES, norm), rel=1e-6)
    matrix, vector = (mean * elements * (1.5 + 2.5) for mean, elements in ((2.0**-8, 35), (2.0**-4, 11)))
    assert [sums["native"] for _, sums in ranks] == pytest.approx([matrix + vector] * 3)
    assert sum(sums["sharded"] for _, sums in ranks) == pytest.approx(matrix + 3 * vector)


def count_collectives(env: WorkerEnv, ddp: DDPOptions) -> list[str]:
    """The names of the collectives of a second step, in order."""
    calls: list[str] = []
    gathers = ["all_gather_single", "all_gather_into_tensor"]
    for name in ("all_reduce", "all_to_all_single", *gathers):
        original = getattr(dist, name, None)
        if original is not None and not (name == gathers[1] and hasattr(dist, gathers[0])):
            setattr(dist, name, recording(original, name, calls))
    model = mlp()
    stepper = Stepper(model, SGD(0.1), Policy.fp16(), env.group, ddp=ddp, reference_count=8)
    x, classes = torch.randn(8, model[0].in_features), torch.zeros(8, dtype=torch.int64)
    train(stepper, x, classes)
    calls.clear()
    train(stepper, x, classes)
    of_step = calls.copy()
    calls.clear()
    stepper.abandon()
    assert calls == of_step
    return calls


def recording(original, name, calls):
    def record(*args, **kwargs):
        calls.append(name)
        return original(*args, **kwargs)

    return record


@pytest.mark.parametrize(
    ("world_size", "name", "expected"),
    [
        (2, "native", ["all_reduce"] * 3),
        (2, "sharded", ["all_to_all_single", "all_reduce", "all_reduce", "all_gather_single"]),
    ],
)
def test_no_collective_beyond_the_buckets_and_the_counts(world_size, name, expected) -> None:
    """Counts, one bucket of matrices, one of vectors; sharded ranks add up norms and counts together."""
    first, *others = run_ranks(world_size, count_collectives, WIRES[name])
    assert others == [first] * (world_size - 1)
    assert sorted(call.replace("into_tensor", "single") for call in first) == sorted(expected)


def send_subnormals(env: WorkerEnv, ddp: DDPOptions) -> float:
    stepper = Stepper(Planted(), SGD(1.0), Policy.fp16(), env.group, ddp=ddp, scaling=Scaling("static", 1))
    with stepper.forward():
        loss = stepper.model(3 * 2.0**-24, 0.0)
    stepper.backward(loss, 1)
    stepper.step()
    return stepper.named_masters()["matrix"][0, 0].item()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gradient_is_widened_before_it_is_multiplied(dtype) -> None:
    """Halved in fp16, 3 * 2^-24 would be 2 * 2^-24."""
    for weight in run_ranks(
        2, send_subnormals, DDPOptions(gradient_dtype=dtype, gradient_predivide_factor=4)
    ):
        assert weight == -3 * 2.0**-24


def buffers_of_rank_0(env: WorkerEnv) -> dict[str, torch.Tensor]:
    model = mlp()
    for dtype in (torch.int16, torch.bool, torch.float64, torch.complex64):
        model.register_buffer(str(dtype).partition(".")[2], torch.full((3,), 1 - env.rank).to(dtype))
    Stepper(model, SGD(0.1), group=env.group)
    return {name: buffer.clone() for name, buffer in model.named_buffers()}


def test_buffers_of_any_dtype_take_the_values_of_rank_0() -> None:
    for buffers in run_ranks(2, buffers_of_rank_0):
        assert len(buffers) == 4
        assert all(torch.equal(value, torch.ones(3).to(value.dtype)) for value in buffers.values())


def bytes_of_fp32_weights(env: WorkerEnv) -> dict[str, int]:
    model = torch.nn.Linear(64, 64, bias=False)
    x, classes = torch.randn(8, 64), torch.zeros(8, dtype=torch.int64)
    return {
        name: train(Stepper(model, SGD(0.1), Policy.amp_fp16(), env.group, ddp=ddp), x, classes).sent_bytes
        for name, ddp in WIRES.items()
    }


def test_a_gather_of_fp32_weights_counts_as_twice_that_of_halves() -> None:
    """In bytes of an all-reduce, which moves each twice: 2 of a gradient there, 4 of a weight back."""
    found = run_ranks(2, bytes_of_fp32_weights)[0]
    assert found == {"native": 64 * 64 * 2, "sharded": 64 * 64 * (2 + 4) // 2}
