"""The native wire, which sums fp16 in fp16: rounding errors, overflow, calls and bytes, `predivide`.

What all wires have in common, and where they differ, is in test_all_wires.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from launcher.distributed.env import WorkerEnv
from launcher.engine import SGD, DDPOptions, Policy, Scaling, Stepper, StepReport
from launcher.engine.grads.step_totals import STATUS_AT
from tests.engine.observe import train
from tests.models import Planted, features
from tests.ranks.harness import run_ranks

COLLECTIVES = [
    *("all_reduce", "broadcast", "reduce", "all_gather", "all_gather_into_tensor", "all_gather_object"),
    *("reduce_scatter", "reduce_scatter_tensor", "all_to_all", "all_to_all_single", "gather", "scatter"),
    *("broadcast_object_list", "barrier", "send", "recv"),
]


def plant(stepper: Stepper, matrix: Tensor | float, vector: Tensor | float = 0.0) -> StepReport:
    """One step of one sample whose gradients (before the loss scale) are the arguments."""
    with stepper.forward():
        loss = stepper.model(matrix, vector)
    stepper.backward(loss, 1)
    return stepper.step().read()


def sums_of_ranks(env: WorkerEnv) -> float:
    """Largest error of the reduced gradient, in units of what fp16 rounding at each addition allows."""
    policy = Policy.fp16()
    stepper = Stepper(
        Planted(37, 41, 53), SGD(0.0), policy, env.group, scaling=Scaling(init=256), reference_count=1
    )
    generators = [torch.Generator().manual_seed(rank) for rank in range(env.world_size)]
    matrices = [torch.randn(37, 41, generator=g) for g in generators]
    vectors = [torch.randn(53, generator=g) for g in generators]
    plant(stepper, matrices[env.rank], vectors[env.rank])
    errors = []
    for name, parts, unit in (("matrix", matrices, 2.0**-11), ("vector", vectors, 2.0**-24)):
        exact = 256 * torch.stack(parts).double().sum(0)
        magnitude = 256 * torch.stack(parts).double().abs().sum(0)
        allowed = env.world_size * unit * magnitude
        errors.append(((stepper.layout.gradients()[name].double() - exact).abs() / allowed).max().item())
    return max(errors)


@pytest.mark.parametrize("world_size", [2, 3])
def test_native_sums_are_within_fp16_rounding_of_fp64(world_size: int) -> None:
    assert all(0 < error <= 1 for error in run_ranks(world_size, sums_of_ranks))


def overflow_of_the_sum(env: WorkerEnv) -> dict[str, Any]:
    """60000 on the wire of every rank: the sum is 120000, out of fp16's range; at half the scale it fits."""
    stepper = Stepper(
        Planted(), SGD(1.0), Policy.fp16(), env.group, scaling=Scaling(init=2), reference_count=1
    )
    reports = [plant(stepper, 30000.0) for _ in range(2)]
    return {"reports": reports, "master": stepper.named_masters()["matrix"].clone()}


def test_a_sum_that_overflows_names_no_rank_and_recovers_at_half_the_scale() -> None:
    for result in run_ranks(2, overflow_of_the_sum):
        first, second = result["reports"]
        assert (first.skipped, first.scale, first.culprit_ranks) == (True, 2, ())
        assert first.culprit_parameters == ("matrix",)
        assert (second.skipped, second.scale, second.applied_steps) == (False, 1, 1)
        assert torch.equal(result["master"], torch.full((2, 3), -30000.0))


def large_in_a_vector_of_one_rank(env: WorkerEnv) -> tuple[StepReport, Tensor]:
    stepper = Stepper(
        Planted(), SGD(1.0), Policy.fp16(), env.group, scaling=Scaling(init=1), reference_count=1
    )
    report = plant(stepper, 0.0, 1e5 if env.rank == 0 else 0.0)
    return report, stepper.named_masters()["vector"].clone()


def test_vectors_travel_in_fp32_so_1e5_on_one_rank_is_no_overflow() -> None:
    for report, vector in run_ranks(2, large_in_a_vector_of_one_rank):
        assert not report.skipped
        assert torch.equal(vector, torch.full((3,), -5e4))


@contextmanager
def counted_collectives() -> Iterator[list[tuple[str, torch.dtype, int]]]:
    """(name, dtype, bytes) of every collective called through torch.distributed in this process."""
    calls: list[tuple[str, torch.dtype, int]] = []
    originals = {name: getattr(dist, name) for name in COLLECTIVES if hasattr(dist, name)}

    def counting(name: str) -> Any:
        def call(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            calls.append((name, tensor.dtype, tensor.numel() * tensor.element_size()))
            return originals[name](tensor, *args, **kwargs)

        return call

    for name in originals:
        setattr(dist, name, counting(name))
    try:
        yield calls
    finally:
        for name, original in originals.items():
            setattr(dist, name, original)


def bytes_of_a_step(env: WorkerEnv) -> dict[str, Any]:
    """By dtype of the wire: the calls of one step, buckets, what the report says, and the vectors' bytes."""
    found: dict[str, Any] = {}
    for policy in (Policy.fp32(), Policy.fp16(), Policy.amp_fp16(), Policy.bf16()):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 3))
        ddp = DDPOptions(bucket_bytes=1 << 14)
        stepper = Stepper(model, SGD(1e-3), policy, env.group, ddp=ddp, micro_batches=2, reference_count=4)
        with counted_collectives() as calls:
            report = train(stepper, *features(4, env.rank))
        vectors = sum(p.numel() * 4 for p in model.parameters() if p.ndim < 2)
        found[policy.name] = {
            "calls": calls,
            "buckets": len(stepper.reducer.buckets),
            "wire_bytes": report.sent_bytes,
            "vectors": vectors,
            "matrices": sum(p.numel() for p in model.parameters() if p.ndim >= 2),
        }
    return found


def test_a_step_sends_its_buckets_and_the_counts_and_half_of_the_bytes_of_fp32() -> None:
    for found in run_ranks(2, bytes_of_a_step):
        total = {}
        for name, step in found.items():
            assert {call for call, _, _ in step["calls"]} == {"all_reduce"}
            assert len(step["calls"]) == step["buckets"] + 1
            counts = [size for _, dtype, size in step["calls"] if dtype == torch.float64]
            assert counts == [8 * (STATUS_AT + 2 + 6)]  # beside the counts: two ranks, six parameters
            total[name] = sum(size for _, dtype, size in step["calls"] if dtype != torch.float64)
            assert total[name] == step["wire_bytes"]
            assert step["buckets"] > 3
        vectors = found["fp32"]["vectors"] + 1024  # and some padding
        for name in ("fp16", "amp_fp16", "bf16"):
            assert total["fp32"] / 2 <= total[name] <= total["fp32"] / 2 + vectors / 2
            assert total[name] >= 2 * found[name]["matrices"]


def test_the_predivisor_must_be_a_power_of_two() -> None:
    with pytest.raises(ValueError, match="gradient_predivide_factor=6: it must be a power of two"):
        DDPOptions(gradient_predivide_factor=6)


def predivided(env: WorkerEnv) -> tuple[StepReport, Tensor, StepReport, Tensor]:
    """A sum that overflows as it is and fits when each rank sends a quarter; K = 1, then K = 2."""
    results: list[Any] = []
    for micro_batches in (1, 2):
        stepper = Stepper(
            Planted(),
            SGD(1.0),
            Policy.fp16(),
            env.group,
            scaling=Scaling(init=2),
            ddp=DDPOptions(gradient_predivide_factor=4),
            reference_count=1,
            micro_batches=micro_batches,
        )
        report = plant(stepper, 30000.0, 7.0)
        results += [report, torch.cat([m.reshape(-1) for m in stepper.named_masters().values()])]
    return tuple(results)


def test_a_predivided_sum_stays_in_range_and_is_undone_exactly() -> None:
    expected = torch.tensor([-7.0] * 3 + [-30000.0] * 6)
    for first, values, second, accumulated in run_ranks(2, predivided):
        assert not first.skipped
        assert not second.skipped
        assert torch.equal(values.sort().values, expected.sort().values)
        assert torch.equal(accumulated.sort().values, expected.sort().values)
        assert first.grad_norm == pytest.approx((6 * 30000.0**2 + 3 * 49) ** 0.5, rel=1e-6)
